"""Files that are whole or absent: written beside their final name, synced, then renamed."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(folder: Path, name: str | Callable[[Path], str]) -> Iterator[IO[bytes]]:
    """Write into this, and the file appears whole under its name in `folder` at the end, or, on an error, not at all.

    A name may depend on what was written: a function then gets the finished temporary file.
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
    except OSError as error:  # a full disk, say: name the place
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(folder / name if isinstance(name, str) else folder)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with whole_file(path.parent, path.name) as file:
        file.write(text.encode())


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Make a rename inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Delete what a killed process left unfinished. The caller holds the folder's lock."""
    for path in folder.rglob(".partial-*"):
        path.unlink(missing_ok=True)


UMASK = os.umask(0)
os.umask(UMASK)
