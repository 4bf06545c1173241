"""`train run_dir=RUN` continues the run in that directory, or shows it, wherever its text lies by then."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXT, TINY_RUN

from lm.config import RunConfig, UserError
from lm.training.train import train
from tests.helpers.runs import composed, finish, outcome, signal_at

WORDS = [*TINY_RUN, "head=untied", "model.dropout=0.1", "seed=3", "optim.betas=[0.7,0.9]", "data.path=t.txt"]


def in_folder(folder: Path, step: int, signum: int) -> None:
    os.chdir(folder)
    signal_at(step, signum)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "t.txt").write_text(TEXT)
    train(composed(*WORDS, f"data.path={folder / 't.txt'}", f"run_dir={folder / 'run'}"))
    return outcome(RunConfig(run_dir=str(folder / "run")))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of t.txt and of a run in runs/, which SIGTERM has ended after step 12 of 20."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "t.txt").write_text(TEXT)
    words = [*WORDS, "logger=tensorboard", "checkpoint.keep=7"]
    assert finish(composed(*words), partial(in_folder, folder, 12, signal.SIGTERM)) == 143
    return folder


@pytest.fixture
def run_dir(interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a copy of that run, whose text and runs/ lie in the working directory."""
    shutil.copytree(interrupted, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    (path,) = Path("runs").iterdir()
    assert not (path / "result.json").exists()
    return path


def outcome_of(run_dir: Path) -> dict[str, Any]:
    return outcome(RunConfig(run_dir=str(run_dir)))


# --- continued


def test_a_run_is_continued_and_shown_by_its_directory_alone(run_dir: Path, whole: dict[str, Any]) -> None:
    folder, scores = train(composed(f"run_dir={run_dir}"))
    assert folder == run_dir
    assert outcome_of(run_dir) == whole
    assert scores["resumed_from"] == [12]
    Path("t.txt").unlink()
    assert train(composed(f"run_dir={run_dir}")) == (run_dir, scores), "without its text"


def test_the_same_command_finds_its_run_by_its_hash(run_dir: Path, whole: dict[str, Any]) -> None:
    for path in ("./t.txt", str(Path("t.txt").absolute())):
        folder, scores = train(composed(*WORDS, f"data.path={path}"))
        assert folder == run_dir
        assert folder.name.endswith(scores["config_hash"][:8])
        assert scores["resumed_from"] == [12]
    assert outcome_of(run_dir) == whole


def edit(run_dir: Path, new: str) -> list[str]:
    """As a person does who has moved the text."""
    config = run_dir / "config.yaml"
    config.write_text("# my best run\n" + config.read_text().replace("  path: t.txt\n", f"  path: {new}  # moved\n"))
    return []


@pytest.mark.slow
@pytest.mark.parametrize("name_the_place", [edit, lambda run_dir, new: [f"data.path={new}"]], ids=["edit", "override"])
def test_a_run_whose_text_has_moved_is_continued_at_its_new_place(
    name_the_place: Callable[[Path, str], list[str]], run_dir: Path, whole: dict[str, Any]
) -> None:
    Path("elsewhere").mkdir()
    Path("t.txt").rename("elsewhere/renamed.md")
    with pytest.raises(UserError, match=r"^data\.path=t\.txt: "):
        train(composed(f"run_dir={run_dir}"))
    words = name_the_place(run_dir, "elsewhere/renamed.md")
    train(composed(f"run_dir={run_dir}", *words))
    assert outcome_of(run_dir) == whole


# --- settings


def test_what_may_differ_on_resume_is_applied_to_the_settings_of_the_directory(run_dir: Path) -> None:
    run = composed(f"run_dir={run_dir}")
    assert (run.seed, run.head.name, run.optim.betas, run.threads) == (3, "untied", [0.7, 0.9], 1)
    assert run.logger.tensorboard is not None
    words = ["checkpoint.every=9", "logger=none", "prompts=[a]", "trainer.enable_progress_bar=false"]
    changed = composed(f"run_dir={run_dir}", *words)
    assert (changed.checkpoint.every, changed.checkpoint.keep, changed.prompts) == (9, 7, ["a"])
    assert changed.logger.tensorboard is None
    expected = replace(run, checkpoint=changed.checkpoint, logger=changed.logger, prompts=["a"])
    assert changed == replace(expected, trainer=replace(run.trainer, enable_progress_bar=False))


def test_a_class_that_a_file_names_is_imported_only_if_it_is_typed(run_dir: Path) -> None:
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("linear: linear", "linear: no_such_module.Linear"))
    with pytest.raises(UserError, match=r"model\.linear=no_such_module\.Linear"):
        train(composed(f"run_dir={run_dir}"))
    typed = composed(f"run_dir={run_dir}", "model.linear=no_such_module.Linear")
    assert typed.model.linear == "no_such_module.Linear"


@pytest.mark.parametrize("content", ["- a\n", "seed: [\n", "data_hash: x\nmodel: {n_layer: 3}\n", "\xff"])
def test_a_file_that_holds_no_settings_is_named_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=f"^{tmp_path}/config.yaml: ") as caught:
        composed(f"run_dir={tmp_path}")
    assert "\n" not in str(caught.value)
