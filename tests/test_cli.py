"""What is typed arrives as typed; a mistake is one line on standard error and exit code 2, before anything is built."""

import errno
import gc
import os
import re
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, Script, some
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lm.cli import ablate, train
from lm.cli.compose import compose, parse, run_hydra
from lm.cli.evaluate import parse_arguments
from lm.cli.main import handle_exception, job
from lm.cli.mistakes import CONFIGS, kinds_of
from lm.config import EvaluateConfig, GenerateConfig, RunConfig, UserError
from lm.config.ablation import AblateConfig

Command = Callable[..., Outcome]
each = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(outcome: Outcome, *words: str) -> None:
    code, out, error = outcome
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert error.startswith("error: ")
    assert all(word in error for word in words), error


REFUSED = {  # arguments of train -> what the line names
    "sead=1": "did you mean seed?",
    "+sead=1": "did you mean seed?",
    "++sead=1": "did you mean seed?",
    "max_steps=10": "did you mean trainer.max_steps?",
    "+lr=0.01": "did you mean optim.lr?",
    "every=3": "checkpoint.every or validation.every or diagnostics.every?",
    "n_layer=3": "did you mean model.n_layers?",
    "model.n_layer=3": "did you mean model.n_layers?",
    "+model.n_layer=3": "did you mean model.n_layers?",
    "models.n_layers=3": "models",
    "+data.more.path=3": "data.more",
    "HEAD=tied": "did you mean head?",
    "learning_rate=1": "did you mean optim.lr?",
    "model.n_embd=3": "did you mean model.d_model?",
    "trainer.fast_dev_run=true": "trainer.fast_dev_run",
    "+trainer.callbacks=[]": "trainer.callbacks",
    "trainer.max_steps=-3": "trainer.max_steps=-3",
    "trainer.max_steps=1e3": "trainer.max_steps=1e3: expected a whole number",
    "trainer.devices=0": "trainer.devices=0",
    "trainer.accumulate_grad_batches=3": "trainer.accumulate_grad_batches=3",
    "trainer.precision=16-mixed": "trainer.precision=16-mixed",
    "trainer.gradient_clip_val=abc": "trainer.gradient_clip_val=abc: expected a number or null",
    "head=untied_midtraining trainer.devices=2": "untied_midtraining",
    "model.n_layers=two": "model.n_layers=two: expected a whole number",
    "model.n_layers=null": "model.n_layers=null",
    "model.n_layers=[1]": "model.n_layers=[1]",
    "optim.lr=0,01": "optim.lr=0,01",
    "optim.lr=nan": "optim.lr=nan",
    "optim.betas=0.9": "optim.betas=0.9: expected a list",
    "compile=perhaps": "compile=perhaps: expected true or false",
    "checkpoint=null": "checkpoint=null",
    "model=null": "model=null",
    "model=[1]": "model=[1]",
    "head={a:b}": "head.a",
    "~optim.lr": "~optim.lr",
    "model@x=small": "model@x",
    "-m seed=0,1 run_dir=x": "run_dir=x",
    "head=tied,untied": "head=tied,untied: several values, a run for each, need -m",
    "model=large": "choose one of gpt2, medium, small",
    "head=teid": "did you mean head=tied?",
    "head=TIED": "did you mean head=tied?",
    "ablation=tying": "ablation",
    "modle=small": "did you mean model?",
    "model.d_model=31": "model.d_model=31",
    "tokenizer.vocab_size=256": "tokenizer.vocab_size=256",
    "seed=-1": "seed=-1",
    "seed=${nothing}": "nothing",
    "run_dir=runs/${nothing}": "nothing",
    "data=text": "data.path",
    "data=text path=x": "data.path or tokenizer.path?",
    "tokenizer=file": "tokenizer.path",
    "head.kind=untied head.head_std=0.01 head.head_lr_multiplier=1": "head.name=tied",
    "init_from=none": "init_from=none: no such folder",
    "seed": "did you mean seed=VALUE?",
    "prompts=[a": "prompts=[a",
    "seed=1=2": "seed=1=2",
    "tied": "did you mean head=tied?",
    "nonsense": "nonsense",
    "--n_layers 3": "did you mean model.n_layers=3?",
    "-m --max-steps=3": "did you mean trainer.max_steps=3?",
    "--config-dir absent": "absent",
    "--config-name other": "other",
    "--cfg all_of_it": "all_of_it",
}
REFUSED_BY_OTHERS = [
    ("generate", ["prompt=x"], "run_dir: is missing"),
    ("generate", ["run_dir=x"], "prompt: give one of prompt=TEXT, prompt_file=FILE and interactive=true"),
    ("generate", ["run_dir=x", "prompt=x", "prompt_file=y"], "prompt"),
    ("generate", ["run_dir=x", "prompt=x", "temprature=1"], "did you mean temperature?"),
    ("generate", ["run_dir=x", "prompt=x", "temperature=0,7"], "temperature=0,7: expected a number"),
    ("generate", ["run_dir=x", "prompt=x", "temperature=-1"], "temperature=-1"),
    ("generate", ["run_dir=x", "prompt=x", "n_samples=2"], "n_samples=2"),
    ("generate", ["run_dir=x", "prompt=x", "top_k=[1"], "top_k=[1: expected a whole number or null"),
    ("generate", ["run_dir=x", "prompt=x", "--top_k", "5"], "did you mean top_k=5?"),
    ("generate", ["run_dir=x", "def f(a=1):"], '"prompt=def f(a=1):"'),
    ("generate", ["run_dir=x", "prompt=To", "be or", "not", "seed=1"], '"prompt=be or"'),
    ("generate", ["run_dir=x", "To", "be", "or", "not"], '"prompt=To"'),
    ("generate", [".", "ROMEO:"], "did you mean run_dir=.?"),
    ("generate", ["run_dir=x", "prompt=To", "prompt=be"], "prompt=be"),
    ("generate", ["run_dir=absent", "prompt=x"], "run_dir=absent: no such folder"),
    ("generate", ["run_dir=.", "prompt_file=absent"], "absent: No such file"),
    ("generate", ["run_dir=.", "prompt=\udce9"], "prompt="),
    ("evaluate", ["threads=2"], "run_dir: is missing"),
    ("evaluate", ["run_dir=x", "data.path=y"], "data=text data.path=FILE"),
    ("evaluate", ["run_dir=x", "data=texxt"], "did you mean data=text?"),
    ("evaluate", ["run_dir=x", "data=text", "data.path=y", "data.seqlen=3"], "did you mean data.seq_len?"),
    ("evaluate", ["run_dir=x", "plot=a.txt"], "plot=a.txt"),
    ("evaluate", ["."], "did you mean run_dir=.?"),
    ("report", ["."], "did you mean output_dir=.?"),
    ("report", ["run_dir=."], "run_dir=.: holds no config.yaml"),
    ("report", [], "output_dir"),
    ("export", ["run_dir=x"], "output_dir: is missing"),
    ("export", ["run_dir=x", "output_dir=y", "format=onnx"], "format=onnx"),
    ("runs", ["folders=x"], "did you mean folder?"),
    ("runs", ["plot=x.txt"], "plot=x.txt"),
    ("ablate", ["ablation=smok"], "did you mean ablation=smoke?"),
    ("ablate", ["ablation=smoke", "tying"], "did you mean ablation=tying?"),
    ("ablate", ["ablation=smoke", "ablation.baseline=x"], "ablation.baseline=x"),
    ("ablate", ["ablation.arms=x"], "ablation.arms=x"),
    ("ablate", ["ablation.overrides=[seed=1]"], """'key=["head=untied"]'"""),
    ("ablate", ["plan_onyl=true"], "did you mean plan_only?"),
    ("ablate", ["max_steps=3"], "did you mean trainer.max_steps?"),
    ("ablate", ["seeds=[0]"], "did you mean ablation.seeds"),
    ("ablate", ["ablation=smoke", "optim.lr=fast"], "optim.lr=fast"),
    ("ablate", ["ablation=smoke", "seed=3"], "seed=3"),
    ("ablate", ["-m", "seed=1,2"], "-m"),
    ("train", ["seed=1 head=tied"], "several settings in one pair of quotes"),
    ("train", ["data=text", "data.path=it's, a=b (1).txt"], "data.path=it's, a=b (1).txt: no such file"),
    ("train", ["my.txt"], "did you mean data=text data.path=my.txt?"),
    ("train", ["data=my.txt"], "did you mean data=text data.path=my.txt?"),
]
CASES = [*(("train", line.split(), words) for line, words in REFUSED.items()), *REFUSED_BY_OTHERS]


@each(("name", "args", "words"), some(CASES, 3))
def test_a_mistake_is_one_line_that_names_it(
    name: str, args: list[str], words: str, command: Command, folder: Path
) -> None:
    (folder / "my.txt").touch()
    refused(command(name, *args), words)
    assert [path.name for path in folder.iterdir()] == ["my.txt"]


# --- values arrive as typed

ODD = [
    "a=b, (c) [d] {e}: 'f' \"g\".txt",
    "it's",
    "a b",
    "$HOME",
    "~/x",
    "null.txt",
    "a\\b",
    "% # @ !",
    "é\u2028x",
    "a\\",
]


@each("value", ODD)
def test_text_arrives_as_typed_in_every_command(value: str) -> None:
    run = compose("train", ["data=text", f"data.path={value}", f"run_dir={value}", f"data.sha256={value}"], RunConfig)
    assert (run.data.path, run.run_dir, run.data.sha256) == (value, value, value)
    config = parse(GenerateConfig, [f"run_dir={value}", f"prompt={value}", "seed=7"])
    assert (config.run_dir, config.prompt, config.seed) == (value, value, 7)
    scored = parse_arguments([f"run_dir={value}", "data=text", f"data.path={value}", f"plot={value}.svg"])
    assert scored.data == run.data.__class__(source="text", path=value)
    assert (scored.run_dir, scored.plot) == (value, f"{value}.svg")


@each("value", ["", "def f(x, y):", "${seed}", "???", "null", "[1, 2", "{", "'", '"', "\\", "\n", "=", "--help"])
def test_the_prompt_is_taken_verbatim(value: str) -> None:
    assert parse(GenerateConfig, ["run_dir=x", f"prompt={value}"]).prompt == value


def test_values_of_the_flat_commands_have_their_types() -> None:
    assert parse(EvaluateConfig, ["run_dir=[a,b c]", "details=true"]) == EvaluateConfig(run_dir="[a,b c]", details=True)
    assert parse(GenerateConfig, ["run_dir=x", "prompt=x", "top_k=null"]).top_k is None


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Hydra has composed for each job of a command, in place of what the command does with it."""
    seen: list[Any] = []

    def convert(config: Any, overrides: list[str], schema: Any) -> Any:
        seen.append(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(config))))
        raise KeyboardInterrupt if schema is AblateConfig else UserError("seen")

    for module in (train, ablate):
        monkeypatch.setattr(module, "to_dataclass", convert)
    return seen


@each("flags", [[], ["-m"]])
def test_a_sweep_reads_paths_as_a_single_run_does(flags: list[str], command: Command, composed: list[Any]) -> None:
    command("train", "data.cache_dir='a, b'", *flags, "run_dir=out (1)/${seed}", "seed=3", "init_from=a b=c")
    (run,) = composed
    assert (run.data.cache_dir, run.run_dir, run.init_from) == ("a, b", "out (1)/3", "a b=c")


@each(("run_dir", "places"), [("a,b", {"a", "b"}), ("out/${seed}", {"out/0", "out/1"}), ("null", {None})])
def test_a_sweep_may_name_a_directory_for_each_run(
    run_dir: str, places: set[str], command: Command, composed: list[Any]
) -> None:
    command("train", "seed=0,1", "-m", f"run_dir={run_dir}")
    assert {run.run_dir for run in composed} == places


def test_an_ablation_passes_on_what_train_is_to_understand(command: Command, composed: list[Any]) -> None:
    words = ["head=untied", "+optim.x=${y}", "data.path=it's, b", "experiment=chars", "~logger"]
    own = ["ablation=smoke", "ablation.seeds=[7]", "workers=1", "hydra.verbose=false", "output_dir=a (b)"]
    assert command("ablate", *words, *own)[0] == 130
    (config,) = composed
    assert config.overrides == words
    assert (config.ablation.name, config.ablation.seeds, config.workers) == ("smoke", [7], 1)
    assert config.output_dir == "a (b)"


# --- jobs of a sweep


def test_a_failed_job_is_reported_at_once_and_the_others_go_on(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    monkeypatch.setattr(train, "check_paths", lambda *_: runs.append(1))
    monkeypatch.setattr("lm.training.train.train", lambda run: 1 / 0)
    code, _, error = command("train", "-m", "seed=0,-1,2", "head=tied,untied")
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert (code, len(runs), len(lines)) == (2, 4, 6)
    assert "seed=-1" in lines[2]
    assert "ZeroDivisionError" in lines[0]
    assert all(f"seed={seed} head={head})" in error for seed in (0, -1, 2) for head in ("tied", "untied"))


def test_a_sweep_needs_one_process_for_each_run(command: Command) -> None:
    code, _, error = command("train", "-m", "trainer.devices=2", "seed=0")
    assert code == 2
    assert "trainer.devices=2" in error


def test_a_failed_job_leaves_nothing_in_memory(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self) -> None:
            self.own = self

    kept: list[weakref.ref[Model]] = []

    def fail(run: RunConfig) -> None:
        assert not [ref for ref in kept if ref() is not None]
        model = Model()
        kept.append(weakref.ref(model))
        raise MemoryError

    gc.disable()
    monkeypatch.setattr("lm.training.train.train", fail)
    monkeypatch.setattr(train, "check_paths", lambda *_: None)
    code, _, error = command("train", "-m", "seed=0,1,2")
    gc.enable()
    assert (code, len(kept), error.count("out of memory")) == (1, 3, 3)


# --- where exceptions end


FAULTS = [
    *((number, name) for number in (errno.EIO, errno.ENOSPC) for name in ("some/file", None)),
    (errno.ENOLCK, None),
]
MISTAKES = [(number, "some/file") for number in (errno.EACCES, errno.EROFS, errno.EISDIR, errno.ENOENT)]


@each(("number", "name"), FAULTS + MISTAKES)
def test_an_error_of_a_file_is_one_line(number: int, name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert handle_exception(OSError(number, os.strerror(number), name)) == (1 if (number, name) in FAULTS else 2)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {f'{name}: ' if name else ''}{os.strerror(number)}")


@each("error", [FileNotFoundError(), KeyError("x"), RuntimeError("x")])
def test_a_bug_shows_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert handle_exception(error) == 1
    assert type(error).__name__ in capsys.readouterr().err


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    for error in (caught.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError()):
        assert handle_exception(error) == 1
        assert capsys.readouterr().err.startswith("error: out of memory; these settings need less: ")


def test_a_process_that_was_lost_is_one_line_that_says_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    from lm.config.checks import RESUMABLE

    error = RuntimeError("[/pytorch/gloo/pair.cc:5] Read error: Connection reset by peer. Check the logs.\nGLHF!")
    error.add_note(RESUMABLE)
    assert handle_exception(error) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert re.search(r"^error: .*\(Read error: Connection reset by peer\); resume with: ", line)


def test_a_debug_variable_shows_the_traceback_of_a_mistake(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_DEBUG", "1")
    code, _, error = command("train", "seed=-1")
    assert code == 2
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("error: seed=-1")


def test_a_message_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    handle_exception(UserError("a\x1b[2J\nb"))
    assert capsys.readouterr().err == "error: a\\x1b[2J b\n"


def test_the_result_of_a_job_reaches_hydra() -> None:
    """A sweeper that searches, such as Optuna's, reads what a job returns."""
    seen: list[Any] = []

    @job
    def task(config: Any) -> float:
        return 1.5

    import hydra

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
    def program(config: Any) -> None:
        seen.append((HydraConfig.get().mode.name, task(config)))

    train.register("train", RunConfig)
    run_hydra(program, ["seed=1"], kinds_of(RunConfig), lambda flags: flags.overrides)
    assert seen == [("RUN", 1.5)]


def test_the_settings_are_checked_before_torch_is_imported(script: Script) -> None:
    for name, args in (("train", ["sead=1"]), ("train", ["data=text", "data.path=none"]), ("generate", ["run_dir=."])):
        answer = script(name, *args, env={"PYTHONPROFILEIMPORTTIME": "1"})
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
