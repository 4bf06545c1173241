"""The server from which the processes of runs are forked.

The server imports once what all runs need; this module itself imports nothing heavy. The server and its forks block
the signals of a shutdown, which a terminal, systemd and Slurm send to every process of a command. Without this block,
runs that still save a checkpoint would seem to have ended. A run unblocks all of these signals but SIGINT, because
Ctrl-C is meant for the driver.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
from typing import Any

from lm.system.signals import SHUTDOWN

PROCESSES: Any = multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Start the server, unless it runs, without waiting for its imports. The earlier, the sooner the first run."""
    # The last one takes seconds, and torch imports it where FLOPs are counted.
    PROCESSES.set_forkserver_preload(["lm.training.train", "datasets", "torch._dynamo"])
    multiprocessing.resource_tracker.ensure_running()  # the server would start it, and that unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN)
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
