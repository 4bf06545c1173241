"""A compiled training step beside the eager one, and the step from which the compilation time is paid back."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

from lm.benchmark.measure import Measurement, alternate, paired, wait
from lm.benchmark.reference import step_in_transformers
from lm.benchmark.shapes import DEFAULT, SHAKESPEARE
from lm.config import UserError

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compiled(device: str, seconds: float) -> Iterator[Measurement]:
    """In fp32. No rows where torch finds no compiler; no break-even step where compiling does not help."""
    for name, shape in {"default": DEFAULT, "tiny Shakespeare": SHAKESPEARE}.items():
        calls = {"compiled": shape.step(device, compiled=True), "eager": shape.step(device)}
        try:
            spent = compile_seconds(calls["compiled"])
        except UserError as error:
            print(f"compile: left out, {error}", file=sys.stderr)
            return
        if (theirs := step_in_transformers(shape.build(device), shape.tokens(device), mixed=False)) is not None:
            calls["transformers"] = theirs
        times = alternate(calls, seconds)
        for reference in list(calls)[1:]:
            ours, other = paired(times["compiled"], times[reference])
            yield Measurement("compile", f"step time, {name}, fp32", 1000 * ours, "ms", reference, 1000 * other)
        ours, eager = paired(times["compiled"], times["eager"])
        if eager > ours:
            yield Measurement("compile", f"break-even step, {name}", spent / (eager - ours), "steps")


def compile_seconds(step: Callable[[], None]) -> float:
    """Seconds of the first step, with an empty compilation cache."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, patch.dict(os.environ, {CACHE: folder}):
        started = time.perf_counter()
        step()
        wait()
        return time.perf_counter() - started
