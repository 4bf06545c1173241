"""A training step through torch's compiler: what that gives, and after how many steps it has paid for the compiling."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from lm.benchmark.measure import Figure, alternate, paired, wait
from lm.benchmark.peers import step_in_transformers
from lm.benchmark.shapes import DEFAULT, SHAKESPEARE
from lm.config import BadInput

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compiled(device: str, seconds: float) -> Iterator[Figure]:
    """In full precision. Nothing where torch finds no compiler; "pays from" only where it ever pays."""
    for name, shape in {"default": DEFAULT, "tiny Shakespeare": SHAKESPEARE}.items():
        calls = {"ours": shape.step(device, compiled=True), "not compiled": shape.step(device)}
        try:
            spent = compiling(calls["ours"])
        except BadInput as error:
            print(f"compile: left out, {error}", file=sys.stderr)
            return
        if (theirs := step_in_transformers(shape.model(device), shape.tokens(device), mixed=False)) is not None:
            calls["transformers"] = theirs
        times = alternate(calls, seconds)
        for peer in list(calls)[1:]:
            ours, other = paired(times["ours"], times[peer])
            yield Figure("compile", f"step, {name}, fp32", 1000 * ours, "ms", peer, 1000 * other)
        ours, other = paired(times["ours"], times["not compiled"])
        if other > ours:
            yield Figure("compile", f"pays from, {name}", spent / (other - ours), "steps")


def compiling(step: Callable[[], None]) -> float:
    """Seconds of the first step, with nothing left of an earlier compiling on disk."""
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[CACHE] = folder
        started = time.perf_counter()
        try:
            step()
            wait()
            return time.perf_counter() - started
        finally:
            os.environ.pop(CACHE)
            os.environ |= {CACHE: before} if before is not None else {}
