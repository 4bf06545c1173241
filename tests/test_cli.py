"""The command line: help, completion, what is typed arrives as typed, a mistake is one line and exit code 2."""

import errno
import io
import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from importlib import import_module

import pytest

from lm import __version__
from lm.cli import COMMANDS, command_line, train
from lm.cli.arguments import CONFIGS, kinds_of, parse
from lm.cli.compose import compose
from lm.cli.evaluate import EvaluateConfig
from lm.cli.generate import GenerateConfig
from lm.cli.help import CHOSEN_FROM, USUAL
from lm.cli.main import report_error
from lm.config import RunConfig
from lm.errors import UserError
from lm.lab.ablation.question import AblateConfig
from lm.lab.commands import ablate
from lm.system.terminal import printable
from tests.helpers.ablation_folder import write_run_dir
from tests.helpers.tiny import TEXT, WHOLE_RESULT


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, a run, and configurations of the user."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("my.txt", "a,b.txt", "books/one.txt", "${x}.txt", "~old.txt", "notes.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(TEXT * 4)
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "utf16.txt").write_bytes("ab".encode("utf-16le"))
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "report.pdf").write_bytes(b"%PDF" + b"e" * 9000)
    (folder / "configs/model").mkdir(parents=True)
    (folder / "configs/model/bad.yaml").write_text("n_layers: [")
    (folder / "configs/model/misspelt.yaml").write_text("n_layer: 3")
    write_run_dir(folder / "runs/young", RunConfig())
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


# a command line -> what its one line of error names
MISTAKES = """
    trian my.txt -> did you mean lm-lab train my.txt?
    train --data my.txt -> data=text data.path=my.txt
    train --max-iters=100 my.txt -> trainer.max_steps=100
    train my.txt batch_size=4 -> data.batch_size=4
    train my.txt every=3 -> checkpoint.every=3 or validation.every=3 or diagnostics.every=3?
    train sead=1 -> did you mean seed=1?
    train tie_word_embeddings=false -> did you mean head=CHOICE (tied,
    train resume=runs/a -> did you mean run_dir=runs/a?
    train optimizer=sgd -> did you mean optim=CHOICE (adamw,
    train my.txt data.max_bytes=1000 -> data.max_bytes=1000: leaves 1,000 bytes
    train report.pdf data=text -> report.pdf: is a PDF
    train runs -> data.path=runs: a folder without files; runs and hidden files in it are left out
    train mine.yaml -> mine.yaml: no such file
    train my.tx -> did you mean my.txt?
    train gone.txt -> gone.txt: is a link to nowhere, which does not exist
    train my.txt untied -> head=untied
    train my.txt lm_text -> lm_text: no such file
    train my.txt smoke -> ablation=smoke?
    train my.txt lm_eval=lm_text -> lm_eval: no such key
    train ${x}.txt trainer.max_steps=x -> trainer.max_steps=x: Value 'x'
    train ~old.txt trainer.max_steps=x -> trainer.max_steps=x: Value 'x'
    train my.txt a,b.txt -> data.val_path=FILE
    train my.txt data.path=a,b.txt -> my.txt: is a second text
    train runs/young -> run_dir=runs/young
    train run_dir=runs/yuong -> run_dir=runs/young
    train run_dir=nothere -> run_dir=nothere: no such run; data=stdlib
    train my.txt model =tiny -> without spaces around the =
    train model=smal -> model=smal: no such config; choose one of
    train experiment=../x -> experiment=../x: no such config; choose one of
    train my.txt --optim.lr=0.1 -> did you mean optim.lr=0.1?
    train my.txt trainer.max_steps = 5 -> without spaces around the =
    train my.txt model.norm=none -> has no use with model.norm=none; expected
    train my.txt experiment=none head.kind=untied -> see configs/head/
    train data=text data.path= -> data.path=: expected data.path=FILE with data.source=text
    train --config-name=smal -> --config-name=smal: the main config is fixed; --config-dir=DIR
    train data=mine.txt -> data=text data.path=mine.txt
    train my.txt trainer.max_steps=1e4 -> trainer.max_steps=1e4: Value '10000.0'
    train +model.n_layer=3 -> did you mean model.n_layers=3?
    train optim.lr=0,01 -> --multirun
    train ~optim.lr -> optim.lr
    train optim.betas=[0.9 -> optim.betas=[0.9
    train prompts=[a -> prompts=[a
    train prompts=a -> prompts=a: expected a list, as in 'prompts=[a]'
    train seed=${nothing} -> Interpolation key
    train logger.wandb.project=a -> logger=wandb
    train data=text -> data.path
    train head.kind=untied head.head_std=0.01 head.head_lr_multiplier=1 -> head.name=tied
    train init_from=none -> init_from=none
    train data=json data.path=. -> data.path=.: a folder without .json
    train data=hub data.path=./configs -> data.path=./configs:
    train tokenizer=file tokenizer.path=absent -> tokenizer.path: absent: No such file
    train my.txt trainer.max_steps=5 max_tokens=9 -> trainer.max_steps=5 max_tokens=9: expected one length
    train -m my.txt trainer.max_epochs=1 trainer.max_steps=5,6 -> expected one length
    train init_from=base --cfg job -> init_from=base: is read after --cfg
    train -m my.txt data.max_bytes=2000,100000 -> different recipes
    train --config-dir absent -> absent
    train --config-dir configs model=bad -> bad
    train --config-dir configs model=misspelt -> model.n_layer
    train -m trainer.devices=2 seed=0 -> error: trainer.devices=2
    train -m run_dir=x seed=0 -> error: run_dir=x
    train -m head=absent,tied -> error: head=absent
    generate --temp 0.8 hello -> temperature=0.8
    generate run_dir=. prompt=\udce9 -> prompt=
    generate folder=x -> folder: no such key
    generate run_dir=x prompt=x temperature=0,7 -> temperature=0,7: Value '0,7'
    generate run_dir=x prompt=x seed=1 -> seed=1: has no use with temperature=0
    generate run_dir=x prompt=x top_k=[1 -> top_k=[1
    generate run_dir=x my.txt -> prompt_file=my.txt
    generate prompt=x -> error: run_dir: there is no finished run
    generate prompt=x b -> second prompt
    generate * hello -> there is no finished run
    generate runs/yuong hello -> runs/yuong: no such run; a prompt is given as prompt=WORDS
    generate . explain runs/yuong -> runs/yuong: no such run
    generate run_dir=x -> prompt_file=FILE
    generate . ROMEO: -> run_dir=.
    generate run_dir=absent runs/yuong -> run_dir=absent
    generate run_dir=absent -- -hello -> absent
    generate run_dir=. prompt_file=absent -> absent
    generate run_dir=. prompt_file=latin.txt -> latin.txt
    generate run_dir=. prompt_file=utf16.txt -> utf16.txt: has a zero byte
    generate . self.x=1 -> self.x: no such key; --help shows the settings (a prompt: prompt=self.x=1)
    generate . temperatur=1 -> did you mean temperature=1? (a prompt: prompt=temperatur=1)
    evaluate my.txt books/one.txt -> 'texts=[my.txt,books/one.txt]'
    evaluate mine.txt -> mine.txt: no such file
    evaluate my.txt data.val_path=my.txt -> data.val_path: no such key; did you mean data=text data.path=my.txt?
    evaluate batch_size=4 -> batch_size: no such key; --help shows the settings
    evaluate texts=[my.txt] data.max_bytes=9 -> data.max_bytes=9: is for one text
    evaluate texts=[my.txt] my.txt -> is for one text
    evaluate run_dir=x data.path=y -> data.path=y
    report run_dir=. -> run_dir=.
    report run_dir=. json=true -> json=True: has no use with run_dir
    report run_dir=. exit_code=verdict -> exit_code=verdict: has no use with run_dir
    report run_dir=absent -> absent/config.yaml: no such file
    report run_dir=. output_dir=. -> output_dir
    report rows=absent.csv -> rows=absent.csv: no such file
    report my.txt -> output_dir=my.txt: holds no ablation.json
    train my.txt run_dir=runs/young/inner -> run_dir=runs/young/inner: lies in the run
    ablate my.txt model.d_ff=64 -> as in model.d_ff=64,OTHER
    ablate ablation=smoke ablation.overrides=[seed=1] -> seed=1: expected no such setting
    ablate -m seed=1,2 -> -m
    ablate model.dropout=0,0.1 optim.lr=0.1,0.2 -> several settings
    ablate model.dropout=0,0.1 seeds=x -> ablation.seeds=x: expected how many
    ablate model.dropuot=0,0.1 -> model.dropuot
    ablate seeds=3 my.txt -> ablation: no question is given
    ablate model.d_ff=100 my.txt ablation.seeds=3 -> model.d_ff=100: one value is no question
    ablate ablation=smoke head=tied,untied -> several values beside a question
    ablate model.dropout=0.1,0.1 -> model.dropout
    ablate head=tied,untied ~ablation.arms.tied -> write a YAML file
    ablate head=tied,untied ablation.overrides=[a] -> write a YAML file
    ablate head=tied,untied ablation.equivalence_margin=1% -> ablation.equivalence_margin=1%:
    ablate head=tied,untied ablation.looks=3 -> expected a list, as in 'ablation.looks=[3]'
    ablate head=tied,untied looks=3,5 -> did you mean 'ablation.looks=[3,5]'?
    ablate head=tied,untied seeds=-1 -> ablation.seeds=-1: expected how many
    ablate head=tied,untied seeds=range(3) ablation.baseline=3 -> ablation.baseline=3
    ablate head=tied,untied seeds=0,1,1 -> different
    ablate head=tied,untied seed=0,1,2 -> seeds=5 or 'seeds=[1,2,3]'
    ablate head=tied,untied num_seeds=3 -> did you mean seeds=3?
    ablate head=tied,untied out_dir=x -> did you mean output_dir=x?
    ablate head=tied,untied workers=1,2 -> workers=1,2: expected one value
    ablate head=tied,untied ablation.tune=a,b -> tune
    ablate head=tied,untied ablation.tun=true -> ablation.tune=true
    ablate head=tied,untied seeds=[1,2 -> seeds=[1,2
    ablate head=tied,untied overrides=[optim.lr=0.5] -> expected each setting of all arms by itself
    ablate head=tied,untied folds=5 -> ablation.folds=5: expected true or false
    ablate confirm=nowhere -> confirm=nowhere: no such folder
    ablate ablation=smoke head=untied -> error: ablation.arms.tied: head=tied
    ablate ablation=smoke seed=3 -> error: seed=3: expected no such setting; the seeds of an ablation
    ablate ablation=smoke max_minutes=1 -> error: ablation.arms.tied: max_minutes=1
    ablate ablation=smoke ~ablation.arms.untied -> error: ablation.arms: has 1
    ablate ablation=smoke ablation.arms.untied=['model.n_layer=3'] -> ablation.arms.untied: model.n_layer=3: Key
    ablate ablation=smoke ablation.arms.untied=['seed=3'] -> error: ablation.arms.untied: seed=3
    ablate ablation=smoke ablation.arms.untied=['trainer.max_steps=9'] -> ablation.arms.untied: trainer.max_steps=9
    ablate ablation=smoke ablation.arms.untied=['trainer.devices=2'] -> error: ablation.arms.untied: trainer.devices
    ablate ablation=smoke ablation.metric=loss -> error: ablation.metric=loss: choose one of val_loss, val_bpb, val_top1
    ablate ablation=smoke ablation.metric=val_top1 ablation.equivalence_margin=null -> equivalence_margin: is missing
    ablate ablation=smoke ablation.equivalence_margin=0 -> error: ablation.equivalence_margin=0.0
    ablate ablation=smoke ablation.primary=[tied] -> error: ablation.primary: tied
    ablate ablation=smoke +ablation.baselines={untied:untied} -> error: ablation.baselines.untied=untied
    ablate ablation=smoke ablation.seeds=[0,1,0] -> error: ablation.seeds=[0, 1, 0]
    ablate ablation=smoke ablation.seed_offsets.untied=1 -> error: ablation.seed_offsets.untied=1
    ablate ablation=smoke seeds=3 ablation.looks=[3,2] -> error: ablation.looks=[3, 2]
    ablate ablation=smoke seeds=11 folds=true my.txt -> error: ablation.seeds: 11 seeds need 11 parts of the text
    ablate ablation=smoke +ablation.contrasts.it={untied:1,tied:-0.5} -> ablation.contrasts.it={'untied': 1, 'tied': -
    ablate ablation=smoke +ablation.contrasts.it={untied:1,tid:-1} -> error: ablation.contrasts.it=tid
    ablate ablation=smoke +ablation.match_parameters.untied=model.dropout -> match_parameters.untied=model.dropout
    ablate ablation=smoke +ablation.match_parameters.tied=model.d_ff -> error: ablation.match_parameters: tied
    ablate ablation=smoke tune=data.val_fraction my.txt -> error: ablation.tune=data.val_fraction
    ablate ablation=smoke tune=model.dropout my.txt -> error: ablation.tune=model.dropout: expected a setting that is
    ablate ablation=smoke slurm.parameters.job_name=x -> slurm.parameters.job_name
    ablate ablation=smoke slurm.parameters.dependency=x -> slurm.parameters.dependency
    ablate ablation=smoke slurm.parameters={additional_parameters:{job-name:x}} -> slurm.parameters.job_name
    ablate ablation=smoke slurm.parameters={additional_parameters:{dependency:x}} -> slurm.parameters.dependency
    look run_dir=absent -> error: run_dir=absent
    look run_dir=[absent, -> error: run_dir
    look folder=absent -> error: folder=absent
    look port=70000 -> error: port=70000
    runs plot=curves.pdf -> error: plot=curves.pdf:
    runs csv=none/a.csv -> error: csv=none/a.csv:
    runs csv=my.txt -> error: csv=my.txt: expected a new file
    runs where=seed -> error: where=seed: expected a condition
    runs where=seed=0 -> error: where=seed=0: expected a condition
    runs where=head.name=="tied" -> with _ for each dot of a name
    runs where=val_loss<low -> where=val_loss<low: UndefinedVariableError: name 'low' is not defined
    runs where=val_loss< -> where=val_loss<: SyntaxError
    runs books -> error: folder=books: holds no runs
"""


@pytest.mark.parametrize("row", [row.strip() for row in MISTAKES.strip().splitlines()])
def test_a_mistake_is_one_line_exit_code_2_and_leaves_nothing(row, lab, place):
    line, named = row.split(" -> ")
    before = {*place.rglob("*")}
    code, out, error = lab(*line.split())
    *said, last = error.splitlines()
    assert (code, out) == (2, ""), error
    assert all(re.fullmatch(r".* has .*, so its recipe is experiment=\w+|reading .*", text) for text in said), error
    assert last.startswith("error: ")
    assert named in last
    of_hydra = {place / "runs", *place.glob("runs/.sweep"), *place.glob("runs/.sweep/*")}
    assert {*place.rglob("*")} - of_hydra == before - of_hydra


# --- values arrive as typed

ODD = ["a=b, (c) [d] {e}: 'f' \"g\".txt", "it's", "a b", "$HOME", "~/x", "null.txt", "a\\b", "é\u2028x", "a\\", "null"]
ODD += ["", "def f(x, y):", "${seed}", "???", "[1, 2", "{", "'", '"', "\n", "=", "--help"]


def test_text_arrives_as_typed_in_a_flat_command():
    for value in ODD:
        config = parse(GenerateConfig, [f"run_dir={value}", f"prompt={value}", "temperature=1", "seed=7"])
        run_dir = None if value == "null" else os.path.expanduser(value)
        assert (config.run_dir, config.prompt, config.seed) == (run_dir, value, 7)
    assert parse(GenerateConfig, ["run_dir=x", "top_k=null"]).top_k is None
    assert parse(EvaluateConfig, ["run_dir=x", "texts=null"]).texts is None


def test_an_ablation_passes_on_what_train_is_to_understand():
    words = ["head=untied", "+prompts=[${y}]", "data.path=it's b", "experiment=chars", "~logger"]
    own = ["ablation=smoke", "ablation.seeds=[7]", "workers=1", "output_dir=a b"]
    own += ["slurm.parameters={qos: long, account: lab}", "ablation.seed_offsets.untied=500"]
    passed, is_line = ablate.question_words([*words, *own])
    assert not is_line
    assert passed[:4] == [*own[:3], "output_dir='a b'"]
    config = compose("ablate", [*passed, "ablation.name=smoke"], AblateConfig)
    assert config.overrides == ["head=untied", "+prompts=[${y}]", "data.path='it\\'s b'", "experiment=chars", "~logger"]
    assert (config.ablation.name, config.ablation.seeds, config.workers) == ("smoke", [7], 1)
    assert (config.slurm.parameters, config.ablation.seed_offsets) == (
        {"qos": "long", "account": "lab"},
        {"untied": 500},
    )


@pytest.mark.slow
def test_a_failed_job_is_reported_and_the_others_go_on(command, monkeypatch):
    def fail(run):
        raise MemoryError if run.seed else ZeroDivisionError

    monkeypatch.setattr("lm.training.train.train", fail)
    code, _, error = command("train", "-m", "seed=0,-1,2", "head=untied")
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code == 2
    for line, words, seed in zip(lines, ("ZeroDivisionError", "seed=-1", "out of memory"), (0, -1, 2), strict=True):
        assert words in line
        assert line.endswith(f"(job: seed={seed} head=untied)")


def test_jobs_that_end_in_one_directory_are_one_row(command, monkeypatch, tmp_path):
    """The number of threads is not in the name of a run; a column of threads would show one run twice."""

    def train(run):
        return tmp_path / str(run.seed), WHOLE_RESULT | {"seed": run.seed}

    monkeypatch.setattr("lm.training.train.train", train)
    code, out, error = command("train", "-m", "threads=1,2", "seed=0,1", "head=untied")
    assert (code, error.count("and no other run")) == (0, 2), error
    *_, head, row = out.strip().splitlines()
    assert (head.split()[0], row.split()[0]) == ("seeds", "2")


# --- where exceptions end


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (errno.ENOSPC, "some/file", 1),
        (errno.EIO, None, 1),
        (errno.ENOLCK, "some/file", 1),
        (errno.EACCES, "some/file", 2),
    ],
)
def test_an_error_of_a_file_is_one_line(number, name, code, capsys):
    """Exit code 1 where the machine is at fault, 2 where another path or permission mends it."""
    assert report_error(OSError(number, os.strerror(number), name)) == code
    error = capsys.readouterr().err
    assert error.startswith(f"error: {f'{name}: ' if name else ''}{os.strerror(number)}")
    assert error.count("\n") == 1


def test_a_bug_shows_its_traceback_and_to_debug_a_mistake(command, monkeypatch):
    def fail(args):
        raise FileNotFoundError

    monkeypatch.setattr(train, "run", fail)
    code, _, error = command("train")
    assert (code, error.splitlines()[0]) == (1, "Traceback (most recent call last):")
    monkeypatch.setenv("LM_DEBUG", "1")
    code, _, error = command("generate", "run_dir=absent", "prompt=x")
    assert (code, error.splitlines()[0]) == (2, "Traceback (most recent call last):")
    assert error.splitlines()[-1].startswith("error: run_dir")


def test_too_little_memory_is_one_line(capsys):
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    no_torch = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    for error in (caught.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), no_torch):
        assert report_error(error) == 1
        assert capsys.readouterr().err.startswith("error: out of memory")


def test_what_steers_a_terminal_is_escaped_and_spaces_and_joiners_of_a_language_stay(capsys):
    report_error(UserError("a\x1b[2J\nb"))
    assert capsys.readouterr().err == "error: a\\x1b[2J b\n"
    letters = "\u3000今天\xa0: «\u202fViens\xa0!\u202f» \u0645\u06cc\u200c\u062e क्\u200dष a\xadb\u200e\u200f\t\n"
    assert printable(letters) == letters
    for steering in "\x1b\r\x85\u2028\u202e\u2066\ue000\ud800\U000e0041\u0378":
        assert printable(steering) == steering.encode("unicode_escape").decode()


def test_the_commands_after_a_run_have_its_prompt_verbatim_and_show_no_secret(tmp_path):
    def commands(*prompts, path="my.txt", **config):
        result = {"samples": [{"prompt": prompt} for prompt in prompts]}
        data = {"source": "text", "path": path}
        lines = train.next_commands(tmp_path / "lr=0.1", result, {"data": data, "init_from": None} | config)
        return [shlex.split(line) for line in lines]

    for prompts, pasted in (
        (["Dan dit\xa0: «"], "prompt=Dan dit\xa0: «"),
        (["a\x1bb", "c d"], "c d"),
        (["a\x1bb"], "Once upon a time"),
    ):
        assert commands(*prompts)[0][-3:-1] == [f"run_dir={tmp_path}/lr=0.1", pasted]
    assert commands(model={"ffn": "mine.ReGLU"})[1][-1] == "classes=[mine.ReGLU]", "a pasted command may import it"
    for path, is_shown in {
        "my.txt": True,
        "gone.txt": False,
        "notes.yaml": False,
        "https://me:pw@h/a.txt?sig=x": False,
    }.items():
        assert any(path in words for words in commands(path=path)) == is_shown


def test_what_output_cannot_write_is_escaped(command, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(train, "run", lambda args: print("é 今"))
    monkeypatch.setattr(sys, "stdout", stream)
    assert command("train")[0] == 0
    assert stream.buffer.getvalue() == "é \\u4eca\n".encode("latin-1")


def test_what_a_signal_breaks_is_interrupted(command, monkeypatch):
    """Code that a signal breaks off may raise something else afterwards."""

    def broken(args):
        with suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setattr(train, "run", broken)
    assert command("train") == (143, "", "interrupted\n")


# --- lm-lab, --help and completion


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_the_command_alone_lists_its_commands(words, lab):
    code, out, _ = lab(*words)
    assert code == 0
    assert re.findall(r"^  (\w+) +\S", out, re.MULTILINE) == list(COMMANDS)


def test_a_hint_starts_as_the_command_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("python", "lm-lab"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    for started, bare, by_path in [
        (["bin/python", "scripts/train.py"], "python scripts/look.py a", "bin/python scripts/look.py a"),
        (["bin/python", "-m", f"{tmp_path}/lm/__main__.py"], "python -m lm look a", "bin/python -m lm look a"),
        (["python", "bin/lm-lab"], "lm-lab look a", "bin/lm-lab look a"),
    ]:
        monkeypatch.setattr(sys, "orig_argv", started)
        monkeypatch.setattr(sys, "argv", [started[-1]])
        monkeypatch.setenv("PATH", f"{tmp_path}/bin")
        assert command_line("look", "a") == bare
        monkeypatch.setenv("PATH", "/nowhere")  # the environment is not activated
        assert command_line("look", "a") == by_path


def test_lm_lab_and_its_scripts_have_one_version(command, lab):
    assert lab("--version") == command("train", "--version") == (0, f"lm-lab {__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_each_setting_and_group(name, command):
    code, out, error = command(name, "--help", *["all"] * (name in USUAL))
    assert (code, error) == (0, "")
    module = import_module(COMMANDS[name].module)
    kinds = kinds_of(module.SCHEMA).keys() - getattr(module, "HIDDEN", ())
    leaves = {key for key in kinds if not any(other.startswith(f"{key}.") for other in kinds)}
    assert leaves <= {*re.findall(r"^  ([\w.]+)=", out, re.MULTILINE)}
    for group in CHOSEN_FROM.get(name, ()):
        assert {path.stem for path in (CONFIGS / group).glob("*.yaml")} <= {*re.findall(r"\w+", out)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lm-lab tr", " ".join(COMMANDS)),
        ("lm-lab train head=tied_", "head=tied_naive head=tied_projected head=tied_scaled"),
        ("lm-lab export ", "run_dir= output_dir= format= dtype= title= classes="),
    ],
)
def test_the_console_command_completes(line, expected, lab, monkeypatch):
    monkeypatch.setenv("COMP_LINE", line)
    code, out, error = lab("-sc", "query=bash")
    assert (code, sorted(out.split()), error) == (0, sorted(expected.split()), "")
