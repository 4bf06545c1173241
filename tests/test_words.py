"""What people type first: everyday words, flags, a file, a folder or a prompt by itself, a command's other name."""

import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from conftest import TEXT, TINY_RUN, Outcome
from lm.cli.aliases import COMMAND_WORDS, WORDS
from lm.cli.mistakes import kinds_of

import lm
from lm.cli import train as train_command
from lm.cli.compose import compose
from lm.cli.main import COMMANDS
from lm.config import DataConfig, RunConfig
from lm.folder import newest_run
from lm.training.train import train
from tests.helpers.ablation_folder import write_run_dir
from tests.helpers.runs import composed

Command = Callable[..., Outcome]
QUESTION = """question: Is dropout worth it?
arms: {without: [], dropout: [model.dropout=0.1]}
baseline: without
seeds: [0, 1]
equivalence_margin: 0.01
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with texts, tables, a question, and a run that is not finished."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.txt", "my text.txt", "a,b.txt", "~kept", "books/one.txt", "a=b.txt", "-dash.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT * 4)
    for name in ("my.csv", "my.jsonl", "my.parquet.gz", "rows/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "my.csv").write_text("\ntitle,the body\n1,2\n")
    (tmp_path / "my.jsonl").write_text('{"title": 1, "text": "a"}\n')
    (tmp_path / "chats.jsonl").write_text('{"turns": [{"text": "a"}]}\n')
    (tmp_path / "names.json").write_text('["a"]')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/dropout.yaml").write_text(QUESTION)
    write_run_dir(tmp_path / "runs/young", RunConfig(data=DataConfig(source="text", path="my.txt")))
    return tmp_path


TEXT_OF = "data=text data.path=my.txt"
ANSWERS = {  # what is typed -> what the one line about it says to type
    "train --data my.txt": TEXT_OF,
    "train data.path=my.txt": TEXT_OF,
    "train data=my.txt": TEXT_OF,
    "train dataset=my.csv": "data=csv data.path=my.csv data.column=title or 'data.column=the body'",
    "train my.jsonl": "data=json data.path=my.jsonl data.column=text",
    "train my text.txt": "data=text 'data.path=my text.txt'",
    "train a=b.txt": "data=text data.path=a=b.txt",
    "train rows": "its first row has no text",
    "train my.parquet.gz": "my.parquet.gz: cannot be read as parquet",
    "train my.txt a,b.txt": "data.val_path=a,b.txt",
    "train my.txt data=text data.path=a,b.txt": "my.txt: is a second text",
    "train mine/dropout.yaml": "lm-lab ablate mine/dropout.yaml",
    "train runs/young": "run_dir=runs/young",
    "train absent.txt": "absent.txt: no such file",
    "train my.txt vocab=500": "tokenizer=bpe tokenizer.vocab_size=500",
    "train my.txt val_split=0.2": "data.val_fraction=0.2",
    "train my.txt test=a.txt": "data.val_path=a.txt",
    "train my.txt steps=1,000": "trainer.max_steps=1000",
    "train --data=my.txt --lr=0.01 --batch-size=4": "data=text data.path=my.txt optim.lr=0.01 data.batch_size=4",
    "train -dash.txt": "./-dash.txt",
    "evaluate val=my.txt": TEXT_OF,
    "report run=runs/young": "run_dir=runs/young",
    "generate top-k=5 hello": "top_k=5",
    "generate -- hello": "run_dir=runs/young",
    "train my.txt hours=1.5": "max_minutes=90",
    "train my.txt -o out": "run_dir=out",
    "train my.txt recipe=chars": "experiment=chars",
    "train my.txt experimnt=chars": "experiment=chars",
    "train my.txt num_workers=2": "threads=2",
    "train my.txt max_tokens=100k": "max_tokens=100000",
    "ablate head=tied,untied my.txt margin=1%": "margin=0.01",
    "ablate head=tied,untied my.txt seeds=3,4": "seeds=[3,4]",
    "ablate my.txt model.d_ff=64": "lm-lab ablate head=tied,untied my.txt",
    "ablate model.dropout=0,0.2 my.txt epochs=3": "trainer.max_steps=91",
    "train --lr 0.01": "optim.lr=0.01",
    "train --lr=0.01 my.txt": "optim.lr=0.01",
    "train my.txt lr=0.1 steps=9 seed=1 layers=2": "optim.lr=0.1 trainer.max_steps=9 model.n_layers=2",
    "generate --temp 0.8 --length 9 hello": "temperature=0.8 max_new_tokens=9",
    "train model.layers=3": "model.n_layers=3",
    "train trainer.profiler=simple": "trainer.profiler: no such key",
    "ablate ablation=smoke ablation.plot_over=a": "ablation.plot_over: no such key",
    "train steps 100": "trainer.max_steps=100",
    "train steps=2k": "trainer.max_steps=2000",
    "train dropout=10% my.txt": "model.dropout=0.1",
    "train time=5m my.txt": "max_minutes=VALUE",
    "train wd=null my.txt": "optim.weight_decay=VALUE",
    "ablate lr=1E-3,2e-3 my.txt": "optim.lr=1E-3,2e-3",
    "train seed = 3": "seed=3",
    "train --gpu my.txt": "trainer=gpu",
    "train -r my.txt": "-r: a setting is given as key=value",
    "train my.tx": "my.txt",
    "train chats.jsonl": "its first row has no text",
    "evaluate names.json": "its first row has no text",
    "train minutes=4": "max_minutes=4",
    "train epochs=3 my.txt tokenizer=byte": "trainer.max_steps=91",
    "train --epochs 3 my.txt data.seq_len=64 tokenizer=byte": "trainer.max_steps=182",
    "train epochs=3 my.txt batch=32 tokenizer=byte": "trainer.max_steps=23",
    "train epochs=0 my.txt": "max_tokens=N",
    "train epochs=3 my.txt seed=no": "max_tokens=N",
    "train device=cuda:1": "trainer.accelerator=cuda",
    "train tie_weights=false": "head=untied",
    "train wandb=true": "logger=wandb",
    "train my.txt bf16": "trainer.precision=bf16-mixed",
    "train my.txt --dtype float16": "trainer.precision=bf16-mixed",
    "train my.txt --quiet": "trainer.enable_progress_bar=false",
    "train my.txt gradient_checkpointing=true": "activation_checkpointing=true",
    "train my.txt val=a,b.txt": "data.val_path=a,b.txt",
    "train my.txt activation=gelu": "model.ffn=gelu",
    "train my.txt --rope": "model.position=rope",
    "train help": "--help",
    "train run_dir=runs/yuong threads=1": "run_dir=runs/young",
    "train run_dir=runs/x --resume": "lm-lab train run_dir=runs/x",
    "train my.txt lr=0.01 batch_size=16 dropout=0.1": "optim.lr=0.01 data.batch_size=16 model.dropout=0.1",
    "ablate model.drop=0,0.2 my.txt": "model.dropout=0,0.2",
    "train temperature=0.7 my.txt": "lm-lab generate --help",
    "generate hello seed=1:30": "expected a whole number",
    "evaluate my.txt data=text data.val_fraction=0.3": "data.val_fraction=0.3: is for training",
    "look books folder=runs": "books: is a second folder",
    "report runs/young run_dir=books": "runs/young: is a second run",
    "report runs/young exit_code=verdict": "exit_code=verdict: expected output_dir=DIR",
    "report runs/young json=true": "json=true: expected no such key",
    "ablate head=tied,untied ablation.seeds=[-1]": "ablation.seeds=-1",
    "train prompt=ROMEO:": "'prompts=[ROMEO:]'",
    "train 'out=my run'": "'run_dir=my run'",
    "train --resume": "lm-lab train run_dir=runs/young",
    "train resume=runs/young": "run_dir=runs/young",
    "train ablation=smoke": "lm-lab ablate ablation=smoke",
    "train model=tiny": "gpt2, medium, small",
    "generate": 'lm-lab generate "Once upon a time"',
    "generate hello": "run_dir=runs/young",
    "generate --temp 0.8 hello": "temperature=0.8",
    "generate greedy=true hello": "temperature=0",
    "export quantize=q8_0": "dtype=q8_0",
    "export runs/young m.gguf": "format=gguf output_dir=m",
    "generate my.txt": "prompt_file=my.txt or prompt=my.txt",
    "look nothing": "nothing: no such file",
    "look my.txt": "my.txt: a setting is given as key=value",
    "ablate nothing.yaml": "KEY=A,B or FILE.yaml",
    "runs filter=seed=0": "where=seed=0",
    "generate -p hello": "prompt=hello",
    "generate runs/yuong hello": "runs/yuong: no such run",
    "generate run=X": "run_dir=X",
    "generate '' runs/absent/x": "run_dir=runs/young",
    "generate x=1": '"prompt=x=1"',
    "generate runs/young run_dir=x hello": "runs/young: is a second run",
    "generate hello prompt=you": '"prompt=hello you"',
    "evaluate my.txt a=b.txt": "data=text data.path=a=b.txt",
    "evaluate my.txt books/one.txt": "'texts=[my.txt,books/one.txt]'",
    "export absent": "output_dir=absent",
    "export format=page output_dir=p.html": "output_dir=p",
    "report books": "output_dir=books",
    "ablate": "lm-lab ablate ablation=smoke",
    "ablate --config-dir mine": "lm-lab ablate ablation=smoke",
    "ablate head=tied,untied minutes=1 my.txt": "max_minutes=1",
    "ablate tied untied": "head=tied,untied",
    "ablate head=tied my.txt": "head=tied: is one value",
    "ablate smoke": "ablation=smoke",
    "ablate margin=0.01": "ablation.equivalence_margin=0.01",
    "ablate seeds=3": "'ablation.seeds=[0,1,2]'",
    "ablate resume=true": "the same command",
    "ablate ablation=mine/dropout.yaml": "lm-lab ablate mine/dropout.yaml",
    "ablate ablation=smoke mine/dropout.yaml": "is a second question",
    "my.txt seed=1": "lm-lab train my.txt seed=1",
    "lr=0.1 my.txt": "lm-lab train lr=0.1 my.txt",
    "mine/dropout.yaml": "lm-lab ablate mine/dropout.yaml",
    "runs/young": "lm-lab look runs/young",
    "chat runs/young": "lm-lab generate interactive=true runs/young",
    "sample hello": "lm-lab generate hello",
    "compare tied untied": "lm-lab ablate tied untied",
    "sweep head=tied,untied": "lm-lab train -m head=tied,untied",
    "resume": "lm-lab train run_dir=runs/young",
    "list": "lm-lab runs",
    "doctor": "lm-lab --help",
}


@pytest.mark.parametrize("line", ANSWERS)
def test_a_first_try_is_answered_by_a_line_to_paste(line: str, lab: Command, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    code, out, error = lab(*shlex.split(line))
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert re.search(rf"(^|[ :]){re.escape(ANSWERS[line])}($|[\s,;?:])", error), error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_what_is_pasted_for_train_composes() -> None:
    for answer in dict.fromkeys(answer for line, answer in ANSWERS.items() if line.startswith("train")):
        words = [word.replace("max_tokens=N", "max_tokens=9") for word in shlex.split(answer.partition(" or ")[0])]
        if all("=" in word and not re.search("VALUE|val_path", word) for word in words):
            compose("train", words, RunConfig)


def test_the_words_mean_settings_and_commands_that_exist() -> None:
    schemas = [import_module(f"lm.cli.{name}").SCHEMA for name in COMMANDS]
    kinds = {name for schema in schemas for name in kinds_of(schema)}
    assert {name for row in WORDS for name in row.split()} <= kinds
    assert {row.split()[0] for row in COMMAND_WORDS} <= COMMANDS.keys()
    assert not {*COMMANDS} & {word for words in COMMAND_WORDS.values() for word in words.split()}
    with pytest.raises(AttributeError, match="lm-lab train"):
        lm.train  # noqa: B018


@pytest.mark.parametrize("word", ["my text.txt", "a,b.txt", "~kept", "books", "*.txt", "https://x.y/z?a=b"])
def test_a_file_folder_glob_or_address_by_itself_is_the_text(word: str, command: Command) -> None:
    code, out, error = command("train", "experiment=none", word, "--cfg", "job")
    assert (code, error) == (0, "")
    data = yaml.safe_load(out)["data"]
    assert (data["source"], data["path"]) == ("text", word)
    data = yaml.safe_load(command("train", "experiment=none", "data=csv", word, "--cfg", "job")[1])["data"]
    assert (data["source"], data["path"]) == ("csv", word), "where a kind is chosen, it gets the path alone"
    code, out, _ = command("ablate", "mine/dropout.yaml", word, "--cfg", "job")
    asked = yaml.safe_load(out)
    assert (code, asked["overrides"]) == (0, ["data=text", f"data.path={word}"])
    assert (asked["ablation"]["name"], [*asked["ablation"]["arms"]]) == ("dropout", ["without", "dropout"])
    swept = train_command.prepare(
        Namespace(overrides=[word, "experiment=none", "seed=0,1", "~logger"], multirun=True, config_dir=None)
    )
    assert swept == ["experiment=none", "seed=0,1", "~logger", "data=text", f"data.path='{word}'"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("words")
    (top / "my.txt").write_text(TEXT)
    words = [*TINY_RUN, "trainer.max_steps=2", f"data.path={top}/my.txt", f"run_dir={top}/run"]
    return train(composed(*words))[0]


@pytest.fixture
def runs(finished: Path, folder: Path) -> Path:
    """Runs that were finished one after the other, and last of all one of an ablation."""
    for seconds, name in enumerate(("a=1/old", "new", "question/cells/last")):
        shutil.copytree(finished, folder / "runs" / name)
        os.utime(folder / "runs" / name / "result.json", (2e9 + seconds, 2e9 + seconds))
    (folder / "runs/question/ablation.json").touch()
    return folder / "runs"


def test_the_newest_run_is_the_one_that_was_finished_last(runs: Path) -> None:
    assert newest_run(runs) == runs / "new"
    assert newest_run(runs, finished=False) == runs / "young"
    assert newest_run(runs / "absent") is None
    os.utime(runs / "new/config.yaml", (3e9, 3e9))
    os.utime(runs / "a=1/old/result.json", (3e9, 3e9))
    assert newest_run(runs) == runs / "a=1/old"


@pytest.mark.slow
def test_commands_take_the_newest_or_the_named_run(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, note = ["max_new_tokens=2", "threads=1"], "run_dir=runs/new: the newest finished run below runs/\n"
    code, out, error = command("generate", "def", *few, "f1(x)")
    assert (code, out[:9], error) == (0, "def f1(x)", note)
    for words in (["def", "f1(x)", "runs/a=1/old"], ["prompt=def f1(x)", "runs/new"], ["runs/n*", "def", "f1(x)"]):
        assert command("generate", *words, *few) == (0, out, "")
    assert command("generate", "runs/new", "runs/a=1/old", "d", *few)[1].count("=== ") == 2

    code, own, error = command("evaluate", "threads=1")
    assert (code, error.startswith(note)) == (0, True)
    assert command("evaluate", "runs/new", "threads=1")[1] == own != command("evaluate", "my.txt", "threads=1")[1]
    assert command("export", "output_dir=out")[2] == note
    assert command("export", "runs/new", "output_dir=other")[2] == ""
    assert command("report", "runs/new")[:2] == (0, "runs/new/report.html: finished\n")
    assert "output_dir" not in command("report", "runs/question")[2].partition("ablation.json")[0]

    code, _, error = command("generate", "runs/question", "d")
    assert (code, "did you mean run_dir=runs/question/cells/last?" in error) == (2, True), error

    class Server:
        def __init__(self, places: Callable[[], dict[str, Path]], *_: object) -> None:
            names.append([*places()])
            raise OSError(0, "taken")

    names: list[list[str]] = []
    monkeypatch.setattr("lm.lab.look.server.LookServer", Server)
    assert note in command("look", "open=false")[2]
    for word in ("runs/young", "runs", "runs/question"):
        command("look", word, "open=false")
    assert names[0] == names[2] == ["new", "a=1/old", "question/cells/last", "young"]
    assert (names[1], names[3]) == (["runs/young"], ["cells/last"])


def test_a_finished_run_is_shown_where_its_text_is_gone_or_far_away(
    finished: Path, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the imports of a training, which take seconds."""
    shutil.copytree(finished, folder / "run")
    config = (folder / "run/config.yaml").read_text()
    monkeypatch.setitem(sys.modules, "lm.training.train", None)
    for text in ("gone.txt", "http://127.0.0.1:9/a.txt"):
        (folder / "run/config.yaml").write_text(re.sub("  path: .*my.txt", f"  path: {text}", config))
        code, out, error = command("train", text, "run_dir=run", "model.n_layers=2")
        assert (code, "validation loss" in out) == (0, True), error
        code, out, error = command("train", text, "run_dir=run", "model.n_layers=3")
        assert (code, "run_dir=run holds another run" in error) == (2, True), error
        for words in ([text], [text, "run_dir=other"], ["data=text", f"data.path={text}"]):
            code, out, error = command("train", *words)
            assert (code, out, error.count("\n"), "run_dir=RUN" in error) == (2, "", 1, True), error
    monkeypatch.delitem(sys.modules, "lm.training.train")
    (folder / "run/result.json").unlink()
    assert "a.txt: could not be downloaded" in command("train", text, "run_dir=run")[2]
