"""The curves of a run, as the columns of its metrics.csv."""

import csv
import hashlib
import io
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from lm.config import BadInput
from lm.system.files import read_regular, sha256

FILE = "metrics.csv"
HASHED = (FILE, "diagnostics.csv", "samples.jsonl")  # what a run writes row by row
Lines = list[dict[str, str]]
Value = TypeVar("Value")
Points = dict[int, float]  # tokens -> value


def read_lines(path: Path, result: Mapping[str, Any] = MappingProxyType({})) -> Lines:
    """The whole rows of a CSV file of a run. Raises FileNotFoundError or NotADirectoryError if there is none.

    `result` is its result.json. Raises BadInput if the file cannot be read, is no such file, or is not the one whose
    hash is there.
    """
    try:
        lines = csv.DictReader(io.StringIO(read_unchanged(path, result).decode(), newline=""))
        return [line for line in lines if None not in (*line, *line.values())]
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    except (csv.Error, ValueError) as error:
        raise BadInput(f"{path}: {error}; restore it, or remove it to go on without its rows") from error


def read_unchanged(path: Path, result: Mapping[str, Any]) -> bytes:
    """The content of a file of a run. Raises ValueError if it is not the one whose hash is in `result`."""
    content = read_regular(path)
    if (written := result.get(hash_name(path))) and hashlib.sha256(content).hexdigest() != written:
        raise ValueError("was changed after its run had finished")
    return content


def hashes(run_dir: Path) -> dict[str, str]:
    """Of the files that are there, as a result.json and a checkpoint hold them."""
    return {hash_name(path): sha256(path) for name in HASHED if (path := run_dir / name).is_file()}


def hash_name(path: Path) -> str:
    """The key of the file's hash."""
    return f"{path.stem}_hash"


def points(lines: Lines, column: str) -> Points:
    """The values of a column, without what is no number."""
    found: Points = {}
    for line in lines:
        with suppress(KeyError, ValueError):
            found[int(line["tokens"])] = float(line[column])
    return {tokens: value for tokens, value in found.items() if math.isfinite(value)}


def after(curve: Mapping[int, Value], part: int) -> list[Value]:
    """The values after the first 1/part of a curve: the first ones are often far off.

    >>> after({10: 5.0, 20: 4.0, 30: 3.0}, 2)
    [4.0, 3.0]
    """
    end = max(curve, default=0)
    return [value for x, value in curve.items() if part * x >= end]
