"""What the loop works with: Lightning's Fabric, the model with its loss, the state of the run, and its batches."""

import atexit
import logging
import signal
import warnings
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn

from lm.config import RunConfig, UserError
from lm.config.run import TrainerConfig
from lm.data.batches import TrainingStream
from lm.data.ngram import ExpectedTokens
from lm.data.tokens import TextData
from lm.model.init import named_seed
from lm.model.transformer import Transformer
from lm.training.loss import Loss, build_loss
from lm.training.optim import build_optimizer
from lm.training.signals import handled_signals
from lm.training.state import State


def build_fabric(trainer: TrainerConfig) -> Fabric:
    """The device, the precision and the processes of a resolved run, which torchrun or Slurm may have started.

    Raises UserError if they cannot be had.
    """
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # not its tips
    warnings.filterwarnings("ignore", module="lightning", message=".*srun.*")
    try:
        # a run in one process has no peer to find, and no rank, whatever srun, torchrun or MPI number
        fabric = Fabric(
            accelerator=trainer.accelerator,
            devices=trainer.devices,
            num_nodes=trainer.num_nodes,
            strategy=trainer.strategy if trainer.world_size > 1 else "auto",
            precision=trainer.precision,  # type: ignore[arg-type]
            plugins=[LightningEnvironment()] if trainer.world_size == 1 else None,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error
    if fabric.world_size != trainer.world_size:
        product = f"trainer.devices * trainer.num_nodes is {trainer.world_size}"
        raise UserError(f"trainer.devices: {product}, but {fabric.world_size} processes train")
    if fabric.world_size > 1:
        atexit.register(_leave_process_group)
    return fabric


def _leave_process_group() -> None:
    """Destroy the process group when the interpreter exits: only then, for the jobs of a sweep share it.

    A Gloo thread that is still busy at exit would abort the process; Lightning destroys the group for NCCL only. This
    blocks until pending collectives have ended: at once where another process has died.
    """
    for signum in handled_signals():  # Python's handlers are not called while this blocks
        signal.signal(signum, signal.SIG_DFL)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class LossOf(nn.Module):
    """A model with its loss: what Fabric moves to a device, runs in a precision and wraps for several processes."""

    def __init__(self, net: Transformer, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.net, tokens, targets)  # of (B, T) each


def begin(
    fabric: Fabric, net: Transformer, run: RunConfig, config_hash: str = "", checkpoint: dict[str, Any] | None = None
) -> tuple[Any, State]:
    """The model with its loss, set up by Fabric, and the state of the run, from the checkpoint or before step 1."""
    model = fabric.setup(LossOf(net, build_loss(run)))  # `net` is on the device now
    average = deepcopy(net).requires_grad_(False) if run.optim.ema else None
    optimizer = build_optimizer(net, run.optim, run.head)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    state = State(config_hash=config_hash, net=net, optimizer=optimizer, average=average)
    if checkpoint:
        state.load(checkpoint)
    return model, state


def training_stream(fabric: Fabric, run: RunConfig, data: TextData) -> TrainingStream:
    """The micro-batches of this process."""
    n_micro, seed = run.trainer.accumulate_grad_batches, run.seed
    if run.init_sha256:  # the loaded run may have had this seed: another order than its own
        seed = named_seed(seed, "continued")
    return TrainingStream(
        data.train,
        seq_len=run.data.seq_len,
        batch_size=run.data.batch_size // n_micro,
        seed=seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        overfit_batches=run.data.overfit_batches * n_micro,
        documents=data.documents() if run.data.order == "documents" else None,
        expected=ExpectedTokens(data.train, data.tokenizer.vocab_size) if run.ngram_smoothing else None,
        smoothing=run.ngram_smoothing,
    )
