"""The LightningModule: loss, optimizer and batches of a run, whatever its model is."""

import math
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lm.config import RunConfig
from lm.data.batches import Batch, TrainingStream
from lm.data.tokens import TextData
from lm.model.init import named_seed
from lm.model.transformer import Transformer
from lm.system.device import seed_generators
from lm.training.loss import Loss
from lm.training.optim import build_optimizer, lr_factor


class LMTask(LightningModule):
    """Trains a Transformer. Dropout is keyed by (seed, step), so a resume restores no state of a random generator."""

    def __init__(self, net: Transformer, run: RunConfig, data: TextData, total_steps: int, loss: Loss) -> None:
        super().__init__()
        self.net, self.run, self.data, self.total_steps = net, run, data, total_steps
        self.loss = loss
        self.micro_losses: list[Tensor] = []
        self.grad_norm = torch.zeros(())

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        progress, state = self.trainer.global_step / self.total_steps, self.trainer.optimizers[0].state
        self.net.head.on_train_step(progress, self.net.embed.weight, state)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Prepare the head as before saving a model: a resumed run with no step left evaluates these parameters."""
        self.net.head.before_save(self.net.embed.weight)  # in place, on the tensors that the checkpoint holds

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        seed_generators(named_seed(self.run.seed, "step", batch_idx, self.global_rank), self.device)
        tokens, targets = batch
        loss = self.loss(self.net, tokens, targets)
        self.micro_losses.append(loss.detach())
        return loss

    def step_loss(self) -> float:
        """The loss of the last optimizer step: the mean over its micro-batches and ranks."""
        return float(self.trainer.strategy.reduce(torch.stack(self.micro_losses).mean(), reduce_op="mean"))

    def is_finite(self) -> bool:
        """Whether all weights and gradients are numbers."""
        weights = list(self.net.parameters())
        gradients = [one.grad for one in weights if one.grad is not None]
        return all(bool(one.isfinite().all()) for one in (*weights, *gradients))

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        limit = gradient_clip_val or math.inf  # 0 also means no clipping
        self.grad_norm = nn.utils.clip_grad_norm_(self.net.parameters(), limit)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.net, self.run.optim, self.run.head)
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.total_steps, self.run.optim))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Batch]:
        """The batches from the restored step on."""
        micro, seed = self.trainer.accumulate_grad_batches, self.run.seed
        if self.run.init_sha256:  # the loaded run may have had this seed: another order than its own
            seed = named_seed(seed, "continued")
        stream = TrainingStream(
            self.data.train,
            seq_len=self.run.data.seq_len,
            batch_size=self.run.data.batch_size // micro,
            seed=seed,
            start=self.trainer.global_step * micro,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            overfit_batches=self.run.data.overfit_batches * micro,
        )
        return DataLoader(stream, batch_size=None, pin_memory=self.device.type == "cuda")
