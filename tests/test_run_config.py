"""The settings of a run: what they refuse by name, and which of them make another run."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HEADS

from lm.config import (
    DECAYS,
    LOSSES,
    OPTIMIZERS,
    CheckpointConfig,
    DataConfig,
    DiagnosticsConfig,
    HeadConfig,
    LoggerConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    TrainerConfig,
    UserError,
    ValidationConfig,
)
from lm.config.identity import config_hash, differences
from lm.config.run import PRECISIONS, STRATEGIES, WandbConfig
from lm.training.loss import LOSSES as LOSS_FUNCTIONS
from lm.training.run_directory import default_directory
from tests.helpers.runs import MUON, change

NAN = math.nan
LORA = ModelConfig(linear="lora")
TWO = {"trainer": TrainerConfig(devices=2)}
EVERY = DiagnosticsConfig(every=5)

# class, settings that it refuses, what the message begins with
REFUSED: list[tuple[type, dict[str, Any], str]] = [
    *((TrainerConfig, {key: "none such"}, f"trainer.{key}") for key in ("accelerator", "strategy", "precision")),
    *((TrainerConfig, {"precision": value}, "trainer.precision") for value in ("16-mixed", "17-bit")),
    *((TrainerConfig, {"strategy": value}, "trainer.strategy") for value in ("fsdp", "deepspeed", "ddp_spawn")),
    (TrainerConfig, {"profiler": "stopwatch"}, "trainer.profiler"),
    *((TrainerConfig, {key: value}, f"trainer.{key}={value}") for key in ("devices", "num_nodes") for value in (0, -1)),
    *((TrainerConfig, {key: 0}, f"trainer.{key}=0") for key in ("max_steps", "accumulate_grad_batches")),
    (TrainerConfig, {"log_every_n_steps": 0}, "trainer.log_every_n_steps=0"),
    *((TrainerConfig, {"gradient_clip_val": value}, "trainer.gradient_clip_val") for value in (-1.0, NAN)),
    *((CheckpointConfig, {key: 0}, f"checkpoint.{key}=0") for key in ("every", "keep")),
    (ValidationConfig, {"every": -1}, "validation.every=-1"),
    (ValidationConfig, {"batches": 0}, "validation.batches=0"),
    (DiagnosticsConfig, {"every": -1}, "diagnostics.every=-1"),
    (OptimConfig, {"name": "sgd"}, "optim.name=sgd"),
    (OptimConfig, {"decay": "step"}, "optim.decay=step"),
    *(
        (OptimConfig, {key: value}, f"optim.{key}")
        for key in ("lr", "eps", "weight_decay", "warmup_steps", "decay_fraction", "final_lr_fraction")
        for value in (-1, NAN)
    ),
    *((OptimConfig, {key: math.inf}, f"optim.{key}") for key in ("lr", "eps", "weight_decay", "final_lr_fraction")),
    *(
        (OptimConfig, {"betas": betas}, "optim.betas")
        for betas in ([], [0.9], [0.9, 0.95, 0.99], [0.9, 1.0], [-0.1, 0.9], [NAN, 0.9])
    ),
    (OptimConfig, {"decay_fraction": 1.1}, "optim.decay_fraction=1.1"),
    (OptimConfig, {"momentum": 0.9}, "optim.momentum=0.9"),
    (OptimConfig, {"name": "muon"}, "optim.adam_lr=None"),
    *((OptimConfig, asdict(MUON) | {"ns_steps": value}, f"optim.ns_steps={value}") for value in (0, 8)),
    *((RunConfig, {key: 0}, f"{key}=0") for key in ("max_tokens", "threads")),
    (RunConfig, {"loss": "none such"}, "loss=none such"),
    *((RunConfig, {"seed": value}, f"seed={value}") for value in (-1, 2**63)),
    (RunConfig, {"run_dir": ""}, "run_dir"),
    (RunConfig, {"init_tied_matrix": "first"}, "init_tied_matrix=first"),
    (RunConfig, {"trainer": TrainerConfig(accumulate_grad_batches=3)}, "trainer.accumulate_grad_batches=3"),
    (RunConfig, TWO | {"head": HEADS["untied_midtraining"]}, "head.kind=untied_midtraining"),
    (RunConfig, TWO | {"diagnostics": EVERY}, "diagnostics.every=5"),
    (RunConfig, {"model": LORA, "head": HEADS["untied_midtraining"]}, "head.kind=untied_midtraining"),
    (RunConfig, {"model": LORA, "init_tied_matrix": "mean"}, "init_tied_matrix=mean"),
    (RunConfig, {"model": LORA, "diagnostics": EVERY}, "diagnostics.every=5"),
    (RunConfig, {"model": LORA, "trainer": TrainerConfig(precision="bf16-true")}, "trainer.precision=bf16-true"),
]

ALLOWED: list[tuple[type, dict[str, Any]]] = [
    (OptimConfig, {"betas": [0.0, 0.0], "warmup_steps": 0, "decay_fraction": 0.0, "final_lr_fraction": 0.0}),
    (OptimConfig, asdict(MUON) | {"ns_steps": 7}),
    (ValidationConfig, {"every": 0, "batches": None}),
    *((TrainerConfig, {"gradient_clip_val": value}) for value in (0, None)),
    *((TrainerConfig, {"precision": value}) for value in PRECISIONS),
    *((TrainerConfig, {"strategy": value}) for value in STRATEGIES),
    *((RunConfig, TWO | {"head": head}) for name, head in HEADS.items() if name != "untied_midtraining"),
]


@pytest.mark.parametrize(("schema", "settings", "key"), REFUSED, ids=[f"{row[2]} {i}" for i, row in enumerate(REFUSED)])
def test_what_cannot_be_is_refused_by_name(schema: type, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(key)}\b") as caught:
        schema(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("schema", "settings"), ALLOWED)
def test_the_edge_of_what_can_be_is_allowed(schema: type, settings: dict[str, Any]) -> None:
    config = schema(**settings)
    assert {key: getattr(config, key) for key in settings} == settings


def test_a_setting_that_is_no_field_cannot_be_set() -> None:
    for config in (RunConfig(), TrainerConfig(), OptimConfig()):
        with pytest.raises(AttributeError):
            config.no_such_key = 1
    assert ("auto", *LOSS_FUNCTIONS) == LOSSES
    assert {"adamw", "muon"} == {*OPTIMIZERS}
    assert len({*DECAYS}) == 3


# --- identity


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
