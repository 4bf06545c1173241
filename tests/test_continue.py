"""`train run_dir=RUN` continues the run that lies there with its own settings, or shows its result."""

import contextlib
import csv
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, TINY_RUN, UNTIED, Script, tiny

from lm.cli.resume import as_it_was
from lm.config import BadInput, DataConfig, OptimConfig, RunConfig, TokenizerConfig
from lm.config.identity import config_hash
from lm.training.run_directory import RunDirectory, default_dir

FOUND = {"device": "cpu", "precision": "32-true", "data_hash": "ab", "tokenizer_hash": "cd"}


def a_run(**changes: object) -> RunConfig:
    """A run that differs from the defaults in every group, with a text whose name Hydra's grammar could not hold."""
    settings: dict[str, object] = {
        "model": tiny(),
        "head": UNTIED,
        "data": DataConfig(source="text", path="${HOME}/a, [b] 'c'.txt", seq_len=32),
        "tokenizer": TokenizerConfig(kind="byte", vocab_size=None),
        "optim": OptimConfig(eps=1e-10, betas=[0.8, 0.9]),
        "trainer": {"_target_": "lightning.Trainer", "accelerator": "cpu", "max_steps": 7, "precision": None},
        "logger": {"tensorboard": {"_target_": "lightning.pytorch.loggers.TensorBoardLogger"}},
        "seed": 3,
    }
    return RunConfig(**settings | changes)


def lay(folder: Path, run: RunConfig, **found: object) -> None:
    """What train leaves of this run's settings."""
    folder.mkdir(parents=True)
    RunDirectory(folder).write_config(asdict(run) | {"run_dir": str(folder)} | FOUND | found)


def typed(folder: Path, **changes: object) -> RunConfig:
    return RunConfig(run_dir=str(folder), **changes)


def test_the_settings_are_those_of_the_directory(tmp_path: Path) -> None:
    run = a_run(loss="plain")
    lay(tmp_path / "r", run, threads=2)
    found = as_it_was(typed(tmp_path / "r"), [f"run_dir={tmp_path / 'r'}"])
    assert asdict(found) == asdict(run) | {"run_dir": str(tmp_path / "r"), "threads": 2}
    assert config_hash(found) == config_hash(run)


EVIL = {"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": ["touched"]}}
CSV = "lightning.pytorch.loggers.CSVLogger"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logger": {"x": {"_target_": CSV, "name": EVIL}}}, "its logger would be called"),
        ({"logger": {"tensorboard": {"_target_": CSV, "name": "../../elsewhere"}}}, "its logger would be called"),
        ({"logger": {"tensorboard": EVIL}}, "its logger would be called"),
        ({"trainer": {"max_steps": 7, "profiler": EVIL}}, "trainer.profiler._target_=pathlib.Path.touch would be"),
        ({"trainer": {"max_steps": 7, "_target_": "mine.Trainer"}}, "trainer._target_=mine.Trainer would be called"),
        ({"trainer": {"max_steps": 7, "strategy": [EVIL]}}, "trainer.strategy=.* would be called"),
        ({"trainer": {"max_steps": 7, "accelerator": "${oc.env:HOME}"}}, "trainer.accelerator=.* would be called"),
        ({"model": asdict(tiny()) | {"linear": "mine.LowRank"}}, "its linear class mine.LowRank would be imported"),
        (
            {"model": asdict(tiny()) | {"linear": "mine.LowRank"}, "z": 0, "model.linear": "linear"},
            "its linear class mine.LowRank would be imported",
        ),
    ],
)
def test_a_file_does_not_name_what_is_called(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    """A folder of a stranger cannot be told from one's own, and Hydra calls whatever `_target_` names."""
    place = tmp_path / "r"
    lay(place, a_run())
    settings = yaml.safe_load((place / "config.yaml").read_text())
    (place / "config.yaml").write_text(
        yaml.safe_dump({key: settings[key] for key in settings if key != "checksum"} | changes)
    )
    with pytest.raises(BadInput, match=f"config.yaml: {said}"):
        as_it_was(typed(place), [f"run_dir={place}"])


@pytest.mark.parametrize(("key", "value", "resumes"), [("offline", True, True), ("save_dir", "../elsewhere", False)])
def test_a_switch_of_a_logger_may_be_added(tmp_path: Path, key: str, value: object, resumes: bool) -> None:
    logger = {"wandb": {"_target_": "lightning.pytorch.loggers.WandbLogger", "project": "lm", key: value}}
    lay(tmp_path / "r", a_run(logger=logger))
    with contextlib.nullcontext() if resumes else pytest.raises(BadInput, match="its logger would be called"):
        assert as_it_was(typed(tmp_path / "r"), ["run_dir=r"]).logger == logger


def test_code_that_is_typed_may_be_named(tmp_path: Path) -> None:
    lay(tmp_path / "r", a_run(model=tiny(linear="mine.LowRank"), logger={"mine": {"_target_": "mine.Logger"}}))
    now = typed(tmp_path / "r", model=tiny(linear="mine.LowRank"))
    assert as_it_was(now, ["run_dir=r", "model.linear=mine.LowRank", "logger=none"]).model.linear == "mine.LowRank"
    other = typed(tmp_path / "r", model=tiny(linear="mine.Other"))
    assert as_it_was(other, ["run_dir=r", "model.linear=mine.Other", "logger=none"]) is other


def test_what_may_differ_on_resume_is_applied(tmp_path: Path) -> None:
    lay(tmp_path / "r", a_run())
    words = ["+checkpoint.every=9", "logger=none", "prompts=[a]", "trainer.enable_progress_bar=false", "run_dir=r"]
    now = typed(tmp_path / "r", logger={}, prompts=["a"], trainer={"max_steps": 99, "enable_progress_bar": False})
    now.checkpoint.every, now.checkpoint.keep = 9, 8
    found = as_it_was(now, words)
    assert (found.checkpoint.every, found.checkpoint.keep, found.logger, found.prompts) == (9, 2, {}, ["a"])
    assert found.trainer == a_run().trainer | {"enable_progress_bar": False}


@pytest.mark.parametrize("word", ["seed=3", "head=untied", "model.n_layers=2", "threads=1", "experiment=chars"])
def test_a_word_that_decides_the_run_is_compared_as_before(tmp_path: Path, word: str) -> None:
    lay(tmp_path / "r", a_run())
    now = typed(tmp_path / "r")
    assert as_it_was(now, ["run_dir=r", word]) is now


def test_a_logger_that_is_taken_away_does_not_make_another_run(tmp_path: Path) -> None:
    lay(tmp_path / "r", a_run())
    found = as_it_was(typed(tmp_path / "r"), ["run_dir=r", "~logger"])
    assert (found.logger, found.seed) == ({}, 3)


def test_without_a_run_there_the_command_line_is_all(tmp_path: Path) -> None:
    now = typed(tmp_path / "absent")
    assert as_it_was(now, ["run_dir=absent"]) is now
    assert as_it_was(RunConfig(), []) == RunConfig()


@pytest.mark.parametrize(
    "content",
    ["hydra: {}\n", "- a\n", "{", "data_hash: x\nmodel: {n_layer: 3}\n", "data_hash: x\nmodel: 3\n"],
)
def test_a_foreign_config_is_one_clear_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(BadInput) as caught:
        as_it_was(typed(tmp_path), [f"run_dir={tmp_path}"])
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml: ")
    assert "\n" not in str(caught.value)


def test_the_loss_that_was_chosen_keeps_the_hash_of_what_was_typed(tmp_path: Path) -> None:
    """config.yaml says plain or chunked; the hash says whether that was typed or loss=auto."""
    for loss in ("auto", "chunked"):
        run = a_run(loss=loss)
        folder = tmp_path / default_dir(run)
        lay(folder, run, loss="chunked")
        found = as_it_was(typed(folder), ["run_dir=x"])
        assert (found.loss, config_hash(found)) == (loss, config_hash(run))
        lay(tmp_path / loss, run, loss="chunked", config_hash=config_hash(run))
        assert as_it_was(typed(tmp_path / loss), ["run_dir=x"]).loss == loss
    lay(tmp_path / "unknown", a_run(), loss="chunked")
    assert as_it_was(typed(tmp_path / "unknown"), ["run_dir=x"]).loss == "chunked"


# --- by real processes


def interrupt(words: list[str], folder: Path, signum: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    """Start train, send it a signal when it has its first checkpoint; its exit code and standard error."""
    line = [sys.executable, str(ROOT / "scripts/train.py"), *words]
    process = subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 120
    while not list(folder.glob("*/**/step-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def metrics(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if "second" not in key and "time" not in key} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("place", [["run_dir=run"], []], ids=["run_dir", "default name"])
def test_a_run_continued_by_its_directory_alone_equals_one_that_was_not_interrupted(
    script: Script, corpus: Path, tmp_path: Path, place: list[str]
) -> None:
    words = [*TINY_RUN, f"data.path={corpus}", "trainer.max_steps=400", "head=untied", "model.dropout=0.1", *place]
    (tmp_path / "other").mkdir()
    code, _ = interrupt(words, tmp_path / "other")
    assert code == 143
    (run,) = (path.parent for path in (tmp_path / "other").glob("**/config.yaml"))
    assert not (run / "result.json").exists()
    continued = script("train", f"run_dir={run}")
    assert continued.returncode == 0, continued.stderr
    assert f"resuming {run} from step-" in continued.stderr
    undisturbed = script("train", *words)
    assert undisturbed.returncode == 0, undisturbed.stderr
    whole = tmp_path / run.relative_to(tmp_path / "other")
    assert (run / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert metrics(run) == metrics(whole)
    ours, theirs = (json.loads((path / "result.json").read_text()) for path in (run, whole))
    compared = {"val_loss", "val_bpb", "steps", "tokens", "seed", "head", "data_hash", "samples"}
    compared |= {"config_hash"} if not place else set()
    assert {key: ours[key] for key in compared} == {key: theirs[key] for key in compared}
    assert len(ours["resumed_from"]) == 1
    shown = script("train", f"run_dir={run}")
    assert shown.returncode == 0
    assert "is finished: nothing to train" in shown.stderr
    assert f"{ours['val_loss']:.4f}" in shown.stdout


@pytest.mark.slow
def test_other_settings_are_refused_with_the_words_that_continue_the_run(
    script: Script, corpus: Path, tmp_path: Path
) -> None:
    done = script("train", *TINY_RUN, f"data.path={corpus}", "run_dir=run")
    assert done.returncode == 0, done.stderr
    refused = script("train", *TINY_RUN, f"data.path={corpus}", "run_dir=run", "seed=1")
    assert refused.returncode == 2
    message = re_line(refused.stderr, "error: ")
    assert message.startswith("run_dir=run holds another run (seed is 0 there, 1 now)")
    assert message.endswith("give only run_dir=run to continue it")
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["seed"] == 0


def re_line(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line.removeprefix(start)
