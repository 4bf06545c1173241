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


def seed_draws(seed: int, device: torch.device) -> None:
    """Set what draws on `device` and on the CPU begin from.

    torch.manual_seed does this for every kind of device there might be, and for each that is absent it formats a stack
    trace: about three milliseconds a step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
