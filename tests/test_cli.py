"""A mistake on the command line is one line on standard error and exit code 2, before anything is built."""

import argparse
import errno
import io
import logging
import os
import random
import re
import runpy
import signal
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Script, some
from hydra._internal.utils import get_args_parser

from lm.cli.errors import report
from lm.cli.launch import launch, repair_argparse
from lm.cli.names import trainer_arguments
from lm.cli.words import prepared, take_verbatim
from lm.config import DECIDED, EvaluateConfig, ExportConfig, GenerateConfig, RunConfig
from lm.config.ablation import AblateConfig, ReportConfig
from lm.config.benchmark import BenchmarkConfig
from lm.config.identity import flat

SCHEMAS = {
    "train": RunConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "ablate": AblateConfig,
    "report": ReportConfig,
    "benchmark": BenchmarkConfig,
}
Outcome = tuple[int, str, list[Any]]


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, list[str]], None]]:
    """Be in an empty directory, with a script's command line; afterwards nothing of `launch` stays behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)
    ours, before = logging.getLogger("lm"), {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    handlers, levels = ours.handlers.copy(), {one: one.level for one in (ours, logging.root)}
    yield lambda name, words: monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    for signum, handler in before.items():
        signal.signal(signum, handler)
    ours.handlers[:] = handlers
    for logger, level in levels.items():
        logger.setLevel(level)
    for name in logging.root.manager.loggerDict:  # Hydra disables those that exist
        logging.getLogger(name).disabled = False


@pytest.fixture
def command(enter: Callable[[str, list[str]], None], capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a script's command line in this process, up to its task: (exit code, standard error, configurations)."""

    def run(line: str | list[str], name: str = "train") -> Outcome:
        seen: list[Any] = []
        enter(name, line.split() if isinstance(line, str) else line)
        verbatim = ("prompt",) if name == "generate" else ()
        rest = "overrides" if name == "ablate" else None
        with pytest.raises(SystemExit) as left:
            launch(seen.append, SCHEMAS[name], name, verbatim=verbatim, rest=rest)
        return int(left.value.code or 0), capsys.readouterr().err, seen

    return run


def refused(outcome: Outcome, *words: str) -> None:
    code, error, seen = outcome
    assert (code, seen) == (2, [])
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    assert "Traceback" not in error
    assert all(word in error for word in words), error
    assert list(Path().iterdir()) == []


MISTAKES = {  # command line of train.py: what its error must say
    "sead=1": "sead: no such key; did you mean seed?",
    "+sead=1": "sead: no such key; did you mean seed?",
    "max_steps=10": "max_steps: no such key; did you mean trainer.max_steps?",
    "+lr=0.01": "lr: no such key; did you mean optim.lr?",
    "every=3": "every: no such key; did you mean checkpoint.every or validation.every or diagnostics.every?",
    "++sead=1": "sead: no such key; did you mean seed?",
    "model.n_layer=3": "model.n_layer: no such key; did you mean model.n_layers?",
    "+model.n_layer=3": "model.n_layer: no such key; did you mean model.n_layers?",
    "+data.more.path=3": "data.more: no such key",
    "checkpoint.evry=3": "checkpoint.evry: no such key; did you mean checkpoint.every?",
    "trainer.max_step=3": "trainer.max_step: no such key; did you mean trainer.max_steps?",
    "+trainer.max_step=3": "trainer.max_step: no such key; did you mean trainer.max_steps?",
    "trainer.fast_dev_run=true": f"trainer.fast_dev_run: {DECIDED}",
    "trainer.benchmark=true": "trainer.benchmark: write +trainer.benchmark=...",
    "trainer.max_steps=-3": "trainer.max_steps=-3: expected a number of steps, 1 or more",
    "trainer.max_steps=null": "trainer.max_steps=None: expected a number of steps, 1 or more",
    "trainer.devices=0": "trainer.devices=0: expected a number, 1 or more",
    "trainer.accumulate_grad_batches=3": "trainer.accumulate_grad_batches=3: does not divide data.batch_size=8",
    "trainer.precision=16-mixed": "trainer.precision=16-mixed: choose one of auto, 32-true, bf16-mixed,",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val=-1: expected 0 (no clipping) or more",
    "trainer.gradient_clip_val=abc": "trainer.gradient_clip_val=abc: expected 0 (no clipping) or more",
    "head=untied_midtraining trainer.devices=2": "head.kind=untied_midtraining: trains on one device",
    "models.n_layers=3": "models",
    "model.n_layers=two": "model.n_layers=two: expected a whole number",
    "model.n_layers=2.5": "model.n_layers=2.5: expected a whole number",
    "model.n_layers=null": "model.n_layers=null: expected a whole number",
    "model.n_layers=[1]": "model.n_layers=[1]",
    "optim.lr=fast": "optim.lr=fast: expected a number",
    "head.untie_at=late": "head.untie_at=late: expected a number or null",
    "optim.betas=0.9": "optim.betas=0.9: expected a list, as in [a,b]",
    "compile=perhaps": "compile=perhaps: expected true or false",
    "prompts=one": "prompts=one: expected a list, as in [a,b] or null",
    "-m seed=0,1 run_dir=x": "run_dir=x: a sweep needs a directory for each run; leave run_dir out",
    "model=large": "model=large: no such config; choose one of gpt2, medium, small",
    "head=twisted": "head=twisted: no such config; choose one of tied, tied_naive,",
    "modle=small": "modle",
    "head=teid": "head=teid: no such config; did you mean head=tied?",
    "optim=moun": "optim=moun: no such config; did you mean optim=muon?",
    "data=tetx": "data=tetx: no such config; did you mean data=text?",
    "--config-dir absent": "Additional config directory '",
    "head=tied,untied": "head=tied,untied",
    "seed=0,1": "seed=0,1",
    "model.d_model=31": "model.d_model=31 is not divisible by model.n_heads=2",
    "model.n_layers=0": "model.n_layers=0: expected 1 or more",
    "data.seq_len=0": "data.seq_len=0: expected 1 or more",
    "tokenizer.vocab_size=2000000000": "tokenizer.vocab_size=2000000000: expected 10000000 or less",
    "tokenizer.vocab_size=256": "tokenizer.vocab_size=256: bpe needs 257 or more",
    "optim.lr=nan": "optim.lr=nan: expected 0 or more",
    "seed=-1": "seed=-1: expected 0 to 2**63 - 1",
    "seed=${nothing}": "nothing",
    "data=text": "data.path",
    "data=hub": "data.path: data.source=hub needs one (data.path=OWNER/NAME)",
    "tokenizer=file": "tokenizer.path",
    "seed": "seed",
    "prompts=[a": "[a",
    "--config-name other": "other: no such config",
    "--lr 3": "unrecognized arguments: --lr; a setting is given as key=value",
    "-m --max-steps=3": "unrecognized arguments: --max-steps=3; a setting is given as key=value",
    "--cfg all_of_it": "--cfg/-c: invalid choice: 'all_of_it'",
    "tied": "tied: a setting is given as key=value; did you mean head=tied?",
    "small seed=1": "small: a setting is given as key=value; did you mean model=small?",
    "nonsense": "nonsense: a setting is given as key=value; see --help",
    "ablation=tying": "ablation: no group of this command; see --help",
    "trainer.max_epochs=3": f"trainer.max_epochs: {DECIDED}",
}


@pytest.mark.parametrize(("line", "said"), some(MISTAKES.items(), 3), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_that_names_it(command: Callable[..., Outcome], line: str, said: str) -> None:
    refused(command(line), said)


NAMELESS = ["model=null", "model=[1]", "seed=1=2", "tokenizer=file tokenizer.path=???"]


@pytest.mark.parametrize("line", NAMELESS)
def test_a_mistake_of_grammar_names_the_key_too(command: Callable[..., Outcome], line: str) -> None:
    refused(command(line), line.split()[-1].split("=")[0])


def test_evaluate_needs_nothing_but_a_run(command: Callable[..., Outcome]) -> None:
    code, error, seen = command("run_dir=x", "evaluate")
    assert (code, error) == (0, "")
    assert seen == [EvaluateConfig(run_dir="x")]


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("generate", "prompt=x", "run_dir: is missing; give it as run_dir=VALUE"),
        ("generate", "run_dir=x prompt=x temprature=1", "temprature: no such key; did you mean temperature?"),
        ("generate", "run_dir=x prompt=x temperature=-1", "temperature=-1.0: expected 0 or more"),
        (
            "generate",
            "run_dir=x prompt=x n_samples=2",
            "n_samples=2: greedy decoding has one answer; add temperature=1",
        ),
        ("evaluate", "threads=2", "run_dir: is missing"),
        ("evaluate", "run_dir=x data.path=y", "choose one with its path, as in data=text data.path=FILE"),
        ("evaluate", "run_dir=x data=text data.path=y data.seqlen=3", "data.seqlen: no such key"),
        ("ablate", "ablation.overrides=[seed=1]", """needs quotes: 'key=["head=untied"]'"""),
        ("export", "run_dir=x", "output_dir: is missing"),
        ("export", "output_dir=x", "run_dir: is missing"),
        ("generate", ["run_dir=x", "def f"], 'def f: give the prompt as "prompt=def f"'),
        ("generate", ["run_dir=x", "hello"], 'hello: give the prompt as "prompt=hello"'),
        ("generate", ["run_dir=x", "def f(a=1):"], 'def f(a=1):: give the prompt as "prompt=def f(a=1):"'),
        ("evaluate", ["."], ".: a setting is given as key=value; did you mean run_dir=.?"),
        ("report", ["."], ".: a setting is given as key=value; did you mean output_dir=.?"),
        ("export", "run_dir=x somewhere", "somewhere: a setting is given as key=value; see --help"),
        ("export", "run_dir=x tied", "tied: a setting is given as key=value; see --help"),
        ("benchmark", "training", "training: a setting is given as key=value; see --help"),
        ("ablate", "ablation=smok", "ablation=smok: no such config; did you mean ablation=smoke?"),
        ("ablate", "ablation=smoke tying", "tying: a setting is given as key=value; did you mean ablation=tying?"),
    ],
)
def test_every_command_names_what_is_missing_or_stray(
    command: Callable[..., Outcome], name: str, line: str | list[str], said: str
) -> None:
    refused(command(line, name), said)


def test_a_text_given_as_the_choice_of_data_is_answered_with_its_path(
    command: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "my.txt").touch()
    code, error, seen = command("data=my.txt")
    assert (code, seen) == (2, [])
    assert error == "error: data=my.txt: no such config; did you mean data=text data.path=my.txt?\n"


def typos(n: int) -> list[str]:
    """Real keys with one letter lost, doubled, changed or swapped: none is a key."""
    draw = random.Random(0)
    leaves = flat(asdict(RunConfig())).keys() - {"trainer", "logger"}
    keys = sorted({*leaves, *(f"trainer.{one}" for one in trainer_arguments())} - {"trainer._target_"})
    found: list[str] = []
    while len(found) < n:
        key = draw.choice(keys)
        i, letter = draw.randrange(len(key)), draw.choice(string.ascii_lowercase)
        one = draw.choice(
            [
                key[:i] + key[i + 1 :],
                key[:i] + key[i] + key[i:],
                key[:i] + letter + key[i + 1 :],
                key[: i - 1] + key[i - 1 : i + 1][::-1] + key[i + 1 :],
            ]
        )
        if one and one not in keys and one not in found and ".." not in one and one.strip(".") == one:
            found.append(one)
    return found


MANY = [f"{'+' * (i % 2)}{key}=1" for i, key in enumerate(typos(100))]


@pytest.mark.parametrize("line", some(MANY, len(MANY) // 10))
def test_no_misspelt_key_is_accepted(command: Callable[..., Outcome], line: str) -> None:
    refused(command(line))


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
    "*/**/[ab]?",
]


@pytest.mark.parametrize("value", some(ODD, 3))
def test_paths_arrive_as_typed(command: Callable[..., Outcome], value: str) -> None:
    code, error, seen = command(["data=text", f"data.path={value}", f"run_dir={value}", f"data.cache_dir={value}"])
    assert (code, error) == (0, "")
    assert (seen[0].data.path, seen[0].run_dir, seen[0].data.cache_dir) == (value, value, value)


@pytest.mark.parametrize("value", ["[a,b c]", *ODD])
def test_lists_of_runs_and_texts_arrive_as_typed(command: Callable[..., Outcome], value: str) -> None:
    code, error, seen = command([f"run_dir={value}", f"texts={value}", f"plot={value}.svg"], "evaluate")
    assert (code, error) == (0, "")
    assert (seen[0].run_dir, seen[0].texts, seen[0].plot) == (value, value, f"{value}.svg")


@pytest.mark.parametrize("value", ["a\\", "a\\\\", "a\\'b", "${HOME}/x"])
def test_paths_with_backslashes_and_braces_arrive_as_typed(command: Callable[..., Outcome], value: str) -> None:
    code, _, seen = command(["data=text", f"data.path={value}"])
    assert code == 0
    assert seen[0].data.path == value


@pytest.mark.parametrize(
    "value",
    some([*ODD, "", "def f(x, y):", "${seed}", "???", "null", "[1, 2", "{", "'", '"', "\\", "\n", "=", "--help"], 3),
)
def test_the_prompt_is_taken_verbatim(command: Callable[..., Outcome], value: str) -> None:
    code, error, seen = command(["run_dir=x", f"prompt={value}", "seed=7"], "generate")
    assert (code, error) == (0, "")
    assert (seen[0].prompt, seen[0].seed, seen[0].run_dir) == (value, 7, "x")


def test_paths_are_quoted_and_everything_else_is_left_alone() -> None:
    line = ["data.path='a b'", "run_dir=null", "model.d_model=64", "prompts=[a]", "+path", "prompt=in prompts"]
    assert prepared(line) == line
    assert prepared(["data.path=a, b", "run_dir=it's"]) == ["data.path='a, b'", r"run_dir='it\'s'"]
    assert prepared(["data.path=a,b", "-m"]) == ["-m", "data.path=a,b"]
    assert take_verbatim(line, ("prompt",)) == ({"prompt": "in prompts"}, line[:-1])
    assert take_verbatim(line, ()) == ({}, line)


@pytest.mark.parametrize(
    ("run_dir", "dirs"), some([("a,b", {"a", "b"}), ("out/${seed}", {"out/0", "out/1"}), ("null", {None})], 3)
)
def test_a_sweep_may_name_a_directory_for_each_run(
    command: Callable[..., Outcome], run_dir: str, dirs: set[str | None]
) -> None:
    code, error, seen = command(f"-m seed=0,1 run_dir={run_dir}")
    assert (code, error) == (0, "")
    assert {run.run_dir for run in seen} == dirs


def test_a_sweep_calls_the_task_for_each_job_and_goes_on_after_a_bad_one(command: Callable[..., Outcome]) -> None:
    code, error, seen = command("-m head=tied,untied seed=0,-1,2")
    assert code == 2
    assert [(run.head.name, run.seed) for run in seen] == [("tied", 0), ("tied", 2), ("untied", 0), ("untied", 2)]
    assert error == "error: seed=-1: expected 0 to 2**63 - 1\n" * 2


# --- the Python 3.14 guard


def test_an_ablation_passes_on_what_train_is_to_understand(command: Callable[..., Outcome]) -> None:
    words = ["ablation=smoke", "head=untied", "ablation.seeds=[7]", "+trainer.x=${y}", "data.path=a b", "workers=1"]
    words += ["hydra/job_logging=disabled", "hydra.verbose=false"]
    code, _, (config,) = command(words, "ablate")
    assert code == 0
    assert config.overrides == ["head=untied", "+trainer.x=${y}", "data.path='a b'"]
    assert (config.ablation.name, config.ablation.seeds, config.workers) == ("smoke", [7], 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ablation=absent", "choose one of aa,"),
        ("ablation=smoke ablation.seeds=[1,1]", "ablation.seeds: 1 "),
        ("ablation=smoke ablation.baseline=x", "ablation.baseline=x: no such arm; choose one of tied, untied"),
        ("ablation=smoke ablation.sedes=[1]", "did you mean ablation.seeds?"),
        ("ablation=smoke workers=0", "workers=0: expected 1 or more"),
        ("ablation=smoke --optim.lr=3", "unrecognized arguments: --optim.lr=3; a setting is given as key=value"),
        ("ablation=smoke -m seed=1,2", "an ablation is a sweep already"),
    ],
)
def test_a_mistake_about_an_ablation_is_one_line(command: Callable[..., Outcome], line: str, said: str) -> None:
    outcome = command(line, "ablate")
    refused(outcome)
    assert said in outcome[1]


def test_hydra_starts_where_argparse_checks_help_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_help(_: argparse.ArgumentParser, action: argparse.Action) -> None:
        checked.append("%" in action.help)  # type: ignore[operator]  # as in Python 3.14

    checked: list[bool] = []
    original = argparse.ArgumentParser.add_argument

    def add_argument(self: argparse.ArgumentParser, *args: Any, **options: Any) -> argparse.Action:
        action = original(self, *args, **options)
        self._check_help(action)  # type: ignore[attr-defined]
        return action

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_argument)
    with pytest.raises(TypeError):
        get_args_parser()
    repair_argparse()
    checked.clear()
    get_args_parser()
    assert len(checked) > 5  # ordinary help texts are still checked


# --- by a real process


def one_line(found: Any, *words: str) -> None:
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1, found.stderr
    assert all(word in found.stderr for word in words), found.stderr


def test_the_scripts_leave_with_code_2_and_one_line(script: Script, tmp_path: Path) -> None:
    one_line(script("train", "model.n_layer=3"), "model.n_layer: no such key")
    one_line(script("generate", "run_dir=absent"), "prompt: give prompt=TEXT or prompt_file=FILE")
    one_line(script("export", "run_dir=absent"), "output_dir: is missing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run_dir=absent prompt=x", "run_dir=absent: no such folder"),
        ("run_dir=. prompt=x", "run_dir=.: holds no model"),
        ("run_dir=. prompt_file=absent", "absent: No such file"),
        ("run_dir=. prompt=x interactive=true", "interactive=true: asks for the prompts; leave prompt"),
        ("run_dir=. prompt=x prompt_file=y", "prompt: give prompt=TEXT or prompt_file=FILE, one of the two"),
    ],
)
def test_generate_names_what_it_cannot_use(
    enter: Callable[[str, list[str]], None], capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    enter("generate", line.split())
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "scripts" / "generate.py"), run_name="__main__")
    refused((int(left.value.code or 0), capsys.readouterr().err, []), said)


def test_a_prompt_from_standard_input_is_utf8_or_refused(
    enter: Callable[[str, list[str]], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter("generate", ["run_dir=.", "prompt_file=-"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "ascii"))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "scripts" / "generate.py"), run_name="__main__")
    refused((int(left.value.code or 0), capsys.readouterr().err, []), "standard input: not UTF-8 at byte 3")


@pytest.mark.slow
def test_unusable_text_is_one_line_for_each_and_leaves_no_run(script: Script, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("short")
    found = script(
        "train", "-m", "data=text", "tokenizer=byte", "trainer=cpu",
        "data.path=absent.txt,empty.txt,latin.txt,short.txt",
    )  # fmt: skip
    assert found.returncode == 2, found.stderr
    *others, short = found.stderr.splitlines()
    assert others == [
        "error: data.path=absent.txt: no such file, folder or glob",
        "error: data.path=empty.txt: the text is empty",
        "error: latin.txt: not UTF-8 at byte 3 (unexpected end of data)",
    ]
    assert short.startswith("error: data: the training text has 5 tokens, data.seq_len=128 needs 129: give more text")
    assert [path.name for path in (tmp_path / "runs").rglob("*")] == ["multirun.yaml"]


@pytest.mark.slow
def test_an_unusable_text_of_a_single_run_leaves_nothing_at_all(script: Script, tmp_path: Path) -> None:
    one_line(script("train", "data=text", "data.path=a, (b) = 'c'.txt"), "data.path=a, (b) = 'c'.txt: no such file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_compiler_that_is_not_there_is_said_in_one_line(script: Script, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once upon a time " * 300)
    small = ["data=text", "data.path=a.txt", "tokenizer=byte", "trainer.max_steps=1", "trainer.accelerator=cpu"]
    own = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = script("train", *small, "compile=true", "run_dir=run", env=own)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert re.search(r"^error: compile=true: .*no-such-compiler.*; compile=false computes the same", found.stderr, re.M)
    assert script("train", *small, "run_dir=other", env=own).returncode == 0


def test_too_little_memory_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    for error in (caught.value, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")):
        assert report(error) == 1
        assert capsys.readouterr().err.startswith("error: out of memory; these settings need less: ")
    assert report(MemoryError()) == 1
    assert capsys.readouterr().err.startswith("error: out of memory; these settings need less: ")
    assert report(RuntimeError("can't start new thread")) == 1  # as threading says it
    assert capsys.readouterr().err.startswith("error: no further thread can be started: free some memory")


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        (errno.EIO, 1, ""),
        (errno.EMFILE, 1, ""),
        (errno.ENOSPC, 1, "; free some space and run the same command again"),
        (errno.EACCES, 2, ""),
        (errno.EROFS, 2, ""),
        (errno.EISDIR, 2, ""),
        (errno.ENOTDIR, 2, ""),
    ],
)
def test_an_error_about_a_file_is_one_line(
    capsys: pytest.CaptureFixture[str], number: int, code: int, advice: str
) -> None:
    assert report(OSError(number, os.strerror(number), "some/file")) == code
    assert capsys.readouterr().err == f"error: some/file: {os.strerror(number)}{advice}\n"


def test_an_error_about_a_file_descriptor_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError) as caught, open(tmp_path / "some", "w") as file:
        os.listdir(file.fileno())
    assert isinstance(caught.value.filename, int)
    assert report(caught.value) == 2
    assert re.fullmatch("error: file descriptor [0-9]+: Not a directory\n", capsys.readouterr().err)


@pytest.mark.parametrize(("number", "said"), [(errno.EIO, ""), (errno.ENOSPC, "; free some space")])
def test_an_error_about_a_file_without_a_name_is_one_line(
    capsys: pytest.CaptureFixture[str], number: int, said: str
) -> None:
    assert report(OSError(number, os.strerror(number))) == 1
    assert capsys.readouterr().err.startswith(f"error: {os.strerror(number)}{said}")


def test_an_error_about_no_file_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(BrokenPipeError(errno.EPIPE, "Broken pipe")) == 1  # of a worker, say
    assert "BrokenPipeError" in capsys.readouterr().err
