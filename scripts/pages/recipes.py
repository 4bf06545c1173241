"""The figures of the recipes in pages and configs: python -m scripts.pages.recipes writes them.

docs/studies/recipe_figures.csv has the loss of each seed. Of several recipes that the same settings have meant, the
last counts.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs/studies/recipe_figures.csv"
PAGES = (ROOT / "docs/performance.md", ROOT / "docs/own-text.md")
LOSS = "mean validation loss"  # how the name of its column begins


def figures() -> Iterator[tuple[str, str, list[dict[str, str]]]]:
    """Yield settings, the recipe that they meant and its rows, in the order of their measurement."""
    with open(ROWS, newline="") as file:
        for (settings, recipe), rows in groupby(csv.DictReader(file), lambda row: (row["settings"], row["recipe"])):
            yield settings, recipe, [*rows]


def mean_loss(rows: list[dict[str, str]]) -> float:
    return fmean(float(row["val_loss"]) for row in rows)


def cells_of(rows: list[dict[str, str]]) -> dict[str, str]:
    """Return what tables say of the seeds of a recipe, by the beginning of the name of a column."""
    losses = [float(row["val_loss"]) for row in rows]
    mean, sd = mean_loss(rows), stdev(losses)
    bits_per_byte = mean / math.log(2) * float(rows[0]["tokens_per_byte"])
    return {
        "bits per byte": f"{bits_per_byte:.3f}",
        "seeds": f"{len(losses)}",
        LOSS: f"{mean:.4f}",
        "sd": f"{sd:.4f}",
        "standard error": f"{sd / math.sqrt(len(losses)):.4f}",
    }


def with_tables(page: str, latest: Mapping[str, dict[str, str]]) -> str:
    """Return a page whose tables have these cells, in rows that begin with the settings."""
    lines, names = [], list[str]()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if any(cell.startswith(LOSS) for cell in cells):
            names = [cell.partition(",")[0] for cell in cells]
        settings = cells[0].strip("`").removeprefix("train.py ")
        if names and settings in latest:
            shown = [latest[settings].get(name, cell) for name, cell in zip(names, cells, strict=True)]
            line = f"| {' | '.join(shown)} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def texts() -> dict[Path, str]:
    """Return the pages and configs with their figures."""
    latest = {settings: rows for settings, _, rows in figures()}
    cells = {settings: cells_of(rows) for settings, rows in latest.items()}
    made = {path: with_tables(path.read_text(), cells) for path in PAGES}
    for path in sorted((ROOT / "configs/experiment").glob("*.yaml")):
        text, parts = path.read_text(), list[str]()
        for settings, rows in latest.items():
            if settings.split()[0] == f"experiment={path.stem}":
                before, text = re.split(r"(?<=val_loss )\d\.\d+", text, maxsplit=1)
                parts += [before, f"{mean_loss(rows):.3f}"]
        made[path] = "".join([*parts, text])
    return made


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
