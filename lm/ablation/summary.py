"""The results of an ablation, and of several, in the terminal."""

from pathlib import Path

import pandas as pd

from lm.ablation import views
from lm.ablation.contrasts import decimals
from lm.ablation.results import Results
from lm.ablation.warnings import report_warnings
from lm.system.terminal import format_table, printable


def result_table(results: Results) -> str:
    """The comparisons, their verdicts in words, what weakens them, and where the report lies."""
    contrasts = views.merged(results, results.contrasts)
    rows = [_row(contrast) for _, contrast in contrasts.iterrows()]
    lines = [format_table([_head(results.contrasts), *rows]), "", *views.sentences(results)]
    lines += [views.stopped_early(results)] if views.stopped_early(results) else []
    lines += [f"{summary} {detail}" for summary, detail in report_warnings(results)]
    reported = views.reported(results)
    lost = reported[reported["status"].isin(["failed", "diverged"])]
    lines += [f"{run['status']}: {run['run_dir']} ({run['error']})" for _, run in lost.iterrows()]
    counts = ", ".join(f"{n} {status}" for status, n in views.run_counts(results).items() if n)
    if alone := len(views.rows_alone(results)):
        counts += f" ({alone} of them rows of results.csv without their folder)"
    return printable("\n".join([*lines, "", f"{counts}; {results.folder / 'report.html'}"]))


def overview_table(path: Path, ablations: dict[Path, Results]) -> str:
    """The primary comparisons of several ablations, each in its own unit, and where the whole overview lies."""
    contrasts = pd.concat([results.contrasts for results in ablations.values()])
    rows = []
    for folder, results in ablations.items():
        level = f" ({views.ci(results.contrasts)})" * (views.ci(contrasts) != views.ci(results.contrasts))
        chosen = views.asked(results.contrasts)
        for _, contrast in views.merged(results, chosen[chosen["family"] != "interaction"]).iterrows():
            rows.append((folder.name, *_row(contrast, level)))
    table = format_table([("ablation", *_head(contrasts)), *rows])
    return f"{table}\n\n{len(ablations)} ablations; {path / 'overview.html'}"


def _head(contrasts: pd.DataFrame) -> tuple[str, ...]:
    return ("arm", "baseline", "at equal", "seeds", "difference", views.ci(contrasts), "verdict")


def _row(contrast: pd.Series, level: str = "") -> tuple[str, ...]:
    """`level` is added to the interval."""
    digits = decimals(contrast["equivalence_margin"])
    keys = ("mean_difference", "ci_low", "ci_high")
    mean, low, high = ("" if pd.isna(contrast[key]) else f"{contrast[key]:+z.{digits}f}" for key in keys)
    interval = f"{low} to {high}{level}" if low else ""
    names = (contrast["arm"], contrast["baseline"], " and ".join(contrast["budgets"]))
    return (*names, str(contrast["n_seeds"]), mean, interval, contrast["verdict"])
