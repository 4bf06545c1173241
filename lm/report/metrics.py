"""The curves of a run, as the columns of its metrics.csv."""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lm.config.checks import reading
from lm.system.files import read_csv

FILE = "metrics.csv"
Lines = list[dict[str, str]]
Value = TypeVar("Value")
Points = dict[int, float]  # tokens -> value


def read_lines(path: Path) -> Lines:
    """The rows of a CSV file of a run, without one that broke off; none if there is no such file. Raises UserError."""
    try:
        with reading(path):
            return [row for row in read_csv(path) if None not in (*row, *row.values())]
    except (FileNotFoundError, NotADirectoryError):
        return []


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
