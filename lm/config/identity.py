"""What makes two runs the same run: the settings that change its numbers, and their hash."""

import hashlib
import json
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from lm.config.run import RunConfig

# What a command is to do once: never saved, so that no later command does it again.
VERBS = ("checkpoint.resume", "data.verify", "plan_only", "code")
# Settings that do not change what a run computes. They may differ when it is resumed.
RUNTIME = (
    *("run_dir", "logger", "prompts", "init_from", "init_record", "config_hash", "asked", "data_revision", "typed"),
    *("checkpoint.every", "checkpoint.keep", "activation_checkpointing", "data.cache_dir", *VERBS),
    *("trainer.enable_progress_bar", "trainer.detect_anomaly"),
)
# Where something lies, and how it is read. The hashes of the text and of the tokenizer say what it is.
PLACES = ("data.path", "data.val_path", "data.separator", "tokenizer.path")
# Settings that were added when runs had been published, with the values of a run that does not say them. At these they
# are left out of the hash, so every recipe and every run of a committed ablation keeps its own.
ADDED: dict[str, Any] = {
    "checkpoint.best": False,
    "checkpoint.patience": None,
    "data.order": "windows",
    "max_minutes": None,
    "model.norm_order": "pre",
    "optim.ema": None,
}
# Settings that `lm.training.resolve` fills in by the machine.
RESOLVED = ("trainer.accelerator", "trainer.precision", "loss", "threads")
# What a typed choice of a group replaces: the recipe's choice and settings of these groups. The learning rates of a
# recipe and the scales of its head suit tokens of its own kind.
REPLACED = {"model": ("model",), "head": ("head",), "optim": ("optim",), "tokenizer": ("tokenizer", "head", "optim")}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def without_verbs(settings: dict[str, Any]) -> dict[str, Any]:
    """The nested settings of a run without what is asked of one command only."""
    rest = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    for group, _, key in (verb.rpartition(".") for verb in VERBS):
        (rest.get(group, {}) if group else rest).pop(key, None)
    return rest


def key_of(override: str) -> str:
    """The key that an override sets: `+head.name=a` sets head.name, `~logger` logger."""
    return override.partition("=")[0].lstrip("+~")


def is_verb(word: str) -> bool:
    """Whether a word of a command line is asked of that command only."""
    return key_of(word) in VERBS


@cache
def is_runtime(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in RUNTIME)


def hashed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that change what a run computes, as dotted keys."""
    leaves = flat(settings).items()
    return {key: value for key, value in leaves if not is_runtime(key) and (key, value) not in ADDED.items()}


def config_hash(run: RunConfig, data_hash: str = "", tokenizer_hash: str = "") -> str:
    """SHA-256 of what was asked of a run: equal on all machines, and wherever its text and tokenizer lie.

    What the machine decides is hashed as it was asked (`auto`), the number of threads not at all.
    """
    run = replace(run, threads=None, max_tokens=None, trainer=replace(run.trainer, max_steps=run.steps))
    settings = {key: value for key, value in hashed_settings(asdict(run)).items() if key not in PLACES}
    content = {**settings, "data_hash": data_hash, "tokenizer_hash": tokenizer_hash}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(saved: dict[str, Any], settings: dict[str, Any], ignored: tuple[str, ...] = ()) -> dict[str, str]:
    """What differs between the settings of a run's config.yaml and others that would be resumed there, by key.

    Places, the length in tokens (trainer.max_steps has it) and keys in `ignored` are not compared; threads only
    on a CPU, where they change numbers.
    """
    before, now = ADDED | hashed_settings(saved), ADDED | hashed_settings(settings)
    ignored += (*PLACES, "max_tokens", *(() if now.get("trainer.accelerator") == "cpu" else ("threads",)))
    return {
        key: f"{key} is {before.get(key, 'absent')!s:.40} there, {now.get(key, 'absent')!s:.40} now"
        for key in sorted({*before, *now} - {*ignored})
        if before.get(key, "absent") != now.get(key, "absent")
    }
