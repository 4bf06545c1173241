"""What a run leaves to the machine and to its text, and what follows.

Decided are device, precision, threads, loss and steps; then the model is built, and the processes.
"""

import atexit
import logging
import math
import os
import signal
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lm.config import RunConfig, TrainerConfig, change
from lm.data.tokens import TextData
from lm.errors import UserError, first_line, require
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.registry import from_lab
from lm.system.device import best_device, count_threads, has_native_bf16
from lm.system.signals import handled_signals
from lm.training.loss import resolve_loss

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def resolve(run: RunConfig, vocab_size: int) -> RunConfig:
    """Return the run with device, precision, threads and loss decided for this machine.

    Raises UserError if this machine cannot do what the run asks for.
    """
    trainer, name = run.trainer, run.trainer.accelerator
    started = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and started != str(trainer.world_size):
        product = f"trainer.devices * trainer.num_nodes is {trainer.world_size}"
        raise UserError(f"trainer.devices: torchrun has started {started} processes, but {product}")
    device = best_device() if name in ("auto", "gpu") else name
    available = {
        "cpu": name != "gpu",
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available[device]:
        raise UserError(f"trainer.accelerator={name}: torch finds no such device here")
    if device == "mps" and run.activation_checkpointing and run.model.dropout:
        raise UserError("activation_checkpointing=true: torch cannot repeat dropout on MPS; choose model.dropout=0")
    precision = trainer.precision
    if precision == "auto":
        precision = "bf16-mixed" if has_native_bf16(device) else "32-true"
    decided = {"trainer.accelerator": device, "trainer.precision": precision, "threads": count_threads(run.threads)}
    run = change(run, decided)
    return replace(run, loss=resolve_loss(run, max(vocab_size, run.model.vocab_rows or 0)))


def with_steps(run: RunConfig, data: TextData) -> RunConfig:
    """Return a resolved run with its length in steps alone."""
    steps = run.steps
    if run.trainer.max_epochs is not None:
        steps = math.ceil(run.trainer.max_epochs * len(data.train) / run.tokens_per_step)
    elif run.max_minutes is not None:
        seconds_per_step = from_lab("lm.lab.measures.speed.seconds_per_step")(run, data)
        steps = max(round(60 * run.max_minutes / seconds_per_step), 1)
    open_lengths = dict.fromkeys(("trainer.max_epochs", "max_tokens", "max_minutes"))
    return change(run, open_lengths | {"trainer.max_steps": steps})


def build_model(run: RunConfig, vocab_size: int, separator: int = 0) -> Transformer:
    """Return the model of a run before training. `separator`: id of the token that begins a document.

    Raises UserError for fewer rows of the embedding than tokens.
    """
    rows = run.model.vocab_rows
    require(rows is None or rows >= vocab_size, f"model.vocab_rows={rows}", f"{vocab_size} or more, or null")
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


# --- processes


def build_fabric(trainer: TrainerConfig) -> "Fabric":
    """Return the device, the precision and the processes of a resolved run.

    torchrun or Slurm may have started the processes. Raises UserError if they cannot be had.
    """
    from lightning_fabric import Fabric  # takes a second, which a plan of an ablation does without
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # hides tips
    warnings.filterwarnings("ignore", module="lightning_fabric", message=".*srun.*")
    launchers = {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "MASTER_ADDR"}
    if trainer.num_nodes > 1 and not launchers & {*os.environ}:
        expected = "torchrun or srun, which start the processes of all nodes (docs/clusters.md)"
        raise UserError(f"trainer.num_nodes={trainer.num_nodes}: expected {expected}")
    is_single = trainer.world_size == 1
    try:
        fabric = Fabric(
            accelerator=trainer.accelerator,
            devices=trainer.devices,
            num_nodes=trainer.num_nodes,
            strategy="auto" if is_single else trainer.strategy,
            precision=trainer.precision,  # type: ignore[arg-type]
            # A run in one process has no rank, whatever number srun, torchrun or MPI gave the process.
            plugins=[LightningEnvironment()] if is_single else None,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"trainer: {first_line(error)}") from error
    if fabric.world_size != trainer.world_size:
        product = f"trainer.devices * trainer.num_nodes is {trainer.world_size}"
        raise UserError(f"trainer.devices: {product}, but {fabric.world_size} processes train")
    if not is_single:
        atexit.register(_leave_process_group)
    return fabric


def _leave_process_group() -> None:
    """Destroy the process group at exit: a Gloo thread that is still busy would abort the process.

    Lightning destroys the group for NCCL only. This call blocks until pending collectives have ended.
    """
    for signum in handled_signals():  # Python calls no handlers while the call blocks
        signal.signal(signum, signal.SIG_DFL)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
