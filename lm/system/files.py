"""Files: atomic writes, and what is written and read as JSON, YAML and CSV."""

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import platform
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

PARTIAL = ".partial-"  # beginning of the name of a temporary file
HOST = f"{zlib.crc32(platform.node().encode()):08x}"
STALE_SECONDS = 3600.0  # without a change to a temporary file of another machine


@contextmanager
def temporary_file(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file beside `path` and its temporary name, at which it is deleted at the end unless it has been renamed.

    It is locked, by which another process sees whether it is still needed: those beside it that killed processes of
    this machine left are deleted first.
    """
    _remove_unlocked(path.parent.glob(f".partial-{HOST}-*"))
    temporary = path.with_name(f".partial-{HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name[:100]}")
    try:
        while True:
            with open(temporary, "xb") as file:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:  # else another process has deleted it before it was locked
                    yield file, temporary
                    return
    finally:
        with suppress(OSError):  # it has been renamed, or the error of a read-only disk would hide the first one
            temporary.unlink()


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which appears under its name at the end of the context, or not at all on an error.

    It is written under a temporary name beside it, synced to disk, then renamed.
    """
    try:
        with temporary_file(path) as (file, temporary):
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)  # while it is locked
        sync_folder(path.parent)
    except OSError as error:  # for example a full disk: name the final path
        if type(error) is OSError and error.errno is None:  # numpy has written less than it was to
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(path: Path) -> None:
    """Sync a folder, so that a rename inside it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot; what the file holds is synced already
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Delete the temporary files of killed processes, whose locks the kernel has taken away.

    Locks of other machines may not be seen, so theirs are told by their age.
    """
    _remove_unlocked(folder.rglob(".partial-*"))


def _remove_unlocked(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError), open(path, "r+b") as file:  # it may be another user's, or written to its end by now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another process holds it
            if path.name.startswith(f".partial-{HOST}-") or time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def sync_files(paths: Iterable[Path]) -> None:
    """Wait until the content of the files is on disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError if the file holds anything else."""
    return _mapping(json.loads(path.read_bytes()))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file. Raises ValueError if the file holds anything else."""
    try:  # the loader in C is ten times as fast
        return _mapping(yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"expected keys and values, found {type(content).__name__}")
    return content


def read_csv(path: Path, whole: bool = True) -> list[dict[str, str]]:
    """The rows of a file, by its columns. One that broke off raises ValueError, or is left out if not `whole`."""
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    if not whole:
        text = text[: text.rfind("\n") + 1]  # a line without an end may have all its cells, the last one cut off
    rows = [*csv.DictReader(io.StringIO(text))]
    broken = [number for number, row in enumerate(rows, start=2) if None in (*row, *row.values())]
    if whole and (broken or not text.endswith(("\n", "\r"))):
        raise ValueError(f"row {broken[0] if broken else len(rows) + 1} broke off")
    return [row for number, row in enumerate(rows, start=2) if number not in broken]


def csv_text(first: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """With these columns first, then every other that a row has; what a row does not have is empty."""
    buffer, columns = io.StringIO(), dict.fromkeys([*first, *(key for row in rows for key in row)])
    writer = csv.DictWriter(buffer, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    """The SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
