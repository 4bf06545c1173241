"""Several ablations side by side: one question under different conditions, each in a folder of its own."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from matplotlib.figure import Figure

from lm.ablation.figures import draw_forest
from lm.ablation.report import results_frame
from lm.ablation.results import Results, read_results
from lm.ablation.warnings import report_warnings, weakening
from lm.config.ablation import BUDGET_NAMES
from lm.config.identity import described_settings
from lm.report.figures import INK, as_svg, inline
from lm.report.pages import render
from lm.system.files import write_text
from lm.system.terminal import printable, to_override_value

DIGITS = 4  # of bits per byte

Row = dict[str, Any]  # of the table: a contrast of one ablation, in the unit of its report and in bits per byte


def folders(path: Path) -> list[Path]:
    """Of the ablations in a folder; none if it holds one itself."""
    inside = sorted(path.iterdir()) if path.is_dir() and not (path / "ablation.json").exists() else ()
    return [place for place in inside if (place / "ablation.json").exists()]  # a closed folder is an error


def write_overview(path: Path) -> dict[Path, Results]:
    """Write overview.html, its figure and a results.csv of all runs; return the ablations as they began.

    Raises UserError if what one of the folders holds cannot be read.
    """
    every = [read_results(folder) for folder in folders(path)]
    ablations = {results.folder: results for results in sorted(every, key=lambda results: results.record.begun)}
    every_row = [row for results in ablations.values() for row in _comparable(results)]
    places = [*dict.fromkeys(row["comparison"] for row in every_row)]
    rows = sorted(every_row, key=lambda row: places.index(row["comparison"]))  # those of one comparison together
    (path / "figures").mkdir(exist_ok=True)
    frames = [results_frame(results).assign(ablation=printable(folder.name)) for folder, results in ablations.items()]
    table = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    table.insert(0, "ablation", table.pop("ablation"))
    write_text(path / "results.csv", table.to_csv(index=False, lineterminator="\n", errors="replace"))
    svg = as_svg(forest, rows)
    if svg is not None:
        write_text(path / "figures" / "overview.svg", svg)
    context = {
        "title": path.resolve().name,
        "rows": rows,
        "svg": svg and inline(svg, "Differences of all ablations in bits per byte"),
        "settings": _conditions(ablations),
        "not_shown": [*_not_shown(ablations, {row["ablation"] for row in rows})],
        "digits": DIGITS,
    }
    write_text(path / "overview.html", render("overview.html.j2", **context))
    return ablations


def _comparable(results: Results) -> Iterator[Row]:
    """The primary comparisons of losses, or all where none is primary, that have a pair of runs; equal runs once."""
    folder, weaknesses = results.folder, report_warnings(results)
    shown = [row for row in results.asked() if row.family != "interaction" and row.n_seeds and results.lower_is_better]
    report = next((name for name in ("report.html", "report.md") if (folder / name).exists()), None)
    for contrast in shown:
        runs = results.done_of(contrast.arm, contrast.budget)
        bits = runs["val_bpb"].mean() / runs[results.record.metric].mean()  # the same for arms of one tokenizer
        ends = (contrast.mean_difference, contrast.ci_low, contrast.ci_high)
        mean, low, high = (None if value is None else value * bits for value in ends)
        in_bits = replace(contrast, mean_difference=mean, ci_low=low, ci_high=high, primary=False)
        in_bits.differences = [value * bits for value in contrast.differences]
        yield vars(contrast) | {
            # the same in every ablation, also where the runs serve further budgets
            "comparison": f"{contrast.name}, at equal {BUDGET_NAMES[contrast.budget]}",
            "ablation": folder.name,
            "address": f"{quote(os.fsencode(folder.name))}/{report}" if report else None,
            "unit": results.unit,
            "ci": results.ci,
            "digits": contrast.digits,
            "in_bits": in_bits,
            "weakened": weakening(contrast, weaknesses),
        }


def forest(rows: list[Row]) -> Figure | None:
    by_comparison = groupby(rows, itemgetter("comparison"))  # those of one are together
    groups = {name: [(row["ablation"], INK, row["in_bits"]) for row in own] for name, own in by_comparison}
    return draw_forest(groups, 0, "difference, bits per byte (left is better)")


def _conditions(ablations: dict[Path, Results]) -> list[tuple[str, list[str]]]:
    """Each ablation's settings that are not those of the first; empty where all are the same."""
    settings = {
        folder.name: described_settings(results.record.arms[results.record.baseline].settings)
        for folder, results in ablations.items()
    }
    first, *_ = [*settings.values(), {}]
    others = {
        name: [f"{key}={to_override_value(value)}" for key, value in own.items() if value not in (None, first.get(key))]
        for name, own in settings.items()
    }
    return [*others.items()] if any(others.values()) else []


def _not_shown(ablations: dict[Path, Results], shown: set[str]) -> Iterator[str]:
    for folder, results in ablations.items():
        if folder.name not in shown:
            metric = f"Its metric is {results.record.metric}."
            yield f"{folder.name} is not shown. {'No pair of runs yet.' if results.lower_is_better else metric}"
