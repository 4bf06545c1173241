"""Which settings make another run, and the directory that is named by them."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HEADS

from lm.config import (
    CheckpointConfig,
    DataConfig,
    HeadConfig,
    LoggerConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
)
from lm.config.identity import config_hash, differences
from lm.config.run import WandbConfig
from lm.training.run_directory import default_directory
from tests.helpers.runs import change


def a_run() -> RunConfig:
    return RunConfig(data=DataConfig(source="text", path="text.txt"))


def moved(run: RunConfig, **changes: Any) -> RunConfig:
    return replace(run, data=replace(run.data, **changes))


FILE = TokenizerConfig(kind="file", vocab_size=None, path="a.json")
SAME: dict[str, RunConfig] = {
    "threads": replace(a_run(), threads=7),
    "logger": replace(a_run(), logger=LoggerConfig(wandb=WandbConfig())),
    "checkpoint": replace(a_run(), checkpoint=CheckpointConfig(every=3, resume=False)),
    "prompts": replace(a_run(), prompts=["x"]),
    "run_dir": replace(a_run(), run_dir="elsewhere"),
    "progress bar": change(a_run(), enable_progress_bar=False),
    "activation_checkpointing": replace(a_run(), activation_checkpointing=True),
    "cache_dir": moved(a_run(), cache_dir="elsewhere"),
    "place of the text": moved(a_run(), path="/data/other.txt"),
    "length in tokens": replace(a_run(), max_tokens=1600 * 8 * 128 - 1),
}
OTHER: dict[str, RunConfig] = {
    "seed": replace(a_run(), seed=1),
    "learning rate": replace(a_run(), optim=OptimConfig(lr=1.0)),
    "steps": change(a_run(), max_steps=99),
    "precision": change(a_run(), precision="32-true"),
    "device": change(a_run(), accelerator="cpu"),
    "loss": replace(a_run(), loss="plain"),
    "head": replace(a_run(), head=HEADS["untied"]),
    "validation": moved(a_run(), val_fraction=0.2),
    "weights": replace(a_run(), init_sha256="00"),
    "initial matrix": replace(a_run(), init_tied_matrix="mean"),
}


def test_the_hash_is_of_what_changes_the_numbers() -> None:
    expected = config_hash(a_run(), "text", "tokenizer")
    assert {name: config_hash(run, "text", "tokenizer") == expected for name, run in SAME.items()} == dict.fromkeys(
        SAME, True
    )
    others = {config_hash(run, "text", "tokenizer") for run in OTHER.values()}
    others |= {config_hash(a_run(), "other", "tokenizer"), config_hash(a_run(), "text", "other")}
    assert len(others - {expected}) == len(OTHER) + 2
    with_file = replace(a_run(), tokenizer=FILE)
    elsewhere = replace(a_run(), tokenizer=replace(FILE, path="b.json"))
    assert config_hash(with_file, "text", "tokenizer") == config_hash(elsewhere, "text", "tokenizer")


@pytest.mark.parametrize("name", OTHER)
def test_what_differs_is_named(name: str) -> None:
    keys = {
        "learning rate": "optim.lr",
        "steps": "trainer.max_steps",
        "precision": "trainer.precision",
        "device": "trainer.accelerator",
        "head": "head.kind",
        "validation": "data.val_fraction",
        "weights": "init_sha256",
        "initial matrix": "init_tied_matrix",
    }
    assert keys.get(name, name) in differences(asdict(a_run()), asdict(OTHER[name]))


def test_threads_are_compared_on_a_cpu_with_both_numbers() -> None:
    cpu, cuda = (change(a_run(), accelerator=device, threads=1) for device in ("cpu", "cuda"))
    (message,) = differences(asdict(cpu), asdict(replace(cpu, threads=2))).values()
    assert re.search(r"threads.*\b1\b.*\b2\b", message)
    assert differences(asdict(cuda), asdict(replace(cuda, threads=2))) == {}
    for same in (moved(cpu, path="other"), replace(cpu, prompts=["x"])):
        assert differences(asdict(cpu), asdict(same)) == {}


def test_a_directory_is_named_by_the_run_and_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = replace(a_run(), head=HeadConfig(name="a/b c"), seed=3)
    path = default_directory(run, "0123456789abcdef")
    assert str(path) == "runs/text-bpe2048-4x128-a_b_c-seed3-01234567"
    assert default_directory(moved(run, path="/data/other.txt"), "0123456789abcdef") != path
    path.mkdir(parents=True)
    assert default_directory(moved(run, path="/data/other.txt"), "0123456789abcdef") == path
    assert default_directory(moved(run, path="/data/other.txt"), "9999999999999999") != path
