"""The files that a path stands for (a file, a folder, a glob), and how a file is opened. Imports nothing heavy."""

import glob
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, NoReturn

from lm.errors import UserError, named
from lm.system.files import is_run

ENDINGS = {
    "json": (".json", ".jsonl", ".ndjson", ".jl", ".jsonlines"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "tokens": (".bin",),
}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}  # extension -> module that opens the file
BLOCK = 1 << 20  # bytes that are read at a time


def is_url(path: str) -> bool:
    return "://" in path


def extension(path: str | Path) -> str:
    """Return the extension of a name, without the extension of a compression.

    >>> extension("rows.jsonl.gz"), extension("https://example.org/a.csv?raw=1")
    ('.jsonl', '.csv')
    """
    name = str(path).partition("?")[0] if is_url(str(path)) else str(path)
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if last in COMPRESSED else last


def kind_of(path: str) -> str:
    """Return the kind of text (a choice of the group data) that a file, folder or glob holds, by endings.

    >>> kind_of("my.txt"), kind_of("rows.jsonl.gz")
    ('text', 'json')
    """
    endings = {extension(path)}
    with suppress(OSError, UserError):  # an address, or nothing
        endings = {extension(file) for file in local_files(path).values()}
    return next((kind for kind, of_kind in ENDINGS.items() if endings <= {*of_kind}), "text")


def local_files(path: str, endings: tuple[str, ...] = (), key: str = "data.path") -> dict[str, Path]:
    """Return the files of a file name, folder or glob by their names, sorted.

    A name is relative to the folder. Hidden files and folders, `__pycache__`, runs, and folders that are links are
    left out: a link to a folder above would never end. With `endings`, a folder or glob gives only
    files that end so, compressed or not. Raises UserError, and OSError for a closed folder or a broken link.
    """
    place = Path(path)
    if place.is_file():
        return {place.name: place}
    root = place if place.is_dir() else literal_part(place)
    paths = _walk(root) if place.is_dir() else matches(path)
    chosen = (file for file in paths if not endings or extension(file) in endings)
    files = sorted(file for file in chosen if S_ISREG(file.stat().st_mode))  # is_file() would pass over a broken link
    if not files:
        kinds = " or ".join(endings) or "files"
        what = "is no regular file" if place.exists() else "no such file, folder or glob"
        if place.is_dir():
            what = f"a folder without {kinds}; runs and hidden files in it are left out"
        raise UserError(f"{key}={path}: {what}")
    return {file.relative_to(root).as_posix(): file for file in files}


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, onerror=raise_error):
        subfolders[:] = [name for name in subfolders if not _is_hidden(name) and not is_run(Path(folder, name))]
        yield from (Path(folder, name) for name in names if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is of no interest to a reader: hidden, or Python's cache of compiled code."""
    return name.startswith(".") or name == "__pycache__"


def raise_error(error: OSError) -> NoReturn:
    """Raise the error that os.walk would pass over."""
    raise error


def matches(pattern: str) -> list[Path]:
    """Return what a glob matches, sorted. A pattern that is no glob matches nothing.

    Hidden files, and the content of linked folders below a `**`, are left out.
    """
    root = literal_part(Path(pattern))
    below = str(Path(pattern).relative_to(root))
    if below.endswith("**"):  # a ** at the end stands for folders alone
        below += "/*"
    with suppress(ValueError, NotImplementedError):  # a ** beside other letters, or an absolute pattern
        paths = sorted(root.glob(below))
        return [path for path in paths if not any(map(_is_hidden, path.relative_to(root).parts))]
    return []


def literal_part(pattern: Path) -> Path:
    """Return the folders with which a glob begins: without a wildcard, or existing as they stand, as `a [1]`."""
    root = Path()
    for part in pattern.parts[:-1]:
        if glob.has_magic(part) and not (root / part).is_dir():
            break
        root /= part
    return root


def listed(value: str, key: str, folders: bool = False) -> list[str]:
    """Return the paths that [PATH,PATH] or a glob stands for, in order; for anything else, the path itself.

    `folders`: whether a glob gives folders alone. Raises UserError.
    """
    is_list = value.startswith("[") and value.endswith("]") and not os.path.exists(value)
    paths: list[str] = []
    for entry in [part.strip() for part in value[1:-1].split(",")] if is_list else [value]:
        if not entry:
            raise UserError(f"{key}={value}: a path is empty; expected {key}=[PATH,PATH]")
        path = os.path.expanduser(entry)
        if is_url(path) or os.path.exists(path) or not glob.has_magic(path):
            paths.append(path)
            continue
        matched = [str(match) for match in matches(path) if not folders or match.is_dir()]
        if not matched:
            raise UserError(f"{key}={entry}: no such {'folder' if folders else 'file'}, and as a glob it matches none")
        paths += matched
    return paths


def as_started(folder: Path, started_in: str, path: str) -> str:
    """Return where a path leads that was typed in the folder `started_in`, which is given from `folder` on."""
    return path if is_url(path) else os.path.normpath(folder / started_in / path)


def open_file(file: Path) -> IO[bytes]:
    """Open a local file, decompressed as the end of its name says."""
    if (last := file.suffix.lower()) not in COMPRESSED:
        return open(file, "rb")
    module: Any = import_module(COMPRESSED[last])
    if last == ".zst":
        return io.BufferedReader(module.CompressedInputStream(str(file), "zstd"), BLOCK)
    return module.open(file, "rb")


@contextmanager
def reading_from(place: str, kind: str) -> Iterator[None]:
    """Turn what a reader raises into a UserError that names the place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cure = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        reason = getattr(error, "strerror", None) or named(error.__cause__ or error)
        raise UserError(f"{place}: cannot be read as {kind} ({reason}){cure}") from error
