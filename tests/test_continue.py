"""`train run_dir=RUN` continues the run in that directory, or shows it, wherever its text lies by then."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TEXT, TINY_RUN

from lm.config import RunConfig, UserError
from lm.training.train import train
from tests.helpers.runs import checkpoints, composed, finish, outcome, signal_at, wait_for

WORDS = [*TINY_RUN, "head=untied", "model.dropout=0.1", "seed=3", "optim.betas=[0.7,0.9]"]


def in_folder(folder: Path, step: int, signum: int) -> None:
    os.chdir(folder)
    signal_at(step, signum)


def interrupted(folder: Path, *overrides: str, step: int = 12) -> Path:
    """The directory of a run of data.path=t.txt in this folder that SIGTERM has ended after a step."""
    (folder / "t.txt").write_text(TEXT)
    run = composed(*WORDS, "data.path=t.txt", f"data.cache_dir={folder / 'cache'}", *overrides)
    assert finish(run, partial(in_folder, folder, step, signal.SIGTERM)) == 143
    (run_dir,) = (path.parent for path in folder.rglob("config.yaml"))
    assert not (run_dir / "result.json").exists()
    return run_dir


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "t.txt").write_text(TEXT)
    places = [f"data.path={folder / 't.txt'}", f"data.cache_dir={folder / 'cache'}", f"run_dir={folder / 'run'}"]
    run = composed(*WORDS, *places)
    train(run)
    return outcome(run)


def outcome_of(run_dir: Path) -> dict[str, Any]:
    return outcome(RunConfig(run_dir=str(run_dir)))


# --- continued


def test_a_run_is_continued_and_shown_by_its_directory_alone(cwd: Path, whole: dict[str, Any]) -> None:
    run_dir = interrupted(cwd, "run_dir=run")
    folder, scores = train(composed(f"run_dir={run_dir}"))
    assert folder == run_dir
    assert outcome_of(run_dir) == whole
    assert scores["resumed_from"] == [12]
    (cwd / "t.txt").unlink()
    shutil.rmtree(cwd / "cache")
    assert train(composed(f"run_dir={run_dir}")) == (run_dir, scores), "without its text"


def test_the_same_command_finds_its_run_by_its_hash(cwd: Path, whole: dict[str, Any]) -> None:
    run_dir = interrupted(cwd)
    for path in ("./t.txt", str(cwd / "t.txt"), "t.txt"):
        folder, scores = train(composed(*WORDS, f"data.path={path}", "data.cache_dir=cache"))
        assert cwd / folder == run_dir
        assert folder.name.endswith(scores["config_hash"][:8])
        assert scores["resumed_from"] == [12]
    assert outcome_of(run_dir) == whole


@pytest.mark.parametrize("new", ["elsewhere/t.txt", "elsewhere/renamed.md"])
def test_a_run_whose_text_has_moved_is_continued_at_its_new_place(new: str, cwd: Path, whole: dict[str, Any]) -> None:
    run_dir = interrupted(cwd, "run_dir=run")
    (cwd / "elsewhere").mkdir()
    (cwd / "t.txt").rename(new)
    with pytest.raises(UserError, match=r"^data\.path=t\.txt: "):
        train(composed("run_dir=run"))
    assert checkpoints(RunConfig(run_dir="run")) == [10, 12]
    train(composed("run_dir=run", f"data.path={new}"))
    assert outcome_of(run_dir) == whole


def test_a_run_that_moved_with_its_text_is_continued(cwd: Path, whole: dict[str, Any]) -> None:
    """As from a laptop to a cluster: another working directory, and no cache."""
    (cwd / "laptop").mkdir()
    interrupted(cwd / "laptop")
    (cwd / "laptop").rename(cwd / "cluster")
    shutil.rmtree(cwd / "cluster/cache")
    (run_dir,) = (cwd / "cluster/runs").iterdir()
    train(composed(f"run_dir={run_dir}", "data.path=cluster/t.txt", "data.cache_dir=cache"))
    assert outcome_of(run_dir) == whole


def test_another_text_is_refused_and_named(cwd: Path) -> None:
    run_dir = interrupted(cwd, "run_dir=run")
    before = (run_dir / "metrics.csv").read_bytes(), checkpoints(RunConfig(run_dir="run"))
    (cwd / "other.txt").write_text(TEXT.replace("return", "yield"))
    shutil.copy("t.txt", "kept.txt")
    shutil.copy("other.txt", "t.txt")
    for words in (["run_dir=run"], ["run_dir=run", "data.path=other.txt"], [*WORDS, "data.path=t.txt", "run_dir=run"]):
        with pytest.raises(UserError, match=r"data_hash.*data\.path"):
            train(composed(*words))
    assert ((run_dir / "metrics.csv").read_bytes(), checkpoints(RunConfig(run_dir="run"))) == before
    without_directory, _ = train(composed(*WORDS, "data.path=t.txt"))
    assert without_directory.parent == Path("runs"), "another run"


def test_a_person_may_edit_the_settings(cwd: Path, whole: dict[str, Any]) -> None:
    run_dir = interrupted(cwd, "run_dir=run")
    (cwd / "sub").mkdir()
    (cwd / "t.txt").rename(cwd / "sub/t.txt")
    config = run_dir / "config.yaml"
    text = config.read_text().replace("  path: t.txt\n", "  path: sub/t.txt  # where it lies now\n")
    config.write_text(f"# my best run\n{text}")
    train(composed("run_dir=run"))
    assert outcome_of(run_dir) == whole


# --- settings


def test_what_may_differ_on_resume_is_applied_to_the_settings_of_the_directory(cwd: Path) -> None:
    interrupted(cwd, "run_dir=run", "logger=tensorboard", "checkpoint.keep=7")
    run = composed("run_dir=run")
    assert (run.seed, run.head.name, run.optim.betas, run.threads) == (3, "untied", [0.7, 0.9], 1)
    assert run.logger.tensorboard is not None
    words = ["checkpoint.every=9", "logger=none", "prompts=[a]", "trainer.enable_progress_bar=false"]
    changed = composed("run_dir=run", *words)
    assert (changed.checkpoint.every, changed.checkpoint.keep, changed.prompts) == (9, 7, ["a"])
    assert changed.logger.tensorboard is None
    expected = replace(run, checkpoint=changed.checkpoint, logger=changed.logger, prompts=["a"])
    assert changed == replace(expected, trainer=replace(run.trainer, enable_progress_bar=False))


@pytest.mark.parametrize("word", ["seed=4", "head=tied", "model.n_layers=3", "threads=2", "optim=adamw"])
def test_a_word_that_decides_the_run_is_compared(word: str, cwd: Path) -> None:
    run_dir = interrupted(cwd, "run_dir=run")
    config = (run_dir / "config.yaml").read_bytes()
    with pytest.raises(UserError) as caught:
        train(composed(*WORDS, "data.path=t.txt", "run_dir=run", word))
    key = {"head": "head.kind", "optim": "optim.name"}.get(word.partition("=")[0], word.partition("=")[0])
    assert re.search(rf"{key} is .*give only run_dir=run to continue it", str(caught.value))
    assert (run_dir / "config.yaml").read_bytes() == config


def test_another_length_is_refused_with_the_way_out(cwd: Path) -> None:
    interrupted(cwd, "run_dir=run")
    for _ in ("unfinished", "finished"):
        for word in ("trainer.max_steps=330", "max_tokens=9999"):
            with pytest.raises(UserError, match=r"trainer\.max_steps is 20 there, .*init_from=run"):
                train(composed("run_dir=run", word))
        train(composed("run_dir=run"))


def test_a_class_that_a_file_names_is_imported_only_if_it_is_typed(cwd: Path) -> None:
    run_dir = interrupted(cwd, "run_dir=run")
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("linear: linear", "linear: no_such_module.Linear"))
    with pytest.raises(UserError, match=r"model\.linear=no_such_module\.Linear"):
        train(composed("run_dir=run"))
    assert composed("run_dir=run", "model.linear=no_such_module.Linear").model.linear == "no_such_module.Linear"


@pytest.mark.parametrize(
    "content", ["- a\n", "{", "data_hash: x\nmodel: {n_layer: 3}\n", "data_hash: x\nmodel: 3\n", "seed: [\n", "\xff"]
)
def test_a_file_that_holds_no_settings_is_named_in_one_line(content: str, cwd: Path) -> None:
    (cwd / "config.yaml").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        composed(f"run_dir={cwd}")
    assert str(caught.value).startswith(f"{cwd}/config.yaml: ")
    assert "\n" not in str(caught.value)


def test_without_a_run_there_the_command_line_is_all(cwd: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert composed("run_dir=absent") == replace(composed(), run_dir="absent")
    assert any(message.startswith("run_dir=absent: does not exist") for message in caplog.messages)


# --- as commands


def start(folder: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    line = [sys.executable, str(ROOT / "scripts/train.py"), *words]
    return subprocess.Popen(
        line, cwd=folder, env=os.environ | env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def test_a_second_ctrl_c_ends_a_command_at_once(cwd: Path) -> None:
    """In one operation that takes minutes; the first says that the run stops after the step."""
    (cwd / "t.txt").write_text(TEXT)
    words = [*WORDS, "data.path=t.txt", "run_dir=run", "checkpoint.every=1"]
    env = {"PYTHONPATH": str(ROOT), "DISTURBED_CALL": "50", "DISTURBED_FILE": str(cwd / "disturbed")}
    process = start(cwd, *words, "model.linear=tests.helpers.layers.Long", **env)
    wait_for((cwd / "disturbed").exists)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping after this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 130
    n_layers, n_projections = 2, 7
    assert checkpoints(RunConfig(run_dir="run"))[-1] == 49 // (n_layers * n_projections)
    yaml.safe_load((cwd / "run/config.yaml").read_text())
