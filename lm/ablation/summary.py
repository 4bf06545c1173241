"""An ablation in the terminal: what is planned, and what was found."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lm.ablation import views
from lm.ablation.judge.looks import saved
from lm.ablation.judge.sentence import decimals
from lm.ablation.judge.study import study_of
from lm.ablation.report_input import Results
from lm.ablation.warnings import plan_warnings, report_warnings
from lm.system.terminal import duration, format_table, printable

if TYPE_CHECKING:
    from lm.ablation.ablate import AblationRunner  # imports torch


def plan_table(runner: "AblationRunner") -> str:
    """Arms with what they cost, and how long all of it will take."""
    ablation, record = runner.ablation, runner.record()
    held = [f"tokens at equal {views.BUDGET_NAMES[one]}" for one in ablation.budgets]
    rows = [("arm", "parameters", "FLOPs per token", "ms per step", *held)]
    for arm in runner.arms.values():
        tokens = (f"{arm.steps[budget] * arm.tokens_per_step:,}" for budget in ablation.budgets)
        cost = (f"{arm.n_params:,}", f"{arm.flops_per_token:,}", f"{1000 * arm.seconds_per_step:.0f}")
        rows.append((arm.name, *cost, *tokens))
    cells, trials = runner.all_cells(), runner.expected_trials()
    ahead = runner.missing(cells)
    found = f"{len(cells)} runs, {len(cells) - len(ahead)} done"
    if ablation.looks:
        looks = ", ".join(map(str, ablation.looks))
        found += f", with looks at {looks} seeds"
    if trials:
        more = runner.tuning.extension() * len(ablation.tune.seeds)
        found += f"; {len(trials)} search trials"
        found += f", and {more} more if a best value lies at the edge of the search range" if more else ""
    bases = runner.missing_bases()
    if runner.bases:
        found = f"{len(runner.base_seeds())} base runs, one for each seed, {len(bases)} to be made; {found}"
    seconds = sum(map(runner.cost, [*bases, *ahead, *trials])) / runner.workers
    lines = [ablation.question, "", format_table(rows), ""]
    lines += [f"{found}; {record.workers} at a time, {record.threads} thread{'s' * (record.threads > 1)} each"]
    study = study_of(record, runner.outcomes)
    if stop := saved(study):
        lines += [stop]
    if alone := study.rows_alone():
        lines += [f"finished runs without a folder, read from results.csv: {alone}; remove a row to run one again"]
    lines += [*no_longer_count(record.set_aside), *(f"{head} {meaning}" for head, meaning in plan_warnings(record))]
    lines += [f"about {duration(seconds)} to go, as measured on this machine; all goes to {runner.path}"]
    return printable("\n".join(lines))


def no_longer_count(reasons: dict[str, str]) -> list[str]:
    """A line for each reason why finished runs in the folder are not used."""
    counts = Counter(reasons.values()).items()
    return [f"{n} finished run{'s' * (n > 1)} in this folder no longer count: {why}" for why, n in counts]


def result_table(results: Results) -> str:
    """The comparisons, their verdicts in words, what weakens them, and where the report lies."""
    contrasts = views.merged(results, results.contrasts)
    rows = [_row(contrast) for _, contrast in contrasts.iterrows()]
    lines = [format_table([_head(results.contrasts), *rows]), "", *views.sentences(results)]
    lines += [results.saved] if results.saved else []
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
