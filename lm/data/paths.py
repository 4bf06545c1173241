"""The files that a file name, folder or glob stands for. Imports nothing heavy."""

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

SUFFIXES = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",)}


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


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
    several = value.startswith("[") and value.endswith("]") and not os.path.exists(value)
    found: list[str] = []
    for one in [part.strip() for part in value[1:-1].split(",")] if several else [value]:
        if not one:
            raise UserError(f"{key}={value}: a path is empty; expected {key}=[PATH,PATH]")
        path = os.path.expanduser(one)
        if not glob.has_magic(one) or is_url(one) or os.path.exists(path):
            found.append(one)
            continue
        matches = [match for match in sorted(glob.glob(path, recursive=True)) if not folders or os.path.isdir(match)]
        if not matches:
            raise UserError(f"{key}={one}: no such {'folder' if folders else 'file'}, and as a glob it matches none")
        found += matches
    return found


def local_files(path: str, suffixes: tuple[str, ...] = (), key: str = "data.path") -> dict[str, Path]:
    """The files of a file name, folder or glob, by their names, which are relative to the folder and sorted."""
    try:
        root, files = find(Path(path).expanduser(), suffixes, key)
    except (OSError, RuntimeError) as error:  # name too long, unknown user, no permission
        inner = getattr(error, "filename", None)
        where = f"{inner}: " if inner and str(inner) != path else ""
        raise UserError(f"{key}={path}: {where}{getattr(error, 'strerror', None) or error}") from error
    try:
        return {os.fsencode(file.relative_to(root)).decode(): file for file in files}
    except UnicodeDecodeError as error:
        raise UserError(f"{key}={path}: the file name {error.object!r} is not UTF-8; rename the file") from error


def find(here: Path, suffixes: tuple[str, ...], key: str) -> tuple[Path, list[Path]]:
    if here.is_file():
        return here.parent, [here]
    root, pattern = here, ["**", "*"]
    if not here.is_dir():
        fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), here.parts[:-1]))
        root, pattern = Path(*fixed), list(here.parts[len(fixed) :])
        pattern += ["*"] if pattern[-1:] == ["**"] else []
    files = sorted(file for file in matching(root, pattern) if not suffixes or file.suffix in suffixes)
    if not files:
        found = (
            f"a folder without {' or '.join(suffixes) or 'files'}" if here.is_dir() else "no such file, folder or glob"
        )
        raise UserError(f"{key}={here}: {found}")
    return root, files


def matching(root: Path, pattern: list[str]) -> Iterator[Path]:
    """The files below `root` that match a glob, each once, however many links lead to it.

    Links are followed after all else, so that a file in the folder keeps its own name, and none is followed twice.
    Raises OSError for a folder that cannot be read.
    """
    ahead, links = deque([(root, 0)]), deque[tuple[Path, int]]()  # folders, and the part of the pattern for their names
    seen: set[tuple[int, int, int]] = set()
    while ahead or links:
        path, i = (ahead or links).popleft()
        found = status(path)
        if found is None or (place := (found.st_dev, found.st_ino, i)) in seen:
            continue
        seen.add(place)
        if i == len(pattern):
            if stat.S_ISREG(found.st_mode):
                yield path
        elif stat.S_ISDIR(found.st_mode):
            deeper = pattern[i] == "**"
            if deeper:
                ahead.append((path, i + 1))
            for name, linked in names(path, pattern[i]):
                (links if linked else ahead).append((path / name, i if deeper else i + 1))


def status(path: Path) -> os.stat_result | None:
    """None for a link that leads nowhere."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def names(folder: Path, pattern: str) -> Iterator[tuple[str, bool]]:
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
