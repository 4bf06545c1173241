"""Files: atomic writes, and what is written and read as JSON, YAML and CSV."""

import csv
import errno
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

PARTIAL = ".partial-"  # beginning of the name of a temporary file
ABANDONED_SECONDS = 24 * 3600.0  # time after which nobody writes to a temporary folder of a cache any more
LOCK = ".lock"  # in a folder of a run or an ablation; the kernel keeps it

CONFIG_HASH = re.compile(r"^config_hash: ", re.MULTILINE)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to. The file appears under its name at the end of the context, or not at all on an error.

    Write the file under a temporary name in the same folder, sync the file to disk, then rename it.
    """
    temporary = path.with_name(f"{PARTIAL}{uuid.uuid4().hex[:12]}-{path.name[:100]}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:  # for example a full disk: the error names the final path
        if type(error) is OSError and error.errno is None:  # numpy has written less than it had to write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # it has been renamed, or the error of a read-only disk would hide the first error
            temporary.unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that a rename inside the folder survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot; the content of the file is synced already
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder inside a cache, for files that the caller renames into place when they are whole.

    Remove folders that killed processes left more than a day ago.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob("*.partial"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(".partial", "", parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def rename_folder(scratch: Path, folder: Path) -> None:
    """Rename a scratch folder into its place in a cache. Another process may have been faster with the same bytes."""
    scratch.chmod(0o755)  # as mkdir makes a folder; other users cannot read a scratch folder
    try:
        os.rename(scratch, folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    sync_folder(folder.parent)


def remove_partial(folder: Path) -> None:
    """Delete the temporary files that killed processes left in a folder and in the folders below, such as model/.

    The caller holds the lock of the folder. The runs of an ablation, which have locks of their own, lie deeper.
    """
    for path in (*folder.glob(f"{PARTIAL}*"), *folder.glob(f"*/{PARTIAL}*")):
        with suppress(OSError):  # the file may be renamed by now
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
    """Return the JSON object in a file. Raises ValueError if the file holds anything else."""
    return _mapping(json.loads(path.read_bytes()))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ValueError if the file holds anything else."""
    try:  # the loader in C is ten times as fast
        return _mapping(yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"expected keys and values, found {type(content).__name__}")
    return content


def read_csv(path: Path, whole: bool = True) -> list[dict[str, str]]:
    """Return the rows of a CSV file, by its columns.

    Raises ValueError for a row that broke off. Leave such a row out if not `whole`.
    """
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    if not whole:
        text = text[: text.rfind("\n") + 1]  # a line without an end may have all its cells, with the last cell cut off
    rows = [*csv.DictReader(io.StringIO(text))]
    broken = [number for number, row in enumerate(rows, start=2) if None in (*row, *row.values())]
    if whole and (broken or not text.endswith(("\n", "\r"))):
        raise ValueError(f"row {broken[0] if broken else len(rows) + 1} broke off")
    return [row for number, row in enumerate(rows, start=2) if number not in broken]


def csv_text(first: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV: these columns first, then every further column of a row. A missing cell is empty."""
    buffer, columns = io.StringIO(), dict.fromkeys([*first, *(key for row in rows for key in row)])
    writer = csv.DictWriter(buffer, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def is_run(folder: Path) -> bool:
    """Return whether a folder is the directory of a run: its config.yaml has a `config_hash`.

    The config.yaml of another program does not make a folder a run.
    """
    try:
        return bool(CONFIG_HASH.search((folder / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
