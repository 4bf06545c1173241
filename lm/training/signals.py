"""Signals that end a run: the first one between two steps, after a checkpoint, the second one at once."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning import LightningModule, Trainer

from lm.training.callbacks import StepCallback, step_metrics

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """A signal has stopped the run after a whole step. Not an Exception, so that a sweep stops as well."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum = signum


class StopOnSignal(StepCallback):
    """Raises Interrupted at the end of the step in which a signal arrived, on all ranks at the same step."""

    def __init__(self) -> None:
        self.signum: int | None = None

    @contextmanager
    def handling_signals(self, trainer: Trainer) -> Iterator[None]:
        """A context for `trainer.fit`.

        Python calls signal handlers between two of its own instructions, and one call of torch may take minutes. So
        a thread counts the signals: the interpreter writes each at once to the descriptor that the thread reads.
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        watch = threading.Thread(target=self._count, args=(read,), daemon=True)
        watch.start()
        handlers = {signum: signal.getsignal(signum) for signum in handled_signals()}
        descriptor = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._install()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            os.close(write)  # ends the thread
            watch.join()
            os.close(read)
        self._raise(trainer)

    def _install(self) -> None:
        for signum in handled_signals():
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    @staticmethod
    def _count(descriptor: int) -> None:
        received = 0
        while signum := os.read(descriptor, 1):
            if signum[0] in SIGNALS:
                received += 1
                if received > 1:
                    os._exit(128 + signum[0])
                log.info("stopping after this step; the same signal again, such as Ctrl-C, stops at once")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()  # again: Lightning has installed a handler of SIGTERM, which could end a run within a step

    def on_step_end(self, trainer: Trainer, module: Any, step: int) -> None:
        config = module.run.trainer
        # several ranks agree on whether to stop, which takes a collective operation
        if config.world_size == 1 or step % config.log_every_n_steps == 0 or step == config.max_steps:
            self._raise(trainer, module)

    def _raise(self, trainer: Trainer, module: Any = None) -> None:
        if trainer.strategy.reduce_boolean_decision(self.signum is not None, all=False):
            if module is not None:
                step_metrics(module, trainer.global_step)  # raises Diverged: no checkpoint of a step that is not finite
            raise Interrupted(self.signum or signal.SIGTERM, trainer.global_step)


def handled_signals() -> list[signal.Signals]:
    """SIGNALS without a SIGHUP that is ignored, as nohup starts a command."""
    return [signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
