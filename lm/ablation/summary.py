"""The results of an ablation, and of several, in the terminal."""

from pathlib import Path

import pandas as pd

from lm.ablation import views
from lm.ablation.contrasts import decimals
from lm.ablation.results import Results
from lm.ablation.warnings import report_warnings
from lm.report.pages import signed
from lm.system.terminal import format_table, printable


def result_table(results: Results) -> str:
    """The comparisons, their verdicts in words, what weakens them, and where the report lies."""
    lines = [*views.asked(results)["statement"], *filter(None, [views.stopped_early(results)])]
    lines += [f"{summary} {detail}" for summary, detail in report_warnings(results)]
    reported = views.distinct(results.reported())
    lost = reported[reported["status"].isin(["failed", "diverged"])]
    lines += [f"{run.status}: {run.run_dir} ({run.error})" for run in lost.itertuples()]
    counts = ", ".join(f"{n} {status}" for status, n in results.counts().items() if n)
    if alone := len(views.rows_alone(results)):
        counts += f" ({alone} of them rows of results.csv without their folder)"
    table = format_table([_head(results.contrasts), *_rows(views.comparisons(results))])
    return printable("\n".join([table, "", *lines, "", f"{counts}; {results.folder / 'report.html'}"]))


def overview_table(path: Path, ablations: dict[Path, Results]) -> str:
    """The primary comparisons of several ablations, each in its own unit, and where the whole overview lies."""
    contrasts = pd.concat([results.contrasts for results in ablations.values()])
    rows: list[tuple[str, ...]] = []
    for folder, results in ablations.items():
        level = f" ({views.ci(results.contrasts)})" * (views.ci(contrasts) != views.ci(results.contrasts))
        chosen = views.asked(results)
        rows += [(folder.name, *row) for row in _rows(chosen[chosen["family"] != "interaction"], level)]
    table = format_table([("ablation", *_head(contrasts)), *rows])
    return f"{table}\n\n{len(ablations)} ablations; {path / 'overview.html'}"


def _head(contrasts: pd.DataFrame) -> tuple[str, ...]:
    return ("arm", "baseline", "at equal", "seeds", "difference", views.ci(contrasts), "verdict")


def _rows(contrasts: pd.DataFrame, level: str = "") -> list[tuple[str, ...]]:
    """`level` is added to each interval."""
    rows: list[tuple[str, ...]] = []
    for row in contrasts.itertuples():
        digits = decimals(row.equivalence_margin)
        mean = "" if pd.isna(row.mean_difference) else signed(row.mean_difference, digits)
        interval = (
            "" if pd.isna(row.ci_low) else f"{signed(row.ci_low, digits)} to {signed(row.ci_high, digits)}{level}"
        )
        rows.append((row.arm, row.baseline, row.budgets, str(row.n_seeds), mean, interval, row.verdict))
    return rows
