"""What to compute on."""

import os

import torch


def set_threads(threads: int | None) -> int:
    """Use this many threads in matrix products (None: OMP_NUM_THREADS, else the cores); returns the count.

    On a CPU, results are equal bit for bit only at an equal count.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = threads or int((os.environ.get("OMP_NUM_THREADS") or str(cores)).split(",")[0])
    torch.set_num_threads(count)
    return count


def best_device() -> str:
    """cuda, mps or cpu: the first that is there."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
