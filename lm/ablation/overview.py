"""Several ablations side by side: one question under different conditions, each in a folder of its own."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any
from urllib.parse import quote

import pandas as pd
from matplotlib.figure import Figure

from lm.ablation import views
from lm.ablation.contrasts import decimals
from lm.ablation.export import results_frame
from lm.ablation.figures import draw_forest, forest_row
from lm.ablation.power import TuningVariance, satterthwaite, t_quantile
from lm.ablation.results import Results, read_results
from lm.ablation.statistics import difference_p, holm, interval
from lm.ablation.warnings import report_warnings
from lm.config.ablation import BUDGET_NAMES
from lm.config.identity import hashed_settings
from lm.report.figures import as_svg, inline, shorten
from lm.report.pages import render
from lm.system.files import write_text
from lm.system.terminal import printable, to_override_value

DIGITS = 4  # of bits per byte


def folders(path: Path) -> list[Path]:
    """Of the ablations in a folder; none if it holds one itself."""
    inside = sorted(path.iterdir()) if path.is_dir() and not (path / "ablation.json").exists() else ()
    return [place for place in inside if (place / "ablation.json").exists()]  # a closed folder is an error


def write_overview(path: Path) -> dict[Path, Results]:
    """Write overview.html, overview.md, its figure and a results.csv of all runs; return the ablations as they began.

    Raises UserError if what one of the folders holds cannot be read.
    """
    every = [read_results(folder) for folder in folders(path)]
    ablations = {results.folder: results for results in sorted(every, key=lambda results: results.record.begun)}
    rows = compare([row for results in ablations.values() for row in comparable(results)])
    (path / "figures").mkdir(exist_ok=True)
    frames = [results_frame(results).assign(ablation=printable(folder.name)) for folder, results in ablations.items()]
    table = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    table.insert(0, "ablation", table.pop("ablation"))
    write_text(path / "results.csv", table.to_csv(index=False, lineterminator="\n", errors="replace"))
    svg = forest(rows) if rows else None
    if svg is not None:
        write_text(path / "figures" / "overview.svg", svg)
    context = {
        "title": path.resolve().name,
        "rows": [row.cells() for row in rows],
        "svg": svg and inline(svg, "Differences of all ablations in bits per byte"),
        "settings": _conditions(ablations),
        "warnings": list(_weaknesses(ablations, rows)),
        "digits": DIGITS,
    }
    write_text(path / "overview.html", render("overview.html.j2", **context))
    write_text(path / "overview.md", render("overview.md.j2", **context))
    return ablations


@dataclass(slots=True)
class Row:
    """A comparison of one ablation, in the unit of its report and in bits per byte."""

    results: Results
    contrast: pd.Series
    bits: pd.Series  # the difference in bits per byte, by seed
    tuning: TuningVariance | None  # in bits per byte
    apart: dict[str, Any] | None = None  # from the same comparison of the first ablation, in bits per byte

    @property
    def folder(self) -> Path:
        return self.results.folder

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for the same comparison in every ablation."""
        return self.contrast["arm"], self.contrast["baseline"], self.contrast["budget"]

    @property
    def heading(self) -> str:
        arm, baseline, budget = self.key
        return f"{shorten(arm)} - {shorten(baseline)}, at equal {BUDGET_NAMES[budget]}"

    def cells(self) -> dict[str, Any]:
        """What a row of the table shows."""
        report = next((name for name in ("report.html", "report.md") if (self.folder / name).exists()), None)
        return self.contrast.to_dict() | {
            "comparison": f"{self.key[0]} - {self.key[1]}, at equal {BUDGET_NAMES[self.key[2]]}",
            "ablation": self.folder.name,
            "address": f"{quote(os.fsencode(self.folder.name))}/{report}" if report else None,
            "unit": views.unit(self.results),
            "ci": views.ci(self.results.contrasts),
            "digits": decimals(self.contrast["equivalence_margin"]),
            "bits": fmean(self.bits),
            "apart": self.apart,
        }


def comparable(results: Results) -> list[Row]:
    """The primary comparisons of losses, or all where none is primary, that have a pair of runs; equal runs once."""
    if not views.lower_is_better(results):
        return []
    rows, chosen = [], views.asked(results.contrasts)
    chosen = chosen[(chosen["family"] != "interaction") & (chosen["n_seeds"] > 0)]
    for _, contrast in views.merged(results, chosen).iterrows():
        tuning = _tuning_of(contrast)
        if tuning:  # bits per byte for one of the metric are the same for all arms of one tokenizer
            runs = views.finished(results, contrast["arm"], contrast["budget"])
            rate = runs["val_bpb"].mean() / runs[results.record.metric].mean()
            tuning = TuningVariance(tuning.variance * rate**2, tuning.df)
        rows.append(Row(results, contrast, views.differences(results, contrast, "val_bpb"), tuning))
    return rows


def _tuning_of(contrast: pd.Series) -> TuningVariance | None:
    """The variance that tuning adds to the mean, and its df, which follows from that of the sum (Satterthwaite)."""
    n, variance_of_tuning = contrast["n_seeds"], contrast["tuning_sd"] ** 2
    if n < 2 or not variance_of_tuning:
        return None
    of_seeds = contrast["sd"] ** 2 / n
    rest = (of_seeds + variance_of_tuning) ** 2 / contrast["df"] - of_seeds**2 / (n - 1)
    return TuningVariance(variance_of_tuning, max(1, round(variance_of_tuning**2 / rest)))


def compare(rows: list[Row]) -> list[Row]:
    """Rows of the same comparison together, each with how far it is from the first of them; p corrected for all."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    for first, *others in groups.values():
        for row in others:
            row.apart = distance(row, first)
    tested = [row.apart for row in rows if row.apart and row.apart["p"] is not None]
    for apart, p in zip(tested, holm([apart["p"] for apart in tested]), strict=True):
        apart["p_adjusted"] = p
    return [row for group in groups.values() for row in group]


def distance(row: Row, first: Row) -> dict[str, Any]:
    """Paired by seed where more than half of the seeds of both are the same, else by Welch (1947).

    Runs with the same seed are correlated across ablations, so they are paired; if they are independent, pairing only
    reduces the degrees of freedom. A pair of means over shared seeds is not the difference of those over all seeds,
    so `how` says how many are shared. The uncertainty of tuning is added.
    """
    shared = [seed for seed in first.bits.index if seed in row.bits.index]
    n = max(len(row.bits), len(first.bits))
    paired = 2 * len(shared) > n
    samples = [[*(row.bits - first.bits)[shared]]] if paired else [[*row.bits], [*first.bits]]
    mean = fmean(samples[0]) - sum(map(fmean, samples[1:]))
    how = "Welch" if not paired else f"{len(shared)} seeds of both" if len(shared) < n else ""
    apart = {"mean": mean, "how": how, "low": None, "high": None, "p": None, "p_adjusted": None}
    if min(map(len, samples)) < 2:
        return apart
    parts = [(variance(values) / len(values), float(len(values) - 1)) for values in samples]
    parts += [(side.tuning.variance, float(side.tuning.df)) for side in (row, first) if side.tuning]
    if not any(part for part, _ in parts):
        return apart | {"low": mean, "high": mean, "p": float(mean == 0)}
    total, df = satterthwaite(*parts)
    half = t_quantile(0.975, df) * math.sqrt(total)
    return apart | {"low": mean - half, "high": mean + half, "p": difference_p(mean, math.sqrt(total), 1, df)}


@as_svg
def forest(rows: list[Row]) -> Figure:
    groups: dict[str, list[Any]] = {}
    for row in rows:
        low, high = interval([*row.bits], tuning=row.tuning) or (None, None)
        in_bits = {"mean_difference": fmean(row.bits), "ci_low": low, "ci_high": high, "equivalence_margin": 0.01}
        contrast = pd.Series(row.contrast.to_dict() | in_bits | {"family": "secondary"})
        groups.setdefault(row.heading, []).append(forest_row(row.folder.name, contrast, row.bits))
    return draw_forest(groups, 0, "difference, bits per byte (left is better)")


def _conditions(ablations: dict[Path, Results]) -> list[tuple[str, list[str]]]:
    """Each ablation's settings that are not those of the first; empty where all are the same."""
    settings = {
        folder.name: hashed_settings(results.record.arms[results.record.baseline].settings)
        for folder, results in ablations.items()
    }
    first, *_ = [*settings.values(), {}]
    others = {
        name: [f"{key}={to_override_value(value)}" for key, value in own.items() if value not in (None, first.get(key))]
        for name, own in settings.items()
    }
    return [*others.items()] if any(others.values()) else []


def _weaknesses(ablations: dict[Path, Results], rows: list[Row]) -> Iterator[dict[str, str]]:
    """What weakens each ablation's answer, and which ablations are not shown."""
    for folder, results in ablations.items():
        if any(row.folder == folder for row in rows):
            for summary, detail in report_warnings(results):
                yield {"ablation": folder.name, "summary": f"{folder.name}: {summary}", "detail": detail}
        else:
            why = (
                "No pair of runs yet." if views.lower_is_better(results) else f"Its metric is {results.record.metric}."
            )
            yield {"ablation": folder.name, "summary": f"{folder.name} is not shown.", "detail": why}
