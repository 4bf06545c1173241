"""Folders of the cache: each is written beside its final name under a lock, and renamed when it is whole."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import xxhash

from lm.config import BadInput

BLOCK = 1 << 20


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is to be written. Raises BadInput if its parent cannot be written to."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(folder.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
    except OSError as error:
        raise BadInput(
            f"data.cache_dir={folder.parents[1]}: {error.strerror}; expected a folder to write to"
        ) from error
    with filelock.FileLock(folder.with_suffix(".lock")):
        yield


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, which the caller renames; on an error it is removed. Its lock is held."""
    for other in folder.parent.glob("*.partial"):
        remove_if_left(other)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_if_left(partial: Path) -> None:
    """Remove the folder of a killed process: nobody holds its lock."""
    try:
        with filelock.FileLock(partial.with_suffix(".lock"), timeout=0):
            shutil.rmtree(partial, ignore_errors=True)
    except filelock.Timeout:
        pass


def checksum(path: Path) -> str:
    """XXH3 with 128 bits, which finds damage as fast as files are read. It is no protection against forgery."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
