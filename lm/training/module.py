"""The LightningModule: model, loss, optimizer and batches of a run."""

import math
from copy import deepcopy
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lm.config import RunConfig
from lm.data.batches import Batch, TrainingStream
from lm.data.tokens import TextData
from lm.formats.folder import saved_state
from lm.model.init import named_seed
from lm.model.transformer import Transformer
from lm.system.device import seed_generators
from lm.training.average import update_average
from lm.training.loss import build_loss
from lm.training.optim import build_optimizer, lr_factor


class LMModule(LightningModule):
    """Trains a Transformer with the settings of a resolved run.

    Batches and dropout are functions of (seed, step), so a resume restores no state of a random generator.
    """

    def __init__(self, net: Transformer, run: RunConfig, data: TextData, config_hash: str = "") -> None:
        super().__init__()
        self.net, self.run, self.data, self.config_hash = net, run, data, config_hash
        # part of the module, so that Lightning moves, saves and restores it
        self.average = deepcopy(net).requires_grad_(False) if run.optim.ema else None
        self.loss = build_loss(run)
        self.micro_losses: list[Tensor] = []  # of the micro-batches of the current step
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.lr = 0.0  # of the last step, where it is optim.lr times the schedule
        # what LogAndValidate measures: the time of training up to the last step, and that of the fastest step
        self.seconds, self.fastest = 0.0, math.inf

    @property
    def scored(self) -> Transformer:
        """The model that is validated and saved: the average of the weights, if there is one."""
        return self.net if self.average is None else self.average

    def total_steps(self, step: int) -> float:
        """Steps of the whole run: with max_minutes an estimate, from the seconds that the first `step` steps took."""
        if self.run.max_minutes is None or not step or not self.seconds:
            return self.run.steps
        return step * 60 * self.run.max_minutes / self.seconds

    def is_last(self, step: int) -> bool:
        """Whether no step is made after this one: with max_minutes, where another one would end too late."""
        if self.run.max_minutes is None or step == 1:  # the first step may take many times as long
            return step == self.run.steps
        return step == self.run.steps or self.seconds + self.fastest > 60 * self.run.max_minutes

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.micro_losses.clear()
        step, optimizer = self.trainer.global_step, self.trainer.optimizers[0]
        self.lr = optimizer.param_groups[0]["lr"]
        self.net.head.on_train_step(step / self.total_steps(step), self.net.embed.weight, optimizer.state)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        seed_generators(named_seed(self.run.seed, "step", batch_idx, self.global_rank), self.device)
        tokens, targets = batch  # (B, T) each, with B = data.batch_size / accumulate_grad_batches
        loss = self.loss(self.net, tokens, targets)
        self.micro_losses.append(loss.detach())
        return loss

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        n_steps = self.trainer.global_step
        super().optimizer_step(*args, **options)
        if self.average is not None and self.run.optim.ema is not None:
            update_average(self.average, self.net, self.run.optim.ema, n_steps)

    def step_loss(self) -> float:
        """The loss of the last optimizer step: the mean over its micro-batches and ranks."""
        return float(self.trainer.strategy.reduce(torch.stack(self.micro_losses).mean(), reduce_op="mean"))

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip as Lightning does, and keep the norm."""
        self.grad_norm = nn.utils.clip_grad_norm_(self.net.parameters(), gradient_clip_val or math.inf)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.net, self.run.optim, self.run.head)
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.total_steps(step), self.run.optim))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Batch]:
        """The batches from the restored step on."""
        micro_batches, seed = self.trainer.accumulate_grad_batches, self.run.seed
        if self.run.init_sha256:  # the loaded run may have had this seed: another order than its own
            seed = named_seed(seed, "continued")
        stream = TrainingStream(
            self.data.train,
            seq_len=self.run.data.seq_len,
            batch_size=self.run.data.batch_size // micro_batches,
            seed=seed,
            start=self.trainer.global_step * micro_batches,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            overfit_batches=self.run.data.overfit_batches * micro_batches,
            documents=self.data.documents() if self.run.data.order == "documents" else None,
        )
        return DataLoader(stream, batch_size=None, pin_memory=self.device.type == "cuda")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] |= {f"net.{name}": tensor for name, tensor in saved_state(self.net).items()}
        checkpoint["config_hash"] = self.config_hash
