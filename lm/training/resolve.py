"""What a run's settings leave to the machine: device, precision, steps, loss and threads; and the model of a run.

This module does not import Lightning, which takes seconds: an ablation is planned without it.
"""

import os
from dataclasses import replace

import torch

from lm.config import RunConfig, UserError
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.system.device import best_device, count_threads, has_native_bf16
from lm.training.loss import resolve_loss


def resolve(run: RunConfig, vocab_size: int) -> RunConfig:
    """The run with every `auto` decided for this machine. Raises UserError for what this machine cannot do."""
    trainer = run.trainer
    _check_torchrun(trainer.world_size)
    name = trainer.accelerator
    device = best_device() if name in ("auto", "gpu") else name
    available = {"cpu": name != "gpu", "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[device]:
        raise UserError(f"trainer.accelerator={name}: torch finds no such device; leave it at auto")
    if device == "mps" and run.activation_checkpointing and run.model.dropout:
        raise UserError("activation_checkpointing=true: torch cannot repeat dropout on MPS; choose model.dropout=0")
    precision = trainer.precision
    if precision == "auto":
        precision = "bf16-mixed" if has_native_bf16(device) else "32-true"
    trainer = replace(trainer, accelerator=device, precision=precision, max_steps=run.steps)
    run = replace(run, trainer=trainer, threads=count_threads(run.threads))
    return replace(run, loss=resolve_loss(run, vocab_size))


def _check_torchrun(world_size: int) -> None:
    started = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and started != str(world_size):
        product = f"trainer.devices * trainer.num_nodes is {world_size}"
        raise UserError(f"trainer.devices: torchrun has started {started} processes, but {product}")


def build_model(run: RunConfig, vocab_size: int, separator: int = 0) -> Transformer:
    """The model of a run before its training. `separator`: the id of the token that begins each document."""
    net = Transformer(
        run.model,
        run.head,
        vocab_size=vocab_size,
        seq_len=run.data.seq_len,
        document_separator=separator if run.data.document_mask else None,
        seed=run.seed,
    )
    if run.activation_checkpointing:
        enable_activation_checkpointing(net)
    return net


def n_batches(run: RunConfig, n_tokens: int) -> int:
    """Batches of a whole text of so many tokens."""
    return -(-n_tokens // (run.data.batch_size * run.data.seq_len))


def n_validations(run: RunConfig, steps: int) -> int:
    """Validations during a run of so many steps, without the final score."""
    return (steps - 1) // run.validation.every if run.validation.every else 0
