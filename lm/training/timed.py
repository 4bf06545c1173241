"""Training steps of the real Trainer, for measurements of what a run takes."""

import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from lm.config import RunConfig
from lm.data.tokens import prepare
from lm.inference.evaluate import evaluate
from lm.system.device import fast_attention, is_mixed
from lm.system.waiting import adaptive_waiting
from lm.training.checkpoint import Checkpoints
from lm.training.loss import build_loss, resolve_loss
from lm.training.metrics import MetricsFile
from lm.training.model import build_model
from lm.training.options import n_batches, n_validations, resolve
from lm.training.task import LMTask
from lm.training.trainer import build_trainer

WARM_UP, STEPS = 2, 6  # optimizer steps of a turn
BATCHES = 4  # of a validation, that are timed
NEVER = 10**9  # steps


class TimedTraining:
    """A few steps of training with real batches, logged as in a run; called, it returns the seconds of one of them.

    Its share of the validations of a run of `steps` steps is included; checkpoints and the final score are not.
    """

    def __init__(self, run: RunConfig, steps: int) -> None:
        self.data = prepare(run.data, run.tokenizer)
        self.options = resolve(run) | {"max_steps": WARM_UP + STEPS}
        self.validation, self.validations = run.validation, n_validations(run, steps) / steps  # for each step
        self.net = build_model(run, self.data.tokenizer.vocab_size, self.data.tokenizer.eot)
        self.mixed = is_mixed(self.options["precision"])
        loss = resolve_loss(run.loss, self.net, self.options["accelerator"], run.compile, self.mixed)
        self.loss = build_loss(loss, run.compile)
        self.run = replace(
            run,
            checkpoint=replace(run.checkpoint, every=NEVER),
            validation=replace(run.validation, every=0),
            diagnostics=replace(run.diagnostics, every=0),
            prompts=None,
        )

    def __call__(self) -> float:
        return median(self.clocked()) + self.validations * self.seconds_of_validation()

    def clocked(self) -> list[float]:
        """Seconds of each step after the first ones, which set up what later ones use again."""
        device, data = self.options["accelerator"], self.run.data
        with (
            tempfile.TemporaryDirectory() as folder,
            adaptive_waiting(int(self.run.threads or 1)),
            fast_attention(device, self.mixed, data.seq_len),
        ):
            trainer, callback = build_trainer(self.run, self.options, Checkpoints(Path(folder), 1), Path(folder), False)
            clock = Clock()
            trainer.callbacks.append(clock)  # type: ignore[attr-defined]
            trainer.loggers = [MetricsFile(Path(folder) / "metrics.csv", 0)]
            with callback.handling_signals():
                trainer.fit(LMTask(self.net, self.run, self.data, NEVER, self.loss))
        self.device = trainer.strategy.root_device
        return [end - start for start, end in pairwise(clock.ends[WARM_UP - 1 :])]

    def seconds_of_validation(self) -> float:
        if not self.validations:
            return 0.0
        data, tokens, whole = self.run.data, self.data.val, n_batches(self.run, len(self.data.val))
        batches = min(self.validation.batches or whole, whole)
        timed = min(BATCHES, batches)
        self.net.to(self.device)  # Lightning has moved it to the CPU
        started = time.perf_counter()
        evaluate(self.net, tokens, data.seq_len, data.batch_size, timed)
        return (time.perf_counter() - started) * batches / timed


class Clock(Callback):
    """When each optimizer step has ended, with all that is due after it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *args: Any) -> None:
        if trainer.global_step > len(self.ends):
            if task.device.type == "cuda":
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
