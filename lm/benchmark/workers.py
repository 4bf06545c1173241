"""Answers per hour: a worker with one thread for each core beside one worker with all of them."""

import multiprocessing
import time
from collections.abc import Iterator
from statistics import median
from threading import Barrier

import torch

from lm.benchmark.measure import Figure
from lm.benchmark.shapes import DEFAULT
from lm.system.device import has_native_bf16

ROUNDS = 4


def workers(device: str, seconds: float) -> Iterator[Figure]:
    """Steps per second of the default model, all workers together; the two ways take turns."""
    cores, spawn = torch.get_num_threads(), multiprocessing.get_context("spawn")
    if device != "cpu" or cores < 2:
        return
    rates: dict[int, list[float]] = {cores: [], 1: []}
    for _ in range(ROUNDS):
        for n, found in rates.items():
            with spawn.Manager() as manager, spawn.Pool(n) as pool:
                work = (cores // n, seconds / ROUNDS, manager.Barrier(n))
                found.append(sum(pool.starmap(steps, [work] * n, chunksize=1)))
    many, one = (median(found) for found in rates.values())
    yield Figure("workers", f"{cores} workers of 1 thread", many, "steps/s", f"1 of {cores} threads", one)


def steps(threads: int, seconds: float, together: Barrier) -> float:
    """Steps per second, counted from when all workers are warm."""
    torch.set_num_threads(threads)
    step, made = DEFAULT.step("cpu", mixed=has_native_bf16("cpu")), 0
    step(), step()
    together.wait()
    started = time.perf_counter()
    while not made or time.perf_counter() - started < seconds:
        step()
        made += 1
    return made / (time.perf_counter() - started)
