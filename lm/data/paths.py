"""The files that a file name, folder, glob or address stands for. Imports nothing heavy."""

import errno
import glob
import itertools
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path

from lm.config import DataConfig, TokenizerConfig, UserError

SUFFIXES = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",), "tokens": (".bin",)}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def is_url(path: str) -> bool:
    return "://" in path


def suffix(path: str | Path) -> str:
    """What a file name ends in, without the suffix of a compression: `.jsonl` for a.jsonl.gz."""
    name = str(path).partition("?")[0] if is_url(str(path)) else str(path)
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if last in COMPRESSED else last


def check_paths(config: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Raise UserError if a local path leads to no file. It can be called before anything heavy is imported."""
    if tokenizer.path is not None and not Path(tokenizer.path).is_file():
        raise UserError(f"tokenizer.path={tokenizer.path}: no such file; expected a tokenizer.json")
    for key, path in {"data.path": config.path, "data.val_path": config.val_path}.items():
        if config.source in ("text", *SUFFIXES) and path and not is_url(path):
            local_files(path, SUFFIXES.get(config.source, ()), key)


def listed(value: str, key: str, folders: bool = False) -> list[str]:
    """The paths that [PATH,PATH] or a glob stands for, in order; of anything else, the one path itself.

    `folders`: of what a glob matches, only the folders. Raises UserError.
    """
    is_list = value.startswith("[") and value.endswith("]") and not os.path.exists(value)
    paths: list[str] = []
    for entry in [part.strip() for part in value[1:-1].split(",")] if is_list else [value]:
        if not entry:
            raise UserError(f"{key}={value}: a path is empty; expected {key}=[PATH,PATH]")
        path = os.path.expanduser(entry)
        if not glob.has_magic(entry) or is_url(entry) or os.path.exists(path):
            paths.append(entry)
            continue
        matches = [match for match in sorted(glob.glob(path, recursive=True)) if not folders or os.path.isdir(match)]
        if not matches:
            raise UserError(f"{key}={entry}: no such {'folder' if folders else 'file'}, and as a glob it matches none")
        paths += matches
    return paths


def local_files(path: str, suffixes: tuple[str, ...] = (), key: str = "data.path") -> dict[str, Path]:
    """The files of a file name, folder or glob, by their names, which are relative to the folder and sorted.

    `suffixes`: of a folder or glob, only files that end in one of them, compressed or not.
    """
    try:
        root, files = _find(Path(path).expanduser(), suffixes, key)
    except (OSError, RuntimeError) as error:  # name too long, unknown user, no permission
        inner = getattr(error, "filename", None)
        where = f"{inner}: " if inner and str(inner) != path else ""
        raise UserError(f"{key}={path}: {where}{getattr(error, 'strerror', None) or error}") from error
    try:
        return {os.fsencode(file.relative_to(root)).decode(): file for file in files}
    except UnicodeDecodeError as error:
        raise UserError(f"{key}={path}: the file name {error.object!r} is not UTF-8; rename the file") from error


def _find(path: Path, suffixes: tuple[str, ...], key: str) -> tuple[Path, list[Path]]:
    if path.is_file():
        return path.parent, [path]
    root, pattern = path, ["**", "*"]
    if not path.is_dir():
        fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))
        root, pattern = Path(*fixed), list(path.parts[len(fixed) :])
        pattern += ["*"] if pattern[-1:] == ["**"] else []
    files = sorted(file for file in _matching(root, pattern) if not suffixes or suffix(file) in suffixes)
    if not files:
        kinds = " or ".join(suffixes) or "files"
        what = f"a folder without {kinds}" if path.is_dir() else "no such file, folder or glob"
        raise UserError(f"{key}={path}: {what}")
    return root, files


def _matching(root: Path, pattern: list[str]) -> Iterator[Path]:
    """The files below `root` that match a glob, each once, however many links lead to it.

    Links are followed after all else, so that a file in the folder keeps its own name, and none is followed twice.
    Raises OSError for a folder that cannot be read.
    """
    ahead, links = deque([(root, 0)]), deque[tuple[Path, int]]()  # folders, and the part of the pattern for their names
    visited: set[tuple[int, int, int]] = set()
    while ahead or links:
        path, i = (ahead or links).popleft()
        status = _status(path)
        if status is None or (place := (status.st_dev, status.st_ino, i)) in visited:
            continue
        visited.add(place)
        if i == len(pattern):
            if stat.S_ISREG(status.st_mode):
                yield path
        elif stat.S_ISDIR(status.st_mode):
            is_deep = pattern[i] == "**"
            if is_deep:
                ahead.append((path, i + 1))
            for name, is_link in _names(path, pattern[i]):
                (links if is_link else ahead).append((path / name, i if is_deep else i + 1))


def _status(path: Path) -> os.stat_result | None:
    """None for a link that leads nowhere."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def _names(folder: Path, pattern: str) -> Iterator[tuple[str, bool]]:
    """The names in a folder that match one part of a glob, and whether they are links. `**` matches folders alone."""
    if not glob.has_magic(pattern):
        yield pattern, (folder / pattern).is_symlink()
        return
    matches = re.compile(translate(pattern)).match
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            visible = pattern.startswith(".") or not entry.name.startswith(".")
            if visible and matches(entry.name) and (pattern != "**" or entry.is_symlink() or entry.is_dir()):
                yield entry.name, entry.is_symlink()
