"""Training throughput of an ablation: a worker of one thread for each core beside one worker with all threads."""

import multiprocessing
from collections.abc import Iterator
from statistics import median
from threading import Barrier

import torch

from lm.ablation.step_timing import step_time
from lm.benchmark.measure import Measurement
from lm.benchmark.shapes import DEFAULT
from lm.system.device import has_native_bf16

ROUNDS = 4


def workers(device: str, seconds: float) -> Iterator[Measurement]:
    """Steps per second of the default shape, summed over the workers; the two ways take turns."""
    cores, spawn = torch.get_num_threads(), multiprocessing.get_context("spawn")
    if device != "cpu" or cores < 2:
        return
    found: dict[int, list[float]] = {cores: [], 1: []}
    for _ in range(ROUNDS):
        for n, throughputs in found.items():
            with spawn.Manager() as manager, spawn.Pool(n) as pool:
                work = (cores // n, seconds / ROUNDS, manager.Barrier(n))
                throughputs.append(sum(pool.starmap(steps_per_second, [work] * n, chunksize=1)))
    many, one = (median(throughputs) for throughputs in found.values())
    yield Measurement("workers", f"{cores} workers, 1 thread each", many, "steps/s", f"1 worker, {cores} threads", one)


def steps_per_second(threads: int, seconds: float, together: Barrier) -> float:
    """Of one worker; the clock starts when all workers have warmed up."""
    torch.set_num_threads(threads)
    step = DEFAULT.step("cpu", mixed=has_native_bf16("cpu"))
    step(), step()
    together.wait()
    return 1 / step_time(step, seconds)
