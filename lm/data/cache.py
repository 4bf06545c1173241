"""Folders of the cache: each is written beside its final name under a lock, and renamed when it is whole."""

import errno
import hashlib
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
import xxhash

from lm.config import UserError

PATIENCE = 2.0  # seconds of waiting for another process before it is said
log = logging.getLogger(__name__)


class ReadOnlyCache(UserError):
    """The cache would have to be written to, and cannot be."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise ReadOnlyCache where writing to a folder of the cache is not permitted."""
    try:
        yield
    except OSError as error:
        refused = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
        without_locks = (errno.ENOLCK, errno.EOPNOTSUPP)  # some network file systems
        if error.errno not in (*refused, *without_locks):
            raise
        place = f"data.cache_dir={folder.parents[1]}"
        raise ReadOnlyCache(
            f"{place}: {error.strerror}; expected a folder to write to, where files can be locked"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is to be written. Raises ReadOnlyCache."""
    lock = filelock.FileLock(folder.with_suffix(".lock"))
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=PATIENCE)
        except filelock.Timeout:
            log.info("%s: is being written by another process; waiting for it", folder)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, which the caller renames; on an error it is removed. Its lock is held."""
    for other in folder.parent.glob("*.partial"):
        remove_if_left(other)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(folder):
        partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_if_left(partial: Path) -> None:
    """Remove the folder of a killed process: nobody holds its lock."""
    with suppress(filelock.Timeout, OSError), filelock.FileLock(partial.with_suffix(".lock"), timeout=0):
        shutil.rmtree(partial, ignore_errors=True)


def checksum(path: Path) -> str:
    """XXH3 with 128 bits, which finds damage as fast as files are read. It is no protection against forgery."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
