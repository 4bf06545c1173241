"""The signals that ask a process to end, and which of several signals is impatience."""

import signal

SHUTDOWN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHUTDOWN_SECONDS = 2.0  # time in which all signals of one shutdown arrive


def is_impatient(signum: int, seconds: float) -> bool:
    """Return whether a signal so many seconds after a first signal asks to stop at once, as a second Ctrl-C does.

    Other signals at nearly the same time are one shutdown: systemd, torchrun, Slurm and a closed terminal signal a
    process by itself and with its group.
    """
    return signum == signal.SIGINT or seconds > SHUTDOWN_SECONDS


def is_ignored(signum: int) -> bool:
    """Return whether this process ignores a signal: nohup lets a command ignore SIGHUP."""
    return signal.getsignal(signum) == signal.SIG_IGN
