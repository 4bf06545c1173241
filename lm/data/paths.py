"""The files that a file name, folder, glob or address stands for. Imports nothing heavy."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from lm.config import DataConfig, TokenizerConfig, UserError
from lm.config.checks import expanded

SUFFIXES = {"json": (".json", ".jsonl"), "csv": (".csv", ".tsv"), "parquet": (".parquet",), "tokens": (".bin",)}
HUB_NAME = r"(\b[\w.-]+\b/)?\b[\w.-]+\b"  # as the Hub takes it
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def is_url(path: str) -> bool:
    return "://" in path


def suffix(path: str | Path) -> str:
    """What a file name ends in, without the suffix of a compression: `.jsonl` for a.jsonl.gz."""
    name = str(path).partition("?")[0] if is_url(str(path)) else str(path)
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if last in COMPRESSED else last


def check_paths(config: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Raise UserError if a local path leads to no file, or stands where a name of the Hub is expected.

    It can be called before anything heavy is imported.
    """
    if tokenizer.path is not None and not Path(tokenizer.path).is_file():
        raise UserError(f"tokenizer.path={tokenizer.path}: no such file; expected a tokenizer.json")
    if config.source == "hub" and not re.fullmatch(HUB_NAME, str(config.path)):
        advice = f"data=parquet, json or csv data.path={config.path} reads files of this machine"
        raise UserError(f"data.path={config.path}: expected OWNER/NAME with data=hub; {advice}")
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
        path = expanded(entry, key)
        if not glob.has_magic(path) or is_url(path) or os.path.exists(path):
            paths.append(path)
            continue
        root = _literal_part(Path(path))
        if glob.has_magic(str(root)):
            path = os.path.join(glob.escape(str(root)), Path(path).relative_to(root))
        matches = [match for match in sorted(glob.glob(path, recursive=True)) if not folders or os.path.isdir(match)]
        if not matches:
            raise UserError(f"{key}={entry}: no such {'folder' if folders else 'file'}, and as a glob it matches none")
        paths += matches
    return paths


def local_files(path: str, suffixes: tuple[str, ...] = (), key: str = "data.path") -> dict[str, Path]:
    """The files of a file name, folder or glob, by their names, which are relative to the folder and sorted.

    `suffixes`: of a folder or glob, only files that end in one of them, compressed or not. Raises UserError, and
    OSError for a folder that cannot be read.
    """
    place = Path(path)
    if place.is_file():
        return {place.name: place}
    if place.is_dir():
        root, files = place, list(_walk(place))
    else:
        root = _literal_part(place)
        pattern = str(place.relative_to(root))
        files = [root / name for name in glob.glob(pattern, root_dir=root, recursive=True)]

    chosen = sorted(file for file in files if (not suffixes or suffix(file) in suffixes) and file.is_file())
    if not chosen:
        kinds = " or ".join(suffixes) or "files"
        what = f"a folder without {kinds}" if place.is_dir() else "no such file, folder or glob"
        raise UserError(f"{key}={path}: {what}")
    return {file.relative_to(root).as_posix(): file for file in chosen}


def from_above(run_dir: Path, path: str | None) -> str | None:
    """A relative path that leads nowhere, from the nearest folder above the run from which it leads somewhere: that is
    where training was started. The hash of the text is compared anyway."""
    if path is None or Path(path).exists():
        return path
    above = (folder / path for folder in run_dir.resolve().parents)
    return next((str(place) for place in above if place.exists()), path)


def _literal_part(pattern: Path) -> Path:
    """The folders with which a glob begins: those without a wildcard, or that exist as they stand, such as `a [1]`."""
    root = Path()
    for part in pattern.parts[:-1]:
        if glob.has_magic(part) and not (root / part).is_dir():
            break
        root /= part
    return root


def _walk(root: Path) -> Iterator[Path]:
    """The files below a folder, without hidden ones. Links are followed."""
    for folder, subfolders, names in os.walk(root, onerror=raise_error, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def raise_error(error: OSError) -> NoReturn:
    """For os.walk, which would skip a folder that it cannot read."""
    raise error
