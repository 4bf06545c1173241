"""Signals that end a run: the first one between two steps, after a checkpoint, one of impatience at once."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.fabric import Fabric

from lm.system.terminal import is_impatient

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """A signal has stopped the run after a whole step. Not an Exception, so that a sweep stops as well."""

    def __init__(self, signum: int, step: int) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {step}")
        self.signum = signum


class Signals:
    """Notes the first signal that arrives while they are handled."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.handled: list[signal.Signals] = []
        self.first_at: float | None = None  # when the first signal arrived, by the monotonic clock

    @contextmanager
    def handling(self) -> Iterator[None]:
        """A context for training, and for what is saved after it. Only the main thread has signals to handle.

        Python calls signal handlers between two of its own instructions, and one call of torch may take minutes. So
        a thread counts the signals: the interpreter writes each at once to the descriptor that the thread reads.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.handled = handled_signals()
        read, write = os.pipe()
        os.set_blocking(write, False)
        watch = threading.Thread(target=self._count, args=(read,), daemon=True)
        watch.start()
        handlers = {signum: signal.getsignal(signum) for signum in self.handled}
        descriptor = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for signum in self.handled:
            signal.signal(signum, self._on_signal)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            os.close(write)  # ends the thread
            watch.join()
            os.close(read)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or _reported(signum)

    def _count(self, descriptor: int) -> None:
        while content := os.read(descriptor, 1):
            if (signum := content[0]) not in self.handled:
                continue
            if self.first_at is None:
                self.first_at = time.monotonic()
                log.info("stopping after this step; the same signal again, such as Ctrl-C, stops at once")
            elif is_impatient(signum, time.monotonic() - self.first_at):
                os._exit(128 + _reported(signum))

    def arrived(self, fabric: Fabric, step: int) -> Interrupted | None:
        """What is to be raised if a signal has arrived at any process: all of them call this after the same step."""
        has_arrived: Any = float(self.signum is not None)
        if fabric.world_size > 1:
            has_arrived = fabric.all_reduce(has_arrived, reduce_op="sum")
        if not has_arrived:
            return None
        return Interrupted(self.signum or signal.SIGTERM, step)


def handled_signals() -> list[signal.Signals]:
    """SIGNALS without a SIGHUP that is ignored, as nohup starts a command, and a SIGUSR1 that has another purpose."""
    signums = [signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
    return signums + [signal.SIGUSR1] * (signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)


def _reported(signum: int) -> int:
    """The signal by which a run is said to have ended: SIGUSR1 is how Slurm may ask for it before a time limit."""
    return signal.SIGTERM if signum == signal.SIGUSR1 else signum
