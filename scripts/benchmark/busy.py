"""A training step beside another program: idle, and with one process in an endless loop on the same cores.

The environment variable GOMP_SPINCOUNT decides how they compare (docs/performance.md).
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import torch

from lm.system.device import has_native_bf16

from .measure import Measurement, median_ratio
from .models import DEFAULT, step

ROUNDS = 5
LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # ends with the process that started it


def busy(device: str, seconds: float) -> Iterator[Measurement]:
    """Idle and beside the other program in turn. The reference is idle."""
    threads = torch.get_num_threads()
    if device != "cpu" or threads < 2:
        return
    call = step(DEFAULT, "cpu", mixed=has_native_bf16("cpu"))
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for is_loaded in times:
            with _other_program() if is_loaded else nullcontext():
                _step_time(call, min(0.3, seconds))
                times[is_loaded].append(_step_time(call, seconds / ROUNDS))
    idle = 1000 * median(times[False])
    beside = idle * median_ratio(times[True], times[False])
    yield Measurement("busy", f"step time beside another program, threads={threads}", beside, "ms", "idle", idle)


def _step_time(call: Callable[[], object], seconds: float) -> float:
    """The mean seconds of the steps that so many seconds hold, of one at least."""
    started, n_steps = time.perf_counter(), 0
    while not n_steps or time.perf_counter() - started < seconds:
        call()
        n_steps += 1
    return (time.perf_counter() - started) / n_steps


@contextmanager
def _other_program() -> Iterator[None]:
    """A process that uses one core, in a session of its own as desktop programs are."""
    with subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())], start_new_session=True) as program:
        try:
            yield
        finally:
            program.kill()
