"""A training step beside another program: idle, and with one process in an endless loop on the same cores."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import torch

from lm.ablation.step_timing import step_time
from lm.benchmark.measure import Measurement
from lm.benchmark.nanogpt import SHAPES, Theirs, their_step
from lm.benchmark.shapes import DEFAULT
from lm.system.device import has_native_bf16

ROUNDS = 5
WARM_UP = 0.3  # seconds
LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # ends with the process that started it


def busy(device: str, seconds: float, theirs: Theirs | None = None) -> Iterator[Measurement]:
    """Each way takes turns, idle and beside the other program. Its times under load; the reference is idle."""
    threads, mixed = torch.get_num_threads(), has_native_bf16("cpu")
    if device != "cpu" or threads < 2:
        return
    ways: dict[str, tuple[Callable[[], None], int]] = {  # step, threads
        f"default, {threads} threads": (DEFAULT.step("cpu", mixed=mixed), threads),
        "default, 1 thread": (DEFAULT.step("cpu", mixed=mixed), 1),
    }
    if theirs is not None:
        shape = SHAPES["cpu"]["default"]
        ways["default, like GPT-2"] = (shape.step("cpu", mixed=mixed), threads)
        ways["nanoGPT, default"] = (their_step(theirs, shape, "cpu", compiled=False, mixed=mixed), threads)
    found: dict[tuple[str, bool], list[float]] = {(name, loaded): [] for name in ways for loaded in (False, True)}
    for _ in range(ROUNDS):
        for (name, loaded), times in found.items():
            step, n = ways[name]
            torch.set_num_threads(n)
            with other_program() if loaded else nullcontext():
                step_time(step, WARM_UP)
                times.append(step_time(step, seconds / ROUNDS))
    for name in ways:
        beside, alone = (1000 * median(found[name, loaded]) for loaded in (True, False))
        yield Measurement("busy", f"step time, {name}", beside, "ms", "idle", alone)


@contextmanager
def other_program() -> Iterator[subprocess.Popen[bytes]]:
    """A process that uses one core, in a session of its own as desktop programs are."""
    with subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())], start_new_session=True) as program:
        try:
            yield program
        finally:
            program.kill()
