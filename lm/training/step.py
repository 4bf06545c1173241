"""One training step without a Trainer, for measurements of its cost."""

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.config import RunConfig
from lm.data.batches import Batch
from lm.system.device import fast_attention, is_mixed
from lm.training.loss import build_loss, resolve_loss
from lm.training.model import build_model
from lm.training.optim import build_optimizer
from lm.training.options import resolve


def train_step(
    loss: Callable[[Tensor, Tensor], Tensor], optimizer: Optimizer, micro_batches: Iterable[Batch], mixed: bool = False
) -> None:
    """Forward, backward, clip at 1, update. `loss` maps token ids (B, T) and targets (B, T) to a scalar."""
    for tokens, targets in micro_batches:
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=mixed), fast_attention(device, mixed, tokens.shape[1]):
            found = loss(tokens, targets)
        found.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def step_time(step: Callable[[], object], seconds: float) -> float:
    """The mean seconds of the steps that so many seconds hold, of one at least."""
    started, made = time.perf_counter(), 0
    while not made or time.perf_counter() - started < seconds:
        step()
        made += 1
    return (time.perf_counter() - started) / made


class TimedStep:
    """A training step on random tokens; called, it returns its seconds."""

    def __init__(self, run: RunConfig, vocab_size: int) -> None:
        options = resolve(run)
        self.device = {"gpu": "cuda"}.get(options["accelerator"], options["accelerator"])
        self.net = build_model(run, vocab_size).to(self.device)
        self.mixed, micro = is_mixed(options["precision"]), options["accumulate_grad_batches"]
        loss = resolve_loss(run.loss, self.net, options["accelerator"], run.compile, self.mixed)
        self.loss = partial(build_loss(loss, run.compile), self.net)
        self.net.head.on_train_step(0.0, self.net.embed.weight, {})
        self.optimizer = build_optimizer(self.net, run.optim, run.head)
        tokens = torch.randint(vocab_size, (run.data.batch_size // micro, run.data.seq_len), device=self.device)
        self.batches = [(tokens, tokens)] * micro

    def __call__(self) -> float:
        started = time.perf_counter()
        train_step(self.loss, self.optimizer, self.batches, self.mixed)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started
