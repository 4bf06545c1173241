"""What takes seconds to import, sooner."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Python's search for garbage takes a sixth of such imports, and a second more when the process ends.

    Next to nothing of what is imported is garbage, so it is never searched.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze()
        gc.enable()


@cache
def freeze() -> None:
    """Search nothing of what is there now. Once: what the jobs of a sweep leave behind is garbage."""
    gc.freeze()
