"""What follows from a configuration before anything is trained: the Trainer's arguments, tokens, validations.

It does not import Lightning, which takes three seconds: an ablation is planned without it.
"""

import math
import os
from typing import Any

import torch

from lm.config import SINGLE, BadInput, RunConfig
from lm.system.device import best_device, has_native_bf16


def resolve(run: RunConfig) -> dict[str, Any]:
    """The trainer's arguments with the device, the precision and the number of steps decided. Raises BadInput."""
    run.check_trainer()  # again: run.trainer is a dictionary, which may have been changed
    options = {"_target_": "lightning.Trainer", **SINGLE, **run.trainer}
    started, wanted = os.environ.get("WORLD_SIZE", "1"), options["devices"] * options["num_nodes"]
    if "TORCHELASTIC_RUN_ID" in os.environ and started != str(wanted):
        found = f"torchrun has started {started} processes, trainer.devices * trainer.num_nodes is {wanted}"
        raise BadInput(f"{found}; give the numbers of processes on a node and of nodes to both")
    if options.get("accelerator", "auto") == "auto":
        options["accelerator"] = best_device()
    if options["accelerator"] in ("gpu", "cuda") and not torch.cuda.is_available() and best_device() == "cpu":
        raise BadInput(f"trainer.accelerator={options['accelerator']}: torch finds no GPU here; leave it at auto")
    if run.activation_checkpointing and run.model.dropout and options["accelerator"] == "mps":
        raise BadInput("activation_checkpointing=true: torch cannot repeat dropout on MPS; choose model.dropout=0")
    if options.get("precision") in (None, "auto"):
        options["precision"] = "bf16-mixed" if has_native_bf16(options["accelerator"]) else "32-true"
    if run.max_tokens is not None:
        options["max_steps"] = math.ceil(run.max_tokens / tokens_per_step(run, options))
    if "max_steps" not in options:
        raise BadInput("trainer.max_steps: is missing; give it as trainer.max_steps=VALUE")
    return options


def tokens_per_step(run: RunConfig, options: dict[str, Any]) -> int:
    """Target positions of one optimizer step, on all devices together."""
    return int(run.data.batch_size * run.data.seq_len * options["devices"] * options["num_nodes"])


def n_batches(run: RunConfig, val_tokens: int) -> int:
    """Batches of the whole validation text."""
    return -(-val_tokens // (run.data.batch_size * run.data.seq_len))


def n_validations(run: RunConfig, steps: int) -> int:
    """During a run of so many steps, without the final score."""
    return (steps - 1) // run.validation.every if run.validation.every else 0
