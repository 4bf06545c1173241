"""The curves of a run, as the columns of its metrics.csv."""

import csv
import math
from contextlib import suppress
from pathlib import Path

from lm.config.renamed import current_column

FILE = "metrics.csv"
Lines = list[dict[str, str]]
Points = dict[int, float]  # tokens -> value


def read_lines(path: Path) -> Lines:
    """The whole rows of a CSV file of a run. Raises OSError, and ValueError if it is no such file."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            whole = [line for line in csv.DictReader(file) if None not in (*line, *line.values())]
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    return [{current_column(key): value for key, value in line.items()} for line in whole]


def points(lines: Lines, column: str) -> Points:
    """The values of a column, without what is no number."""
    found: Points = {}
    for line in lines:
        with suppress(KeyError, ValueError):
            found[int(line["tokens"])] = float(line[column])
    return {tokens: value for tokens, value in found.items() if math.isfinite(value)}
