"""Atomic writes: a file is written under a temporary name, synced to disk, then renamed."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_file(folder: Path, name: str | Callable[[Path], str]) -> Iterator[IO[bytes]]:
    """A file to write to, which appears under `name` in `folder` at the end of the context, or not at all on an error.

    `name` may be a function of the finished temporary file.
    """
    descriptor, unnamed = tempfile.mkstemp(dir=folder, prefix=".partial-")
    temporary = Path(unnamed)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~UMASK)
        temporary.replace(folder / (name if isinstance(name, str) else name(temporary)))
        sync_folder(folder)
    except OSError as error:  # for example a full disk: name the final path
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(folder / name if isinstance(name, str) else folder)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with atomic_file(path.parent, path.name) as file:
        file.write(text.encode())


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that a rename inside it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Delete the temporary files of a killed process. The caller holds the folder's lock."""
    for path in folder.rglob(".partial-*"):
        path.unlink(missing_ok=True)


UMASK = os.umask(0)
os.umask(UMASK)
