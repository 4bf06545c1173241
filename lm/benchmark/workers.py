"""Answers per hour: a worker with one thread for each core beside one worker with all of them."""

import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from lm.bare import bare_step
from lm.benchmark.measure import Figure
from lm.benchmark.shapes import DEFAULT
from lm.config import HeadConfig, OptimConfig
from lm.loss import build_loss
from lm.optim import build_optimizer

ROUNDS = 4


def workers(device: str, seconds: float) -> Iterator[Figure]:
    """Steps per second of the default model, all workers together; the two ways take turns."""
    cores = torch.get_num_threads()
    if device != "cpu" or cores < 2:
        return
    rates: dict[int, list[float]] = {cores: [], 1: []}
    for _ in range(ROUNDS):
        for n_workers, found in rates.items():
            with multiprocessing.get_context("spawn").Pool(n_workers) as pool:
                work = partial(steps, cores // n_workers, seconds / ROUNDS)
                end = time.time() + 10 + seconds / ROUNDS  # the same for all, once they have started
                found.append(sum(pool.map(partial(work, end), range(n_workers), chunksize=1)))
    many, one = (median(found) for found in rates.values())
    yield Figure("workers", f"{cores} workers of 1 thread", many, "steps/s", f"1 of {cores} threads", one)


def steps(threads: int, seconds: float, end: float, worker: int) -> float:
    """Steps per second in the last `seconds` before `end`."""
    torch.set_num_threads(threads)
    net = DEFAULT.model()
    optimizer = build_optimizer(net, OptimConfig(), HeadConfig())
    step = partial(
        bare_step, partial(build_loss("auto", DEFAULT.vocab_size, "cpu", False), net), optimizer, [DEFAULT.tokens()]
    )
    while time.time() < end - seconds:
        step()
    made, started = 0, time.perf_counter()
    while time.time() < end:
        step()
        made += 1
    return made / (time.perf_counter() - started)
