"""What takes seconds to import, sooner."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Python's search for garbage takes a sixth of such imports, and a second more when the process ends.

    None of what is imported is garbage, so it is never searched. Once: what the jobs of a sweep leave behind is.
    """
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
        gc.enable()
