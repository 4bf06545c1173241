"""An ablation: a question, arms that differ in one thing, and an answer with its uncertainty.

In: AblateConfig and a RunConfig for each arm. Out: a folder with a run for each arm and seed, and a report. As the data
goes: compose -> plan -> execute -> results -> contrasts -> report, and the tables in the terminal.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
from typing import Any

# The server from which the processes of runs are forked has done their imports once. The server and all that it forks
# block the signals of a shutdown, which a terminal, systemd and Slurm send to every process of a command: runs would
# seem to have ended that still save their checkpoints. Runs unblock all but SIGINT, for Ctrl-C is for the driver.
PROCESSES: Any = multiprocessing.get_context("forkserver")
SHUTDOWN = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def warm_up() -> None:
    """Start the server, unless it runs, without waiting for its imports. The earlier, the sooner the first run."""
    PROCESSES.set_forkserver_preload(["lm.training.train", "datasets"])
    multiprocessing.resource_tracker.ensure_running()  # the server would start it, and that unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN)
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
