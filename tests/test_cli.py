"""The command line: help, completion, what is typed arrives as typed, a mistake is one line and exit code 2."""

import errno
import gc
import io
import os
import re
import shlex
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Outcome
from hydra.core.override_parser.overrides_parser import OverridesParser

from lm import __version__
from lm.cli import COMMANDS, command_line, train
from lm.cli.arguments import CONFIGS, for_hydra, kinds_of, parse
from lm.cli.compose import compose
from lm.cli.evaluate import EvaluateConfig, parse_arguments
from lm.cli.generate import GenerateConfig
from lm.cli.help import CHOSEN_FROM
from lm.cli.main import report_error
from lm.config import RunConfig
from lm.errors import UserError
from lm.lab.ablation.question import AblateConfig
from lm.lab.commands import ablate
from lm.system.terminal import printable

Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMPOSED = {  # overrides of train -> what the one line about them names
    "sead=1": "did you mean seed=1?",
    "+model.n_layer=3": "did you mean model.n_layers=3?",
    "every=3": "checkpoint.every=3 or validation.every=3 or diagnostics.every=3?",
    "models.n_layers=3": "models",
    "model.n_layers=two": "model.n_layers=two: expected a whole number",
    "data.max_bytes=1e400": "data.max_bytes=1e400: expected a whole number",
    "optim.lr=0,01": "optim.lr=0,01",
    "~optim.lr": "optim.lr",
    "logger=[tensorboard,other]": "logger=other",
    "seed=${nothing}": "nothing",
    "data=text": "data.path",
    "head.kind=untied head.head_std=0.01 head.head_lr_multiplier=1": "head.name=tied",
    "init_from=none": "init_from=none",
    "prompts=[a": "prompts=[a",
}


@pytest.mark.parametrize("words", COMPOSED)
def test_what_cannot_be_composed_is_named_in_one_line(words: str) -> None:
    with pytest.raises(UserError) as caught:
        compose("train", words.split(), RunConfig)
    assert COMPOSED[words] in str(caught.value)
    assert "\n" not in str(caught.value)


REFUSED = {  # a command line -> what its one line of error names
    "train seed=-1": "seed=-1",
    "train -m trainer.devices=2 seed=0": "error: trainer.devices=2",
    "train -m head=absent,tied": "error: head=absent",
    "train -m optim.lr=x seed=0,1": "error: optim.lr=x",
    "train data=hub data.path=./configs": "data=parquet, json or csv data.path=./configs",
    "train data=json data.path=.": "data.path=.: a folder without .json",
    "train tokenizer=file tokenizer.path=absent": "tokenizer.path=absent",
    "train --config-dir absent": "absent",
    "train --config-dir configs model=bad": "bad",
    "train --config-dir configs model=misspelt": "model.n_layer",
    "generate prompt=x": "run_dir",
    "generate run_dir=x prompt=x temprature=1": "did you mean temperature=1?",
    "generate run_dir=x prompt=x temperature=0,7": "temperature=0,7",
    "generate run_dir=x prompt=x top_k=[1": "top_k=[1",
    "generate . ROMEO:": "run_dir=.",
    "generate run_dir=. prompt_file=absent": "absent",
    "generate run_dir=. prompt_file=latin.txt": "latin.txt",
    "generate run_dir=. prompt=\udce9": "prompt=",
    "evaluate run_dir=x data.path=y": "data.path=y",
    "report run_dir=.": "run_dir=.",
    "report run_dir=. output_dir=.": "output_dir",
    "report rows=absent.csv": "rows=absent.csv: no such file",
    "ablate ablation.overrides=[seed=1]": "ablation.overrides=[seed=1]",
    "ablate -m seed=1,2": "-m",
    "ablate model.dropout=0,0.1 optim.lr=0.1,0.2": "several settings",
    "ablate model.dropout=0,0.1 seeds=x": "seeds=x",
    "ablate model.dropuot=0,0.1": "model.dropuot",
    "ablate ablation=smoke head=tied,untied": "several values beside a question",
    "ablate confirm=nowhere": "confirm=nowhere",
    "look run_dir=absent": "error: run_dir=absent",
    "look run_dir=[absent,": "error: run_dir",
    "look folder=absent": "error: folder=absent",
    "look port=70000": "error: port=70000",
    "runs plot=curves.pdf": "error: plot=curves.pdf: ",
    "runs csv=none/a.csv": "error: csv=none/a.csv: ",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_one_line_exit_code_2_and_leaves_nothing(line: str, command: Command, folder: Path) -> None:
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "configs/model").mkdir(parents=True)
    (folder / "configs/model/bad.yaml").write_text("n_layers: [")
    (folder / "configs/model/misspelt.yaml").write_text("n_layer: 3")
    before = {*folder.rglob("*")}
    code, out, error = command(*line.split())
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert error.startswith("error: ")
    assert REFUSED[line] in error
    assert {path for path in folder.rglob("*") if "runs" not in path.parts} == before  # runs/multirun.yaml of Hydra


# --- values arrive as typed

ODD = [
    *("a=b, (c) [d] {e}: 'f' \"g\".txt", "it's", "a b", "$HOME", "~/x"),
    *("null.txt", "a\\b", "% # @ !", "é\u2028x", "a\\"),
]
PROMPTS = ["", "def f(x, y):", "${seed}", "???", "null", "[1, 2", "{", "'", '"', "\\", "\n", "=", "--help"]


def test_text_arrives_as_typed_in_a_flat_command() -> None:
    for value in ODD + PROMPTS:
        config = parse(GenerateConfig, [f"run_dir={value}", f"prompt={value}", "seed=7"])
        run_dir = None if value == "null" else os.path.expanduser(value)
        assert (config.run_dir, config.prompt, config.seed) == (run_dir, value, 7)
    assert parse(GenerateConfig, ["run_dir=x", "top_k=null"]).top_k is None
    assert parse(EvaluateConfig, ["run_dir=x", "texts=null"]).texts is None


def hydra_reads(override: str) -> Any:
    """The value of an override as Hydra's grammar has it."""
    return OverridesParser.create().parse_override(override).value()


@pytest.mark.slow
def test_the_path_of_a_text_arrives_as_typed_through_hydra() -> None:
    kinds = kinds_of(RunConfig)
    for path in ODD:
        words = [for_hydra(word, kinds) for word in ("data=text", f"data.path={path}")]
        assert compose("train", words, RunConfig).data.path == os.path.expanduser(path)
    for path in ODD[1:]:  # as every other path
        for key in ("data.val_path", "run_dir", "init_from", "+data.cache_dir"):
            word = for_hydra(f"{key}={path}", kinds | {"data.cache_dir": str})
            assert hydra_reads(word) == path, word
    for words in (["data=text", "data.path=a b.txt"], ["data=hub", "data.path=a/b", "data.split=test"]):
        scored = parse_arguments(["run_dir=[a,b c]", *words, "details=true"])
        assert (scored.run_dir, scored.details) == ("[a,b c]", True)
        assert scored.data == compose("train", words, RunConfig).data


PATHS = {  # a command -> words that it needs, and its settings that are paths
    "train": ("data=text tokenizer=file", "data.path data.val_path tokenizer.path run_dir logger.wandb.dir"),
    "generate": ("prompt=x", "run_dir prompt_file"),
    "evaluate": ("", "run_dir texts plot"),
    "export": ("", "run_dir output_dir"),
    "runs": ("", "folder csv plot"),
    "look": ("", "run_dir folder"),
    "ablate": ("ablation.name=x", "output_dir"),
}


@pytest.mark.parametrize("name", PATHS)
def test_the_home_folder_stands_for_its_sign_in_every_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name like that of a user whom nobody knows is a name, and without a home the setting is named."""
    schema, (needed, keys) = import_module(COMMANDS[name].module).SCHEMA, PATHS[name]

    def values(path: str) -> dict[str, Any]:
        words = [*needed.split(), *(f"{key}={path}{key}.svg" for key in keys.split())]
        if "wandb" in keys:
            words.insert(0, "logger=wandb")
        config: Any = (
            compose(name, [for_hydra(word, kinds_of(schema)) for word in words], schema)
            if name in ("train", "ablate")
            else parse(schema, words)
        )
        return {key: attrgetter(key)(config) for key in keys.split()}

    monkeypatch.setenv("HOME", "/some/home")
    assert values("~/") == {key: f"/some/home/{key}.svg" for key in keys.split()}
    assert values("~nobody") == {key: f"~nobody{key}.svg" for key in keys.split()}
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(UserError, match=f"^({keys.replace(' ', '|')})=~/"):
        values("~/")


def test_an_ablation_passes_on_what_train_is_to_understand() -> None:
    words = ["head=untied", "+optim.x=${y}", "data.path=it's b", "experiment=chars", "~logger"]
    own = ["ablation=smoke", "ablation.seeds=[7]", "workers=1", "output_dir=a b"]
    passed, question, _ = ablate.hydra_words([*words, *own])
    assert question is None
    assert passed[:4] == [*own[:3], "output_dir='a b'"]
    config = compose("ablate", [*passed, "ablation.name=smoke"], AblateConfig)
    assert config.overrides == ["head=untied", "+optim.x=${y}", "data.path='it\\'s b'", "experiment=chars", "~logger"]
    assert (config.ablation.name, config.ablation.seeds, config.workers) == ("smoke", [7], 1)


@pytest.mark.slow
def test_a_failed_job_is_reported_and_leaves_no_memory(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self) -> None:
            self.own = self

    kept: list[weakref.ref[Model]] = []

    def fail(run: RunConfig) -> None:
        assert not [ref for ref in kept if ref() is not None]
        model = Model()
        kept.append(weakref.ref(model))
        raise MemoryError if run.seed else ZeroDivisionError

    gc.disable()
    monkeypatch.setattr("lm.training.train.train", fail)
    monkeypatch.setattr(train, "check_paths", lambda *_: None)
    code, _, error = command("train", "-m", "seed=0,-1,2", "head=untied")
    gc.enable()
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert (code, len(kept), len(lines)) == (2, 2, 3)
    for line, words, seed in zip(lines, ("ZeroDivisionError", "seed=-1", "out of memory"), (0, -1, 2), strict=True):
        assert words in line
        assert line.endswith(f"(job: seed={seed} head=untied)")


# --- where exceptions end


def test_an_error_of_a_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 where the machine is at fault, 2 where another path or permission mends it."""
    for number, name, code in (
        *((errno.ENOSPC, "some/file", 1), (errno.EIO, None, 1), (errno.ENOLCK, "some/file", 1)),
        *((errno.EACCES, "some/file", 2), (errno.ENOENT, "some/file", 2)),
    ):
        assert report_error(OSError(number, os.strerror(number), name)) == code
        error = capsys.readouterr().err
        assert error.startswith(f"error: {f'{name}: ' if name else ''}{os.strerror(number)}")
        assert error.count("\n") == 1


def test_a_bug_shows_its_traceback_and_to_debug_a_mistake(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: list[str]) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(train, "run", fail)
    code, _, error = command("train")
    assert (code, error.splitlines()[0]) == (1, "Traceback (most recent call last):")
    monkeypatch.setenv("LM_DEBUG", "1")
    code, _, error = command("generate", "prompt=x")
    assert (code, error.splitlines()[0]) == (2, "Traceback (most recent call last):")
    assert error.splitlines()[-1].startswith("error: run_dir")


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    no_torch = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    for error in (caught.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), no_torch):
        assert report_error(error) == 1
        assert capsys.readouterr().err.startswith("error: out of memory")


def test_a_message_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(UserError("a\x1b[2J\nb"))
    assert capsys.readouterr().err == "error: a\\x1b[2J b\n"


def test_spaces_and_joiners_of_a_language_stay_and_what_steers_is_escaped() -> None:
    letters = "\u3000今天\xa0: «\u202fViens\xa0!\u202f» \u0645\u06cc\u200c\u062e क्\u200dष a\xadb\u200e\u200f\t\n"
    assert printable(letters) == letters
    for steering in "\x1b\r\x85\u2028\u202e\u2066\ue000\ud800\U000e0041\u0378":
        assert printable(steering) == steering.encode("unicode_escape").decode()


def test_a_prompt_to_paste_is_verbatim(tmp_path: Path) -> None:
    config = {"data": {"source": "hub"}, "init_from": None}
    for prompts, pasted in (
        (["Dan dit\xa0: «"], "Dan dit\xa0: «"),
        (["a\x1bb", "c d"], "c d"),
        (["a\x1bb"], "Once upon a time"),
    ):
        result = {"samples": [{"prompt": prompt} for prompt in prompts]}
        assert shlex.split(next(train.next_commands(tmp_path, result, config)))[-2].removeprefix("prompt=") == pasted


def test_the_commands_after_a_run_show_no_secret(tmp_path: Path) -> None:
    result = {"samples": list[dict[str, str]]()}
    for path, shown in (("my.txt", True), ("https://me:pw@h/a.txt?sig=x", False)):
        lines = [*train.next_commands(tmp_path, result, {"data": {"source": "text", "path": path}, "init_from": None})]
        assert any(path in line for line in lines) == shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_output_cannot_write_is_escaped(encoding: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(train, "run", lambda args: print("é 今"))
    monkeypatch.setattr(sys, "stdout", stream)
    assert command("train")[0] == 0
    assert stream.buffer.getvalue() == "é 今\n".encode(encoding, "backslashreplace")


def test_what_a_signal_breaks_is_interrupted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of torch that a signal breaks off raises something else afterwards."""

    def broken(args: list[str]) -> None:
        with suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setattr(train, "run", broken)
    assert command("train") == (143, "", "interrupted\n")


# --- lm-lab, --help and completion


def test_every_command_is_a_script() -> None:
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {*COMMANDS} == scripts - {"benchmark", "equality", "mutants"}  # which are no part of the package


def test_the_command_alone_lists_its_commands(lab: Command) -> None:
    for args in ([], ["--help"], ["help"]):
        code, out, _ = lab(*args)
        assert code == 0
        assert re.findall(r"^  (\w+) +\S", out, re.MULTILINE) == list(COMMANDS)
    code, out, error = lab("trian", "seed=1")
    assert (code, out) == (2, "")
    assert "did you mean lm-lab train seed=1?" in error


def test_a_hint_starts_as_the_command_was_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin").mkdir()
    for name in ("python", "lm-lab"):
        (folder / "bin" / name).symlink_to(sys.executable)
    for started, bare, by_path in [
        (["bin/python", "scripts/train.py"], "python scripts/look.py a", "bin/python scripts/look.py a"),
        (["bin/python", "-m", f"{folder}/lm/__main__.py"], "python -m lm look a", "bin/python -m lm look a"),
        (["python", "bin/lm-lab"], "lm-lab look a", "bin/lm-lab look a"),
        (["bin/python", "mine.py"], "lm-lab look a", "lm-lab look a"),
    ]:
        monkeypatch.setattr(sys, "orig_argv", started)
        monkeypatch.setattr(sys, "argv", [started[-1]])
        monkeypatch.setenv("PATH", f"{folder}/bin")
        assert command_line("look", "a") == bare
        monkeypatch.setenv("PATH", "/nowhere")  # the environment is not activated
        assert command_line("look", "a") == by_path


def test_the_version_is_the_same_in_the_changelog_and_the_citation(command: Command, lab: Command) -> None:
    assert lab("--version") == command("train", "--version") == (0, f"lm-lab {__version__}\n", "")
    newest = re.search(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert newest.groups() == (__version__, str(citation["date-released"])) == (citation["version"], newest[2])


@pytest.mark.parametrize("width", ["80", "140"])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_each_setting_and_group_at_the_width_of_the_terminal(
    name: str, width: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    code, out, error = command(name, "--help", *["all"] * (name == "train"))
    assert (code, error) == (0, "")
    assert max(map(len, out.splitlines())) < int(width)
    assert "..." not in out.replace("key=value ...", "")
    kinds = kinds_of(import_module(COMMANDS[name].module).SCHEMA)
    leaves = {key for key in kinds if not any(other.startswith(f"{key}.") for other in kinds)}
    shown = {key for key in re.findall(r"^  ([\w.]+)=", out, re.MULTILINE) if key in kinds}
    assert leaves <= shown
    for group in CHOSEN_FROM.get(name, ()):
        assert {path.stem for path in (CONFIGS / group).glob("*.yaml")} <= {*re.findall(r"\w+", out)}


def test_the_help_of_train_is_one_screen(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = command("train", "--help")
    assert len(out.splitlines()) <= 40
    assert "--help all" in out


def test_the_console_command_completes(lab: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for line, expected in {
        "lm-lab tr": set(COMMANDS),
        "lm-lab train head=tied_": {"head=tied_naive", "head=tied_projected", "head=tied_scaled"},
        "lm-lab export ": {"run_dir=", "output_dir=", "format=", "dtype=", "title=", "classes="},
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        code, out, error = lab("-sc", "query=bash")
        assert (code, set(out.split()), error) == (0, expected, "")
