"""What is typed arrives as typed; a mistake is one line on standard error and exit code 2, before anything is built."""

import errno
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, Script
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lm.cli import ablate, train
from lm.cli.compose import compose, parse, register, run_hydra
from lm.cli.evaluate import parse_arguments
from lm.cli.main import handle_exception, job
from lm.cli.mistakes import CONFIGS, kinds_of
from lm.config import EvaluateConfig, GenerateConfig, RunConfig, UserError
from lm.config.ablation import AblateConfig

Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = {  # a command line -> what its one line of error names
    "train sead=1": "did you mean seed?",
    "train +model.n_layer=3": "did you mean model.n_layers?",
    "train max_steps=10": "did you mean trainer.max_steps?",
    "train every=3": "checkpoint.every or validation.every or diagnostics.every?",
    "train models.n_layers=3": "models",
    "train +data.more.path=3": "data.more",
    "train modle=small": "did you mean model?",
    "train model.n_layers=two": "model.n_layers=two: expected a whole number",
    "train model.n_layers=null": "model.n_layers=null",
    "train trainer.max_steps=1e3": "trainer.max_steps=1e3",
    "train optim.lr=0,01": "optim.lr=0,01",
    "train seed=-1": "seed=-1",
    "train model=null": "model=null",
    "train ~optim.lr": "optim.lr",
    "train -m seed=0,1 run_dir=x": "run_dir=x",
    "train head=tied,untied": "head=tied,untied",
    "train head=TIED": "did you mean head=tied?",
    "train logger=[tensorboard,other]": "logger=other",
    "train ablation=tying": "ablation",
    "train seed=${nothing}": "nothing",
    "train data=text": "data.path",
    "train head.kind=untied head.head_std=0.01 head.head_lr_multiplier=1": "head.name=tied",
    "train init_from=none": "init_from=none",
    "train seed": "did you mean seed=VALUE?",
    "train prompts=[a": "prompts=[a",
    "train tied": "did you mean head=tied?",
    "train nonsense": "nonsense",
    "train data=my.txt": "did you mean data=text data.path=my.txt?",
    "train -m --max-steps=3": "did you mean trainer.max_steps=VALUE?",
    "train --config-dir absent": "absent",
    "train --config-dir configs model=bad": "bad",
    "train --config-dir configs model=misspelt": "model.n_layer",
    "train --cfg all_of_it": "all_of_it",
    "generate prompt=x": "run_dir",
    "generate run_dir=x": "prompt",
    "generate run_dir=x prompt=x temprature=1": "did you mean temperature?",
    "generate run_dir=x prompt=x temperature=0,7": "temperature=0,7",
    "generate run_dir=x prompt=x top_k=[1": "top_k=[1",
    "generate run_dir=x prompt=To be or not seed=1": '"prompt=To be or not"',
    "generate . ROMEO:": "did you mean run_dir=.?",
    "generate run_dir=x prompt=To prompt=be": "prompt=be",
    "generate run_dir=absent prompt=x": "run_dir=absent",
    "generate run_dir=. prompt_file=absent": "absent",
    "generate run_dir=. prompt_file=latin.txt": "latin.txt",
    "generate run_dir=. prompt=\udce9": "prompt=",
    "evaluate threads=2": "run_dir",
    "evaluate run_dir=x data.path=y": "data.path=y",
    "evaluate run_dir=x data=texxt": "did you mean data=text?",
    "report run_dir=.": "run_dir=.",
    "report run_dir=. output_dir=.": "output_dir",
    "report output_dir=absent": "output_dir=absent",
    "report ": "output_dir",
    "export run_dir=x": "output_dir",
    "export run_dir=x output_dir=y format=onnx": "format=onnx",
    "ablate ablation.arms=x": "ablation.arms=x",
    "ablate ablation.overrides=[seed=1]": """'key=["head=untied"]'""",
    "ablate seeds=[0]": "did you mean ablation.seeds",
    "ablate optim.lr=fast": "optim.lr=fast",
    "ablate -m seed=1,2": "-m",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_one_line_that_names_it(line: str, command: Command, folder: Path) -> None:
    (folder / "my.txt").touch()
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "configs/model").mkdir(parents=True)
    (folder / "configs/model/bad.yaml").write_text("n_layers: [")
    (folder / "configs/model/misspelt.yaml").write_text("n_layer: 3")
    before = sorted(folder.rglob("*"))
    code, out, error = command(*line.split())
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert error.startswith("error: ")
    assert REFUSED[line] in error
    assert sorted(folder.rglob("*")) == before


# --- values arrive as typed

ODD = [
    *("a=b, (c) [d] {e}: 'f' \"g\".txt", "it's", "a b", "$HOME", "~/x"),
    *("null.txt", "a\\b", "% # @ !", "é\u2028x", "a\\"),
]
PROMPTS = ["", "def f(x, y):", "${seed}", "???", "null", "[1, 2", "{", "'", '"', "\\", "\n", "=", "--help"]


@pytest.mark.slow
def test_text_arrives_as_typed_in_every_command() -> None:
    for path, run_dir in zip(ODD[::2], ODD[1::2], strict=True):
        run = compose("train", ["data=text", f"data.path={path}", f"run_dir={run_dir}"], RunConfig)
        assert (run.data.path, run.run_dir) == (path, run_dir)
    for value in ODD + PROMPTS:
        config = parse(GenerateConfig, [f"run_dir={value}", f"prompt={value}", "seed=7"])
        assert (config.run_dir, config.prompt, config.seed) == (value, value, 7)
    scored = parse_arguments(["run_dir=[a,b c]", "data=text", f"data.path={ODD[0]}", "details=true"])
    assert (scored.run_dir, scored.details) == ("[a,b c]", True)
    assert scored.data == compose("train", ["data=text", f"data.path={ODD[0]}"], RunConfig).data
    assert parse(GenerateConfig, ["run_dir=x", "top_k=null"]).top_k is None
    assert parse(EvaluateConfig, ["run_dir=x", "texts=null"]).texts is None


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Hydra has composed for each job of a command, in place of what the command does with it."""
    configs: list[Any] = []

    def convert(config: Any, overrides: list[str], schema: Any) -> Any:
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(config))
        configs.append(OmegaConf.to_object(merged))
        raise KeyboardInterrupt if schema is AblateConfig else UserError("composed")

    for module in (train, ablate):
        monkeypatch.setattr(module, "to_dataclass", convert)
    return configs


@pytest.mark.slow
def test_a_sweep_reads_paths_as_a_single_run_does(command: Command, composed: list[Any]) -> None:
    command("train", "data.cache_dir='a, b'", "-m", "run_dir=out (1)/${seed}", "seed=3,4", "init_from=a b=c")
    assert {run.run_dir for run in composed} == {"out (1)/3", "out (1)/4"}
    assert {(run.data.cache_dir, run.init_from) for run in composed} == {("a, b", "a b=c")}


def test_an_ablation_passes_on_what_train_is_to_understand(command: Command, composed: list[Any]) -> None:
    words = ["head=untied", "+optim.x=${y}", "data.path=it's, b", "experiment=chars", "~logger"]
    own = ["ablation=smoke", "ablation.seeds=[7]", "workers=1", "hydra.verbose=false", "output_dir=a (b)"]
    assert command("ablate", *words, *own)[0] == 130
    (config,) = composed
    assert config.overrides == words
    assert (config.ablation.name, config.ablation.seeds, config.workers) == ("smoke", [7], 1)
    assert config.output_dir == "a (b)"


# --- jobs of a sweep


@pytest.mark.slow
def test_a_failed_job_is_reported_at_once_and_leaves_nothing_in_memory(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.slow
def test_a_sweep_needs_one_process_for_each_run(command: Command) -> None:
    code, _, error = command("train", "-m", "trainer.devices=2", "seed=0")
    assert code == 2
    assert error.startswith("error: trainer.devices=2")


def test_the_result_of_a_job_reaches_hydra() -> None:
    """A sweeper that searches, such as Optuna's, reads what a job returns."""
    results: list[Any] = []

    @job
    def task(config: Any) -> float:
        return 1.5

    import hydra

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
    def program(config: Any) -> None:
        results.append((HydraConfig.get().mode, task(config)))

    register("train", RunConfig)
    run_hydra(program, ["seed=1"], kinds_of(RunConfig), lambda flags: flags.overrides)
    assert results == [(RunMode.RUN, 1.5)]


# --- where exceptions end

MACHINE = [(number, name) for number in (errno.EIO, errno.ENOSPC, errno.ENOLCK) for name in ("some/file", None)]
MISTAKES = [(number, "some/file") for number in (errno.EACCES, errno.EROFS, errno.EISDIR, errno.ENOENT)]


def test_an_error_of_a_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in MACHINE + MISTAKES:
        code = 1 if (number, name) in MACHINE else 2
        assert handle_exception(OSError(number, os.strerror(number), name)) == code
        error = capsys.readouterr().err
        assert error.startswith(f"error: {f'{name}: ' if name else ''}{os.strerror(number)}")
        assert error.count("\n") == 1


def test_a_bug_shows_its_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: list[str]) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(train, "run", fail)
    code, _, error = command("train")
    assert code == 1
    assert error.startswith("Traceback")
    assert "FileNotFoundError" in error


def test_a_debug_variable_shows_the_traceback_of_a_mistake(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_DEBUG", "1")
    code, _, error = command("train", "seed=-1")
    assert code == 2
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("error: seed=-1")


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    for error in (caught.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError()):
        assert handle_exception(error) == 1
        assert capsys.readouterr().err.startswith("error: out of memory")


def test_a_message_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    handle_exception(UserError("a\x1b[2J\nb"))
    assert capsys.readouterr().err == "error: a\\x1b[2J b\n"


def test_the_settings_are_checked_before_torch_is_imported(script: Script) -> None:
    answer = script("train", "data=text", "data.path=none", env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert answer.returncode == 2
    assert "lm.config" in imported
    assert not {"torch", "lightning"} & imported


def test_what_a_signal_breaks_off_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an import of torch that it ends in the middle, which the next one does not survive."""
    monkeypatch.setattr("lm.cli.main.signals", [signal.SIGTERM])
    assert handle_exception(ImportError("cannot load module more than once per process")) == 143
    assert capsys.readouterr().err == "interrupted\n"
