"""threads=auto: the number of threads with which a run is fastest beside the programs that run when it begins."""

import logging
from dataclasses import replace
from statistics import median

import torch

from lm.config import RunConfig
from lm.system.device import cores, set_threads
from lm.system.waiting import PERIOD, adaptive_waiting
from lm.training.options import resolve
from lm.training.run_directory import RunDirectory
from lm.training.step import TimedStep, step_time

ROUNDS, TURN = 3, 0.3  # each number of threads gets so many turns of so many seconds
SETTLING = 2 * PERIOD  # seconds before each turn, in which threads that wait adapt to the load
log = logging.getLogger(__name__)


def auto_threads(run: RunConfig, directory: RunDirectory, vocab_size: int) -> int:
    """The number that the run in `directory` was begun with, else the fastest at present; on a GPU the default."""
    if directory.config.exists():
        return set_threads(int(directory.read_config()["threads"]))
    return fastest_threads(run, vocab_size) if resolve(run)["accelerator"] == "cpu" else set_threads(None)


def fastest_threads(run: RunConfig, vocab_size: int) -> int:
    """Set and return 1, 2, 4, ... or the number of cores: that with the shortest training step, measured in turns.

    Takes some seconds. Nothing that the run computes depends on the measurement but by the number that it gives.
    """
    counts = sorted({2**i for i in range(cores().bit_length())} | {cores()})
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    log.info("threads=auto: measuring a training step with %s threads", ", ".join(map(str, counts)))
    with torch.random.fork_rng(devices=[]):
        step = TimedStep(replace(run, compile=False), vocab_size)
        for _ in range(ROUNDS):
            for n, times in seconds.items():
                with adaptive_waiting(set_threads(n)):
                    step_time(step, SETTLING)
                    times.append(step_time(step, TURN))
    found = {n: median(times) for n, times in seconds.items()}
    chosen = set_threads(min(found, key=lambda n: found[n]))
    shown = ", ".join(f"{1000 * one:.3g} ms with {n}" for n, one in found.items())
    log.info("threads=auto: chose %d; at the present load a step takes %s", chosen, shown)
    return chosen
