"""What makes two runs the same run: the settings that change its numbers, and their hash."""

import hashlib
import json
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from lm.config.run import RunConfig

# What a command is to do once: never saved, so that no later command does it again.
VERBS = ("checkpoint.resume", "data.verify", "report")
# All that changes a number of a run, beside the hashes of its text and its tokenizer: whole groups, and settings.
DECIDING = (
    *("model", "head", "optim", "loss", "compile", "seed", "max_minutes", "init_sha256", "init_tied_matrix"),
    *("data.seq_len", "data.batch_size", "data.order", "data.document_mask", "data.overfit_batches"),
    *("data.val_fraction", "checkpoint.best", "checkpoint.patience", "data_hash", "tokenizer_hash"),
    *(f"trainer.{key}" for key in ("max_steps", "accelerator", "precision", "strategy", "devices", "num_nodes")),
    *("trainer.gradient_clip_val", "trainer.accumulate_grad_batches"),
)
UNLESS_DEFAULT = {"loss_temperature": 1.0, "ngram_smoothing": 0.0}
# Where a run is, what is logged of it and how. They may differ when it is resumed.
RUNTIME = (
    *("run_dir", "logger", "prompts", "init_from", "init_record", "config_hash", "asked", "data_revision"),
    *("checkpoint.every", "checkpoint.keep", "activation_checkpointing", "data.cache_dir", *VERBS),
    *("trainer.enable_progress_bar", "trainer.detect_anomaly"),
)
# Where something lies, and how it is read. The hashes of the text and of the tokenizer say what it is.
PLACES = ("data.path", "data.val_path", "data.separator", "tokenizer.path")
# Settings that `lm.training.resolve` fills in by the machine.
RESOLVED = ("trainer.accelerator", "trainer.precision", "loss", "threads")


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


def described_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that say what a run is, as dotted keys: all but how and where it is made."""
    return {key: value for key, value in flat(settings).items() if not is_runtime(key)}


def deciding_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that change a number of a run, as dotted keys.

    Validation does where it chooses the model or ends the run, and data.val_fraction where it parts the text.
    """
    leaves, groups = flat(settings), {*DECIDING}
    if (nodes := leaves.get("trainer.num_nodes", 1)) > 1:  # the number of processes decides, not their places
        leaves |= {"trainer.num_nodes": 1, "trainer.devices": nodes * leaves["trainer.devices"]}
    if leaves.get("checkpoint.best") or leaves.get("checkpoint.patience") is not None:
        groups.add("validation")
    if leaves.get("data.val_path") is not None or leaves.get("data.val_split") is not None:
        groups.remove("data.val_fraction")
    # a run with the default is what it was before there was the key
    groups |= {key for key, default in UNLESS_DEFAULT.items() if leaves.get(key, default) != default}
    if leaves.get("compile") and leaves.get("activation_checkpointing"):  # a compiler fuses what is repeated otherwise
        groups.add("activation_checkpointing")
    leaves.pop("head.name", None)  # a label
    return {key: value for key, value in leaves.items() if {key, key.partition(".")[0]} & groups}


def config_hash(run: RunConfig, data_hash: str = "", tokenizer_hash: str = "") -> str:
    """SHA-256 of what was asked of a run: equal on all machines, and wherever its text and tokenizer lie.

    What the machine decides is hashed as it was asked (`auto`), the number of threads not at all.
    """
    run = replace(run, trainer=replace(run.trainer, max_steps=run.steps))
    content = deciding_settings(asdict(run)) | {"data_hash": data_hash, "tokenizer_hash": tokenizer_hash}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(saved: dict[str, Any], settings: dict[str, Any], ignored: tuple[str, ...] = ()) -> dict[str, str]:
    """What differs between the settings of a run's config.yaml and others, by key; threads count on a CPU alone."""
    before, now = deciding_settings(saved), deciding_settings(settings)
    if now.get("trainer.accelerator") == "cpu":
        before, now = ({**own, "threads": given.get("threads")} for own, given in ((before, saved), (now, settings)))
    return {
        key: f"{key} is {before.get(key, 'absent')!s:.40} there, {now.get(key, 'absent')!s:.40} now"
        for key in sorted({*before, *now} - {*ignored})
        if before.get(key, "absent") != now.get(key, "absent")
    }
