"""Several ablations side by side: one question under different conditions, each in a folder of its own."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, variance
from typing import Any
from urllib.parse import quote

import pandas as pd
from matplotlib.figure import Figure

from lm.ablation import views
from lm.ablation.contrasts import decimals
from lm.ablation.export import results_frame
from lm.ablation.figures import draw_forest
from lm.ablation.power import TuningVariance, satterthwaite, t_quantile
from lm.ablation.results import Results, read_results
from lm.ablation.statistics import difference_p, holm, interval
from lm.ablation.warnings import report_warnings
from lm.config.ablation import BUDGET_NAMES
from lm.config.identity import hashed_settings
from lm.report.figures import INK, as_svg, inline
from lm.report.pages import render
from lm.system.files import remove_partial, write_text
from lm.system.terminal import printable, to_override_value

DIGITS = 4  # of bits per byte

Row = dict[str, Any]  # of the table: a contrast of one ablation, in the unit of its report and in bits per byte


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
    rows = _compared([row for results in ablations.values() for row in _comparable(results)])
    remove_partial(path)
    (path / "figures").mkdir(exist_ok=True)
    frames = [results_frame(results).assign(ablation=printable(folder.name)) for folder, results in ablations.items()]
    table = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    table.insert(0, "ablation", table.pop("ablation"))
    write_text(path / "results.csv", table.to_csv(index=False, lineterminator="\n", errors="replace"))
    svg = forest(rows)
    if svg is not None:
        write_text(path / "figures" / "overview.svg", svg)
    context = {
        "title": path.resolve().name,
        "rows": rows,
        "svg": svg and inline(svg, "Differences of all ablations in bits per byte"),
        "settings": _conditions(ablations),
        "warnings": [*_weaknesses(ablations, {row["ablation"] for row in rows})],
        "digits": DIGITS,
    }
    write_text(path / "overview.html", render("overview.html.j2", **context))
    write_text(path / "overview.md", render("overview.md.j2", **context))
    return ablations


def _comparable(results: Results) -> Iterator[Row]:
    """The primary comparisons of losses, or all where none is primary, that have a pair of runs; equal runs once."""
    shown, folder = views.asked(results), results.folder
    shown = shown[(shown["family"] != "interaction") & (shown["n_seeds"] > 0) & views.lower_is_better(results)]
    report = next((name for name in ("report.html", "report.md") if (folder / name).exists()), None)
    for _, contrast in shown.iterrows():
        runs, baseline = (views.done_of(results, contrast[side], contrast["budget"]) for side in ("arm", "baseline"))
        differences = (runs["val_bpb"] - baseline["val_bpb"]).loc[contrast["seeds"]]
        tuning = _tuning_of(contrast)
        if tuning:  # bits per byte for one of the metric are the same for all arms of one tokenizer
            rate = runs["val_bpb"].mean() / runs[results.record.metric].mean()
            tuning = TuningVariance(tuning.variance * rate**2, tuning.df)
        yield contrast.to_dict() | {
            # the same in every ablation, also where the runs serve further budgets
            "comparison": f"{contrast['name']}, at equal {BUDGET_NAMES[contrast['budget']]}",
            "ablation": folder.name,
            "address": f"{quote(os.fsencode(folder.name))}/{report}" if report else None,
            "unit": views.unit(results),
            "ci": views.ci(results.contrasts),
            "digits": decimals(contrast["equivalence_margin"]),
            "by_seed": differences,  # in bits per byte
            "bits": differences.mean(),
            "tuning": tuning,  # in bits per byte
            "apart": None,
        }


def _tuning_of(contrast: pd.Series) -> TuningVariance | None:
    """The variance that tuning adds to the mean, and its df, which follows from that of the sum (Satterthwaite)."""
    n, variance_of_tuning = contrast["n_seeds"], contrast["tuning_sd"] ** 2
    if n < 2 or not variance_of_tuning:
        return None
    of_seeds = contrast["sd"] ** 2 / n
    rest = (of_seeds + variance_of_tuning) ** 2 / contrast["df"] - of_seeds**2 / (n - 1)
    return TuningVariance(variance_of_tuning, max(1, round(variance_of_tuning**2 / rest)))


def _compared(rows: list[Row]) -> list[Row]:
    """Rows of the same comparison together, each with how far it is from the first of them; p corrected for all."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["comparison"], []).append(row)
    for first, *others in groups.values():
        for row in others:
            row["apart"] = _distance(row, first)
    tested = [row["apart"] for row in rows if row["apart"] and row["apart"]["p"] is not None]
    for apart, p in zip(tested, holm([apart["p"] for apart in tested]), strict=True):
        apart["p_adjusted"] = p
    return [row for group in groups.values() for row in group]


def _distance(row: Row, first: Row) -> dict[str, Any]:
    """Paired by seed where more than half of the seeds of both are the same, else by Welch (1947).

    Runs with the same seed are correlated across ablations, so they are paired; if they are independent, pairing only
    reduces the degrees of freedom. A pair of means over shared seeds is not the difference of those over all seeds,
    so `how` says how many are shared. The uncertainty of tuning is added.
    """
    values, reference = row["by_seed"], first["by_seed"]
    shared, n = [seed for seed in reference.index if seed in values.index], max(len(values), len(reference))
    paired = 2 * len(shared) > n
    samples = [[*(values - reference)[shared]]] if paired else [[*values], [*reference]]
    mean = fmean(samples[0]) - sum(map(fmean, samples[1:]))
    how = "Welch" if not paired else f"{len(shared)} seeds of both" if len(shared) < n else ""
    apart = {"mean": mean, "how": how, "low": None, "high": None, "p": None, "p_adjusted": None}
    if min(map(len, samples)) < 2:
        return apart
    parts = [(variance(sample) / len(sample), float(len(sample) - 1)) for sample in samples]
    parts += [(side["tuning"].variance, float(side["tuning"].df)) for side in (row, first) if side["tuning"]]
    if not any(part for part, _ in parts):
        return apart | {"low": mean, "high": mean, "p": float(mean == 0)}
    total, df = satterthwaite(*parts)
    half = t_quantile(0.975, df) * math.sqrt(total)
    return apart | {"low": mean - half, "high": mean + half, "p": difference_p(mean, math.sqrt(total), 1, df)}


@as_svg
def forest(rows: list[Row]) -> Figure | None:
    in_bits = []
    for row in rows:
        low, high = interval([*row["by_seed"]], tuning=row["tuning"]) or (None, None)
        numbers = {"mean_difference": row["bits"], "ci_low": low, "ci_high": high, "differences": [*row["by_seed"]]}
        look = {"heading": row["comparison"], "label": row["ablation"], "color": INK, "primary": False}
        in_bits.append(row | numbers | look | {"equivalence_margin": 10.0 ** (2 - DIGITS)})
    return draw_forest(pd.DataFrame(in_bits), 0, "difference, bits per byte (left is better)")


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


def _weaknesses(ablations: dict[Path, Results], shown: set[str]) -> Iterator[dict[str, str]]:
    """What weakens each ablation's answer, and which ablations are not shown."""
    for folder, results in ablations.items():
        if folder.name in shown:
            for summary, detail in report_warnings(results):
                yield {"summary": f"{folder.name}: {summary}", "detail": detail}
        else:
            metric = f"Its metric is {results.record.metric}."
            reason = "No pair of runs yet." if views.lower_is_better(results) else metric
            yield {"summary": f"{folder.name} is not shown.", "detail": reason}
