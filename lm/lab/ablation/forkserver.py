"""The server from which the processes of runs are forked. It has done their imports once; this module has none.

The server and all that it forks block the signals of a shutdown, which a terminal, systemd and Slurm send to every
process of a command: runs would seem to have ended that still save their checkpoints. Runs unblock all but SIGINT, for
Ctrl-C is for the driver.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
from typing import Any

PROCESSES: Any = multiprocessing.get_context("forkserver")
SHUTDOWN = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def warm_up() -> None:
    """Start the server, unless it runs, without waiting for its imports. The earlier, the sooner the first run."""
    # The last one takes seconds, and torch imports it where FLOPs are counted.
    PROCESSES.set_forkserver_preload(["lm.training.train", "datasets", "torch._dynamo"])
    multiprocessing.resource_tracker.ensure_running()  # the server would start it, and that unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN)
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
