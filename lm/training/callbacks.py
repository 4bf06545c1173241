"""The training callback, which logs, validates, saves and stops between two optimizer steps, and the progress bar."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning import Callback, LightningModule, Trainer
from tqdm import tqdm

from lm.config import Diverged
from lm.inference.evaluate import evaluate
from lm.training.metrics import validation_metrics
from lm.training.optim import lr_factor
from lm.training.task import LMTask

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heard() -> list[signal.Signals]:
    """SIGNALS without a SIGHUP that is ignored, as nohup starts a command."""
    return [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


class Interrupted(BaseException):
    """A signal has stopped the run, after a checkpoint. Not an Exception, so that a sweep stops as well."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step = signum, step


class TrainingCallback(Callback):
    """What is due after an optimizer step, in an order that a resume repeats exactly: log, validate, save, stop.

    The last step is not validated here: its row is logged with the final score, after its checkpoint.
    """

    def __init__(self, tokens_per_step: int, log_every: int) -> None:
        self.tokens_per_step, self.log_every = tokens_per_step, log_every
        self.started: float | None = None  # when the training of this process began; None before and after it
        self.seconds_before = 0.0  # spent by the processes before this one, if the run was resumed
        self.resumed_from: list[int] = []
        self.step = 0
        self.last_metrics: dict[str, float] = {}  # of the last step
        self.scoring = False
        self.signum: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training, without the final score."""
        return self.seconds_before + (time.perf_counter() - self.started if self.started is not None else 0)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """A context in which the first of SIGNALS takes effect at the end of the step."""
        before = {signum: signal.signal(signum, self.on_signal) for signum in heard()}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self.started = time.perf_counter()
        for signum in heard() if self.signum is None else ():  # Lightning has installed its own handlers
            signal.signal(signum, self.on_signal)
        if self.signum is not None:
            raise Interrupted(self.signum, trainer.global_step)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self.seconds_before, self.started = self.seconds, None

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, signal.SIG_DFL)  # a second signal takes effect at once
        if self.scoring:  # every step is saved
            raise Interrupted(signum, self.step)

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(task, LMTask)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.step = step = trainer.global_step
        run, last = task.run, step == task.total_steps
        metrics: dict[str, float] = {}
        logs = step % self.log_every == 0 and not last
        validates = run.validation.every and step % run.validation.every == 0 and not last
        stops = trainer.strategy.reduce_boolean_decision(self.signum is not None, all=False)  # a signal on any rank
        saves = step % run.checkpoint.every == 0 or last or stops
        if logs or validates or saves:
            metrics |= self.train_metrics(task, step)
        task.micro_losses.clear()
        if last:
            self.last_metrics = metrics
        if validates:
            val, data = task.data.val, run.data
            scores = evaluate(task.net, val, data.seq_len, data.batch_size, run.validation.batches)
            metrics |= validation_metrics(scores, task.data)
        if logs or validates:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)
        if saves:
            for logger in trainer.loggers:
                logger.save()  # a checkpoint must not be newer than the rows on disk
            trainer.save_checkpoint("")  # Checkpoints chooses the file name
        if stops:
            raise Interrupted(self.signum or signal.SIGTERM, step)

    def train_metrics(self, task: LMTask, step: int) -> dict[str, float]:
        loss, norm = task.step_loss(), task.grad_norm.item()
        if not (math.isfinite(loss) and math.isfinite(norm)):  # raised before anything of this step is saved
            found = f"the loss is {loss} and the gradient norm {norm} at step {step}"
            raise Diverged(f"{found}: choose optim.lr below {task.run.optim.lr} or a lower trainer.gradient_clip_val")
        return {
            "tokens": step * self.tokens_per_step,
            "lr": task.run.optim.lr * lr_factor(step - 1, task.total_steps, task.run.optim),
            "train/loss": loss,
            "train/grad_norm": norm,
        }

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """A context in which a signal takes effect at once: no step would be lost, so a resume only scores again."""
        self.scoring = True
        if self.signum is not None:
            raise Interrupted(self.signum, self.step)
        try:
            yield
        finally:
            self.scoring = False

    def state_dict(self) -> dict[str, Any]:
        names = ("step", "seconds", "resumed_from", "last_metrics")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seconds_before = state["step"], state["seconds"]
        self.resumed_from = [*state["resumed_from"], self.step]
        self.last_metrics = state["last_metrics"]


class ProgressBar(Callback):
    """A progress bar over the whole run, with the loss, tokens per second and the remaining time."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.bar: tqdm[Any] | None = None

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        assert isinstance(task, LMTask)
        done, total = (steps * self.tokens_per_step for steps in (trainer.global_step, task.total_steps))
        self.bar = tqdm(total=total, initial=done, desc="training", unit="tok", unit_scale=True, leave=False)

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.bar is not None
        moved = trainer.global_step * self.tokens_per_step - self.bar.n
        if moved and self.bar.update(moved):  # true when tqdm has redrawn, about ten times a second
            self.bar.set_postfix(loss=f"{task.micro_losses[-1].item():.3f}", refresh=False)

    def teardown(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        if self.bar is not None:  # None if no step was left to make
            self.bar.close()
