"""`train run_dir=RUN` continues the run that lies there with its own settings, or shows its result."""

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

from lm.cli.compose import compose
from lm.config import BadInput, DataConfig, OptimConfig, RunConfig, TokenizerConfig
from lm.config.run import TensorBoardConfig, TrainerConfig, WandbConfig
from lm.training.run_directory import RunDirectory

RUN = RunConfig(  # it differs from the defaults in every group, and its text is no name in Hydra's grammar
    model=tiny(),
    head=UNTIED,
    data=DataConfig(source="text", path="${HOME}/a, [b] 'c'.txt", seq_len=32),
    tokenizer=TokenizerConfig(kind="byte", vocab_size=None),
    optim=OptimConfig(eps=1e-10, betas=[0.8, 0.9]),
    trainer=TrainerConfig(accelerator="cpu", max_steps=7),
    logger=RunConfig().logger.__class__(tensorboard=TensorBoardConfig()),
    prompts=["${b}", "two\nlines"],
    seed=3,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the settings of RUN, as train leaves them."""
    folder = tmp_path / "a run"
    folder.mkdir()
    RunDirectory(folder).write_config(asdict(RUN) | {"run_dir": str(folder), "data_hash": "ab", "threads": 2})
    return folder


def continued(folder: Path, *overrides: str) -> RunConfig:
    return compose("train", [f"run_dir={folder}", *overrides], RunConfig)


def edit(folder: Path, group: str, **values: object) -> None:
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings[group].update(values)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))


def test_the_settings_are_those_of_the_directory(folder: Path) -> None:
    assert asdict(continued(folder)) == asdict(RUN) | {"run_dir": str(folder), "threads": 2}


def test_what_may_differ_on_resume_is_applied(folder: Path) -> None:
    words = ["checkpoint.every=9", "logger=wandb", "prompts=[a]", "trainer.enable_progress_bar=false"]
    run = continued(folder, *words, "data.path=moved (1).txt", "trainer.max_steps=9")
    assert (run.checkpoint.every, run.checkpoint.keep, run.prompts) == (9, 2, ["a"])
    assert (run.logger.tensorboard, run.logger.wandb) == (None, WandbConfig())
    assert run.trainer == TrainerConfig(accelerator="cpu", max_steps=9, enable_progress_bar=False)
    assert run.data == DataConfig(source="text", path="moved (1).txt", seq_len=32)
    assert continued(folder, "~logger").logger.tensorboard is None


@pytest.mark.parametrize("word", ["seed=3", "head=untied", "model.n_layers=2", "threads=1", "experiment=chars"])
def test_an_override_that_decides_the_run_makes_it_a_new_command(folder: Path, word: str) -> None:
    assert continued(folder, word).data.source == "stdlib"


def test_without_a_run_there_the_command_line_is_all(tmp_path: Path) -> None:
    assert continued(tmp_path / "absent").model == compose("train", [], RunConfig).model


@pytest.mark.parametrize("name", ["linear", "norm", "ffn", "position"])
def test_a_class_that_a_folder_names_is_not_imported_unless_it_is_typed(folder: Path, name: str) -> None:
    """A folder of a stranger cannot be told from one's own."""
    edit(folder, "model", **{name: "mine.Own"})
    with pytest.raises(BadInput, match=f"config.yaml: .*add model.{name}=mine.Own if you trust it"):
        continued(folder)


def test_a_class_that_is_typed_is_that_of_the_run(folder: Path) -> None:
    edit(folder, "model", linear="mine.LowRank")
    run = continued(folder, "model.linear=mine.LowRank", "logger=none")
    assert (run.model.linear, run.seed) == ("mine.LowRank", 3)
    assert continued(folder, "model.linear=mine.Other").seed == 0


@pytest.mark.parametrize("content", ["- a\n", "{", "model: {n_layer: 3}\n", "model: 3\n", "seed: [1]\n"])
def test_a_foreign_config_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(BadInput) as caught:
        continued(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml: ")
    assert "\n" not in str(caught.value)


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
    resumed = script("train", f"run_dir={run}")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from step-" in resumed.stderr
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
