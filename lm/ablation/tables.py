"""The plan of an ablation and its results in the terminal."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from lm.ablation.contrasts import digits_of, level_of
from lm.ablation.record import BASE, UNUSED
from lm.ablation.results import Results
from lm.ablation.statistics import minimum_detectable_effect
from lm.ablation.warnings import plan_warnings, report_warnings
from lm.config.ablation import BUDGET_NAMES
from lm.report.pages import signed
from lm.system.terminal import duration, format_table, printable

if TYPE_CHECKING:
    from lm.ablation.plan import Plan, Step  # imports torch


def plan_table(plan: "Plan", step: "Step", results: Results) -> str:
    """Arms with what they cost, the runs, and how long all of it will take."""
    from lm.ablation.plan import lost_to_new_code, seconds_to_go  # which imports torch
    from lm.system.device import busy

    config, record = plan.config, results.record
    head = [f"tokens at equal {BUDGET_NAMES[budget]}" for budget in config.budgets]
    rows = [["arm", "parameters", "FLOPs per token", "ms per step", *head]]
    for arm in plan.arms.values():
        tokens = [f"{arm.steps[budget] * arm.tokens_per_step:,}" for budget in config.budgets]
        cost = [f"{arm.n_params:,}", f"{arm.flops_per_token:,}", f"{1000 * arm.seconds_per_step:.0f}"]
        rows.append([arm.name, *cost, *tokens])
    lines = [config.question, "", format_table(rows), "", *_plan_of_runs(plan, step, results)]
    lines += [f"{record.workers} at a time, {record.threads} thread{'s' * (record.threads > 1)} each"]
    if lost := lost_to_new_code(plan, step):
        lines += [lost]
    elif (n := len(results.of(UNUSED))) and not step.n_trials[1]:  # else names of runs are not known yet
        reason = "settings, text or code have changed, or they are not asked for any more"
        lines += [f"{n} finished run{'s' * (n > 1)} in this folder no longer count: {reason}"]
    lines += [*map(str, plan_warnings(record))]
    least, most = seconds_to_go(plan, step)
    time = " to ".join(dict.fromkeys(map(duration, (least, most))))
    lines += [f"about {time} to go, as measured on this machine{busy()}; all goes to {plan.reader.folder}"]
    return printable("\n".join(lines))


def plan_json(plan: "Plan", step: "Step", sd: tuple[float, str] | None) -> dict[str, Any]:
    """The plan in numbers; `sd` is that of a difference, as it was measured, and the folder of its pairs."""
    from lm.ablation.plan import seconds_to_go

    record, n = step.record, len(step.record.seeds)
    steps = {name: arm.steps for name, arm in plan.arms.items()}
    comparisons = len(
        {(arm, steps[arm][key], steps[record.pairs[arm]][key]) for arm in record.asked() for key in plan.config.budgets}
    )
    detectable = None if sd is None or n < 2 else minimum_detectable_effect(sd[0], n, level_of(record) / comparisons)
    return {
        "runs": {"asked": len(step.runs), "missing": len(step.missing), "trials": step.n_trials},
        "seconds": seconds_to_go(plan, step),
        "seeds": record.seeds,
        "steps": steps,
        "fitted": record.fitted or None,
        "minimum_detectable": detectable,
        "by_pairs_of": sd and sd[1],
    }


def _plan_of_runs(plan: "Plan", step: "Step", results: Results) -> list[str]:
    counts, looks = results.counts(), plan.config.looks
    lines = [f"{sum(counts.values())} runs, {counts['done'] + counts['diverged']} done"]
    if fitted := plan.record.fitted:
        of = "{seeds} of {of_seeds} seeds, {steps:,} of {of_steps:,} steps".format(**fitted)
        lines[0] += f", to fit into {plan.config.minutes:g} min: {of}"
    if looks:
        lines[0] += f", with looks at {', '.join(map(str, looks))} seeds"
    if stopped := results.stopped_early():
        lines += [stopped]
    least, most = step.n_trials
    if most:
        more = f" to {most}" if most > least else ""
        lines += [f"{least}{more} trials of hyperparameters: more than the least if a search has to go on"]
    if plan.base:
        n, missing = (sum(run.purpose == BASE for run in runs) for runs in (step.runs, step.missing))
        lines += [f"{n} base runs, one for each seed, {missing} to be made"]
    if alone := len(results.rows_alone()):
        lines += [f"finished runs without a folder, read from results.csv: {alone}; remove a row to run it again"]
    return lines


def result_table(results: Results) -> str:
    """The comparisons, their verdicts in words, what weakens them, and where the report lies."""
    lines = [*results.asked()["statement"], *filter(None, [results.stopped_early()])]
    lines += [*map(str, report_warnings(results))]
    reported = results.reported().drop_duplicates("run_dir")
    lost = reported[reported["status"].isin(["failed", "diverged"])]
    lines += [f"{run.status}: {run.run_dir} ({run.error})" for run in lost.itertuples()]
    counts = ", ".join(f"{n} {status}" for status, n in results.counts().items() if n)
    page = results.folder / "report.html"
    lines = [comparison_table(results), "", *lines, "", f"{counts}; {page if page.exists() else results.folder}"]
    return printable("\n".join(lines))


def comparison_table(results: Results) -> str:
    """A line for each comparison."""
    head = ("arm", "baseline", "at equal", "seeds", "difference", results.ci, "verdict")
    rows = [head]
    for row in results.comparisons.to_dict("records"):
        numbers = (row["mean_difference"], row["ci_low"], row["ci_high"])
        mean, low, high = ("" if pd.isna(x) else signed(x, digits_of(row)) for x in numbers)
        interval = f"{low} to {high}" if low else ""
        rows += [(row["arm"], row["baseline"], row["budgets"], str(row["n_seeds"]), mean, interval, row["verdict"])]
    return format_table(rows if rows[-1][2] else [row[:2] + row[3:] for row in rows])
