"""The signals that ask a process to end: `Interrupts` raise at once, `Signals` wait until a training step is made."""

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SHUTDOWN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHUTDOWN_SECONDS = 2.0  # time in which all signals of one shutdown arrive
IMPORT_SECONDS = 0.05  # after which a signal that arrived in an import is sent again
STOPPING = b"stopping after this step; a second signal, such as Ctrl-C, stops at once\n"
COVER = b"\r\x1b[K"  # erases the line of a terminal, on which a progress bar may stand
log = logging.getLogger(__name__)


def handled_signals() -> list[signal.Signals]:
    """Return the signals of a shutdown, without SIGHUP if nohup ignores it."""
    return [s for s in SHUTDOWN if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


class Shutdown:
    """The first signal of a shutdown, and whether a later signal belongs to it."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.arrived_at = 0.0  # by the monotonic clock

    def is_first(self, signum: int) -> bool:
        """Return whether this is the first signal, which is recorded."""
        if self.signum is not None:
            return False
        self.signum, self.arrived_at = signum, time.monotonic()
        return True

    def is_impatient(self, signum: int) -> bool:
        """Return whether a later signal asks to stop at once, as a second Ctrl-C does.

        Other signals at nearly the same time are one shutdown: systemd, torchrun, Slurm and a closed terminal signal a
        process by itself and with its group.
        """
        return signum == signal.SIGINT or time.monotonic() - self.arrived_at > SHUTDOWN_SECONDS


class Interrupts(Shutdown):
    """Raise an exception when a signal ends this process. Later signals of the same shutdown are ignored.

    An exception inside of an import may be lost, or abort the process, where C++ code calls Python. So the exception is
    raised after the import.
    """

    def __init__(self) -> None:
        super().__init__()
        for signum in handled_signals():
            signal.signal(signum, self._raise)

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        if any("importlib" in caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)):
            again = threading.Timer(IMPORT_SECONDS, os.kill, (os.getpid(), signum))
            again.daemon = True
            again.start()
        elif self.is_first(signum) or self.is_impatient(signum):
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


class Interrupted(BaseException):
    """A signal has stopped a run after a whole step. No Exception, so that a sweep stops too."""

    def __init__(self, signum: int, step: int) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {step}")
        self.signum = signum


class Signals(Shutdown):
    """Note a signal inside of `deferred`, where Interrupts would raise. An impatient signal ends the process."""

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals while inside. Only the main thread has signals to handle."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signums = handled_signals()
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signums.append(signal.SIGUSR1)
        handlers = {signum: signal.signal(signum, self._note) for signum in signums}
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        signum = signal.SIGTERM if signum == signal.SIGUSR1 else signum  # Slurm's warning of a time limit
        if self.is_first(signum):
            if log.isEnabledFor(logging.INFO):
                with suppress(OSError):  # no logging in a handler, which may interrupt a message
                    os.write(2, COVER + STOPPING if os.isatty(2) else STOPPING)
        elif self.is_impatient(signum):
            os._exit(128 + signum)

    def arrived(self, fabric: Any, step: int) -> Interrupted | None:
        """Return what to raise if a signal has arrived at any process. All call this after the same step."""
        has_arrived: Any = float(self.signum is not None)
        if fabric.world_size > 1:
            has_arrived = fabric.all_reduce(has_arrived, reduce_op="sum")
        return Interrupted(self.signum or signal.SIGTERM, step) if has_arrived else None
