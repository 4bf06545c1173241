"""Importing what takes seconds, without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Garbage collection takes a sixth of the time of such imports, and a second more when the process ends.

    Almost nothing that is imported is garbage, so it is frozen: no collection visits it.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze()
        gc.enable()


@cache
def freeze() -> None:
    """Exempt all objects that exist now. Only once: what the jobs of a sweep leave behind is garbage."""
    gc.freeze()
