"""What a process may not do: write as nobody, or write large files."""

import os
import resource
from contextlib import contextmanager


@contextmanager
def as_nobody():
    """Permissions do not bind root, as which tests may run."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def small_disk(n_bytes=4096):
    """No file can grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
