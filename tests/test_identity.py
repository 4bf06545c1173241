"""Which settings make another run, and the directory that is named by them."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HEADS

from lm.config import CheckpointConfig, DataConfig, HeadConfig, OptimConfig, RunConfig, TokenizerConfig
from lm.config.identity import ADDED, config_hash, differences, flat
from lm.config.run import LoggerConfig, WandbConfig
from lm.training.run_directory import default_directory
from tests.helpers.runs import change

RUN = RunConfig(data=DataConfig(source="text", path="text.txt"))
FILE = replace(RUN, tokenizer=TokenizerConfig(kind="file", vocab_size=None, path="a.json"))


def with_data(run: RunConfig, **changes: Any) -> RunConfig:
    return replace(run, data=replace(run.data, **changes))


SAME: dict[str, RunConfig] = {
    "threads": replace(RUN, threads=7),
    "logger": replace(RUN, logger=LoggerConfig(wandb=WandbConfig())),
    "checkpoint": replace(RUN, checkpoint=CheckpointConfig(every=3, resume=False)),
    "prompts": replace(RUN, prompts=["x"]),
    "run_dir": replace(RUN, run_dir="elsewhere"),
    "progress bar": change(RUN, enable_progress_bar=False),
    "activation_checkpointing": replace(RUN, activation_checkpointing=True),
    "cache_dir": with_data(RUN, cache_dir="elsewhere"),
    "place of the text": with_data(RUN, path="/data/other.txt"),
    "length in tokens": replace(RUN, max_tokens=1600 * 8 * 128 - 1),
}
OTHER: dict[str, RunConfig] = {  # the key that differs -> a run
    "seed": replace(RUN, seed=1),
    "optim.lr": replace(RUN, optim=OptimConfig(lr=1.0)),
    "trainer.max_steps": change(RUN, max_steps=99),
    "trainer.precision": change(RUN, precision="32-true"),
    "trainer.accelerator": change(RUN, accelerator="cpu"),
    "loss": replace(RUN, loss="plain"),
    "head.kind": replace(RUN, head=HEADS["untied"]),
    "checkpoint.best": replace(RUN, checkpoint=CheckpointConfig(best=True)),
    "checkpoint.patience": replace(RUN, checkpoint=CheckpointConfig(patience=3)),
    "data.order": with_data(RUN, order="documents"),
    "max_minutes": replace(RUN, max_minutes=1.0),
    "model.norm_order": replace(RUN, model=replace(RUN.model, norm_order="post")),
    "optim.ema": replace(RUN, optim=OptimConfig(ema=0.9)),
    "data.val_fraction": with_data(RUN, val_fraction=0.2),
    "init_sha256": replace(RUN, init_sha256="00"),
    "init_tied_matrix": replace(RUN, init_tied_matrix="mean"),
}


def test_the_hash_is_of_what_changes_the_numbers() -> None:
    expected = config_hash(RUN, "text", "tokenizer")
    assert [name for name, run in SAME.items() if config_hash(run, "text", "tokenizer") != expected] == []
    others = {config_hash(run, "text", "tokenizer") for run in OTHER.values()}
    others |= {config_hash(RUN, "other", "tokenizer"), config_hash(RUN, "text", "other")}
    assert len(others - {expected}) == len(OTHER) + 2
    elsewhere = replace(FILE, tokenizer=replace(FILE.tokenizer, path="b.json"))
    assert config_hash(FILE, "text", "tokenizer") == config_hash(elsewhere, "text", "tokenizer")


def test_added_settings_are_left_out_at_their_defaults() -> None:
    """So a run that began without them is the same run."""
    settings, older = flat(asdict(RUN)), asdict(RUN)
    assert {key: settings[key] for key in ADDED} == ADDED
    del older["optim"]["ema"], older["max_minutes"], older["model"]["norm_order"]
    assert differences(older, asdict(RUN)) == {}


def test_what_differs_is_named() -> None:
    assert [key for key, run in OTHER.items() if key not in differences(asdict(RUN), asdict(run))] == []
    best = replace(RUN, checkpoint=CheckpointConfig(best=True))
    assert differences(asdict(best), asdict(RUN)) == {"checkpoint.best": "checkpoint.best is True there, False now"}
    cpu, cuda = (change(RUN, accelerator=device, threads=1) for device in ("cpu", "cuda"))
    (message,) = differences(asdict(cpu), asdict(replace(cpu, threads=2))).values()
    assert re.search(r"threads.*\b1\b.*\b2\b", message)
    for run, same in ((cuda, replace(cuda, threads=2)), (cpu, with_data(cpu, path="other")), (RUN, SAME["prompts"])):
        assert differences(asdict(run), asdict(same)) == {}


def test_a_directory_is_named_by_the_run_and_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = replace(RUN, head=HeadConfig(name="a/b c"), seed=3)
    moved = with_data(run, path="/data/other.txt")
    path = default_directory(run, "0123456789abcdef")
    assert str(path) == "runs/text-bpe2048-4x128-a_b_c-seed3-01234567"
    assert default_directory(moved, "0123456789abcdef") != path
    path.mkdir(parents=True)
    assert default_directory(moved, "0123456789abcdef") == path
    assert default_directory(moved, "9999999999999999") != path
