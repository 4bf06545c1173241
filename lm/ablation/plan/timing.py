"""How long a training step takes: without a Trainer for a quick estimate, or as the Trainer makes it."""

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.config import RunConfig
from lm.data.batches import Batch
from lm.data.tokens import prepare
from lm.inference.evaluate import evaluate
from lm.system.device import fast_attention, is_mixed
from lm.training.loss import build_loss
from lm.training.optim import build_optimizer
from lm.training.resolve import build_model, n_batches, n_validations, resolve

WARM_UP_STEPS, TIMED_STEPS = 2, 6  # optimizer steps of a measurement
TIMED_BATCHES = 4  # of a validation
NEVER = 10**9  # steps


def train_step(
    loss: Callable[[Tensor, Tensor], Tensor], optimizer: Optimizer, micro_batches: Iterable[Batch], mixed: bool = False
) -> None:
    """Forward, backward, clip at 1, update. `loss` maps token ids (B, T) and targets (B, T) to a scalar."""
    for tokens, targets in micro_batches:
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=mixed), fast_attention(device, mixed, tokens.shape[1]):
            value = loss(tokens, targets)
        value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def step_time(step: Callable[[], object], seconds: float) -> float:
    """The mean seconds of the steps that so many seconds hold, of one at least."""
    started, n_steps = time.perf_counter(), 0
    while not n_steps or time.perf_counter() - started < seconds:
        step()
        n_steps += 1
    return (time.perf_counter() - started) / n_steps


class TimedStep:
    """A training step on random tokens; called, it returns its seconds."""

    def __init__(self, run: RunConfig, vocab_size: int) -> None:
        run = resolve(run, vocab_size)
        self.device, n_micro = run.trainer.accelerator, run.trainer.accumulate_grad_batches
        self.net = build_model(run, vocab_size).to(self.device)
        self.mixed = is_mixed(run.trainer.precision)
        self.loss = partial(build_loss(run), self.net)
        self.net.head.on_train_step(0.0, self.net.embed.weight, {})
        self.optimizer = build_optimizer(self.net, run.optim, run.head)
        tokens = torch.randint(vocab_size, (run.data.batch_size // n_micro, run.data.seq_len), device=self.device)
        self.batches = [(tokens, tokens)] * n_micro

    def __call__(self) -> float:
        started = time.perf_counter()
        train_step(self.loss, self.optimizer, self.batches, self.mixed)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


class TimedTraining:
    """A few steps of the Trainer with real batches, logged as in a run; called, it returns the seconds of one step.

    Its share of the validations of a run of `steps` steps is included; checkpoints and the final score are not.
    """

    def __init__(self, run: RunConfig, steps: int) -> None:
        self.data = prepare(run.data, run.tokenizer)
        run = resolve(run, self.data.tokenizer.vocab_size)
        self.validation, self.validations = run.validation, n_validations(run, steps) / steps  # for each step
        self.run = replace(
            run,
            max_tokens=None,
            trainer=replace(run.trainer, max_steps=WARM_UP_STEPS + TIMED_STEPS, enable_progress_bar=False),
            checkpoint=replace(run.checkpoint, every=NEVER),
            validation=replace(run.validation, every=0),
            diagnostics=replace(run.diagnostics, every=0),
            prompts=None,
        )
        self.net = build_model(self.run, self.data.tokenizer.vocab_size, self.data.tokenizer.eot)

    def __call__(self) -> float:
        return median(self._step_seconds()) + self.validations * self._validation_seconds()

    def _step_seconds(self) -> list[float]:
        """Seconds of each step after the first ones, which set up what later ones use again."""
        # Lightning takes seconds to import, and most plans need only TimedStep
        from lightning import Callback, Trainer

        from lm.training.callbacks import LogAndValidate
        from lm.training.metrics import MetricsFile
        from lm.training.module import LMModule
        from lm.training.run_directory import RunDirectory
        from lm.training.train import build_trainer

        ends: list[float] = []

        class Clock(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                if trainer.global_step > len(ends):
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    ends.append(time.perf_counter())

        with tempfile.TemporaryDirectory() as name:
            directory = RunDirectory(Path(name))
            trainer = build_trainer(self.run, directory, [LogAndValidate(MetricsFile(directory.metrics)), Clock()])
            with fast_attention(
                self.run.trainer.accelerator, is_mixed(self.run.trainer.precision), self.run.data.seq_len
            ):
                trainer.fit(LMModule(self.net, self.run, self.data))
        return [end - start for start, end in pairwise(ends[WARM_UP_STEPS - 1 :])]

    def _validation_seconds(self) -> float:
        if not self.validations:
            return 0.0
        data, tokens, whole = self.run.data, self.data.val, n_batches(self.run, len(self.data.val))
        n = min(self.validation.batches or whole, whole)
        timed = min(TIMED_BATCHES, n)
        self.net.to(self.run.trainer.accelerator)  # Lightning has moved it to the CPU
        started = time.perf_counter()
        evaluate(self.net, tokens, data.seq_len, data.batch_size, timed)
        return (time.perf_counter() - started) * n / timed
