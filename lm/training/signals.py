"""Signals that end a run: the first one between two steps, after a checkpoint, the second one at once."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lm.training.callbacks import step_metrics

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """A signal has stopped the run after a whole step. Not an Exception, so that a sweep stops as well."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum = signum


class StopOnSignal(Callback):
    """Raises Interrupted at the end of the step in which a signal arrived, on all ranks at the same step."""

    def __init__(self) -> None:
        self.signum: int | None = None

    @contextmanager
    def handling_signals(self, trainer: Trainer) -> Iterator[None]:
        """A context for `trainer.fit`."""
        handlers = {signum: signal.getsignal(signum) for signum in handled_signals()}
        self._install()
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        self._raise(trainer)

    def _install(self) -> None:
        for signum in handled_signals():
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        log.info("stopping after this step; the same signal again, such as Ctrl-C, stops at once")
        restore_default_handlers()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()  # again: Lightning has installed a handler of SIGTERM, which could end a run within a step

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, config = trainer.global_step, module.run.trainer
        if (batch_idx + 1) % config.accumulate_grad_batches:
            return
        # several ranks agree on whether to stop, which takes a collective operation
        if config.world_size == 1 or step % config.log_every_n_steps == 0 or step == config.max_steps:
            self._raise(trainer, module)

    def _raise(self, trainer: Trainer, module: Any = None) -> None:
        if trainer.strategy.reduce_boolean_decision(self.signum is not None, all=False):
            if module is not None:
                step_metrics(module, trainer.global_step)  # raises Diverged: no checkpoint of a step that is not finite
            raise Interrupted(self.signum or signal.SIGTERM, trainer.global_step)


def restore_default_handlers() -> None:
    """Let the next signal end the process at once, also within an operation of torch."""
    for signum in handled_signals():
        signal.signal(signum, signal.SIG_DFL)


def handled_signals() -> list[signal.Signals]:
    """SIGNALS without a SIGHUP that is ignored, as nohup starts a command."""
    return [signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
