"""ablate(config): plan, tune, run, report. The same call again continues with what is missing."""

import math
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from lm.config import RunConfig
from lm.errors import UserError
from lm.lab.ablation.arms import time_steps
from lm.lab.ablation.contrasts import level_of
from lm.lab.ablation.executors import EXECUTORS, execute
from lm.lab.ablation.plan import Plan, RunSpec, Seeded, Step, lost_to_new_code, make_plan, next_runs, now, seconds_to_go
from lm.lab.ablation.record import (
    TRIAL,
    UNUSED,
    AblationRecord,
    default_dir,
    existing_record,
    lock_output_dir,
    question_of,
    write_record,
)
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import Results, RunReader, results_of
from lm.lab.ablation.settings import BUDGET_NAMES, AblateConfig
from lm.lab.ablation.statistics import minimum_detectable_effect
from lm.lab.ablation.warnings import plan_warnings
from lm.system.device import busy
from lm.system.terminal import duration, format_table, printable

REPORT_SHARE = 0.02  # of the time of an ablation, which is spent on reports of what there is so far


def ablate(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    command: str,
    on_plan: Callable[[Plan, Step, Results], None] = lambda plan, step, results: None,
    seeded: Seeded = MappingProxyType({}),
) -> Results:
    """Plan an ablation and, unless only the plan is wanted, run what is missing of it and write its report.

    `runs` has the configuration of each arm, `seeded` its settings that depend on the seed; `on_plan` is called before
    anything is run or written. Raises UserError before that, too, for what the user can mend.
    """
    folder = Path(config.output_dir) if config.output_dir else default_dir(config)
    before = existing_record(folder, config)
    executor = EXECUTORS[config.executor](config, folder)
    plan = make_plan(config, runs, seeded, before, RunReader(folder), command, executor.default_workers)
    step = next_runs(plan)
    if step.missing:
        time_steps(plan.arms.values())
    if not config.plan_only and (lost := lost_to_new_code(plan, step)):
        raise UserError(f"output_dir={folder}: {lost}")
    results = results_of(step.record, plan.reader)
    on_plan(plan, step, results)
    if config.plan_only:
        return results
    with lock_output_dir(folder):
        if existing_record(folder, config) != before:
            raise UserError(f"output_dir={folder}: another process has worked there meanwhile; call ablate again")
        is_done = before is not None and before.ended and not step.missing and _is_same(step.record, before)
        if is_done and (not config.report or (folder / "report.html").exists()):
            return results  # nothing else to do; `report` draws the report again
        progress = _Progress(plan, config.report)
        write_record(step.record, folder)
        tried = set[str]()  # a run that failed is tried again by the next call
        while todo := [run for run in step.todo if run.run_dir not in tried]:
            tried |= {run.run_dir for run in todo}
            with progress.begin(step, todo) as bar:
                execute(todo, executor, plan.record.workers, progress.on_end, partial(progress.on_poll, bar))
            step = next_runs(plan)
            write_record(step.record, folder)
        results = results_of(replace(step.record, ended=now()), plan.reader)
        if config.report:
            write_report(results)
        write_record(results.record, folder)  # last: from now on nothing is left to do
        return results


def _is_same(record: AblationRecord, before: AblationRecord) -> bool:
    keys = (*question_of(record), "pairs", "runs")
    return [*record.arms] == [*before.arms] and all(getattr(record, key) == getattr(before, key) for key in keys)


class _Progress:
    """What is said while runs are made, and the report of what there is so far."""

    def __init__(self, plan: Plan, reports: bool) -> None:
        self.plan = plan
        self.n_ended = self.n_runs = self.steps_ended = 0
        self.next_report = time.monotonic() + 1.0 / REPORT_SHARE if reports else math.inf

    def begin(self, step: Step, todo: list[RunSpec]) -> Any:
        """The bar of these runs."""
        self.step, self.steps_ended, self.n_runs = step, 0, self.n_ended + len(step.missing)
        total = sum(run.steps for run in todo)
        return tqdm(total=total, desc=self.plan.config.name, unit="step", leave=False, disable=None)

    def on_end(self, run: RunSpec) -> None:
        """Print a line for each run, and write what there is into the report, if that has not been done lately."""
        self.n_ended += 1
        self.steps_ended += run.steps
        others = [other for other in self.step.missing if other.run_dir != run.run_dir]
        self.step = replace(self.step, missing=others)
        outcome, metric = self.plan.reader.outcome(run.run_dir), self.plan.config.metric
        score = f"{metric} {outcome.result[metric]:.4f}" if outcome.result else outcome.status
        values = " ".join(f"{setting}={value:g}" for setting, value in run.values.items())
        arm = f"trial of {run.arm} at {values}" if run.purpose == TRIAL else run.arm
        reason = f" ({outcome.error})" if outcome.error else ""
        to_go = duration(seconds_to_go(self.plan, self.step)[0])
        self.say(f"{self.n_ended} of {self.n_runs}, {arm}, seed {run.seed}: {score}{reason}; about {to_go} to go")
        if (start := time.monotonic()) >= self.next_report:
            results = results_of(self.step.record, self.plan.reader)
            write_report(results)
            self.say(f"results so far: {results.folder / 'report.html'}")
            self.next_report = start + (time.monotonic() - start) / REPORT_SHARE

    def on_poll(self, bar: Any, running: Collection[RunSpec]) -> None:
        """Let the bar show the steps that have been made."""
        bar.n = self.steps_ended + sum(run.files.steps() for run in running)
        bar.refresh()

    def say(self, line: str) -> None:
        tqdm.write(printable(f"{self.plan.config.name}: {line}"), file=sys.stderr)


# --- what is said of a plan


def plan_table(plan: Plan, step: Step, results: Results) -> str:
    """Arms with what they cost, the runs, and how long all of it will take."""
    config, record, counts, (least, most) = plan.config, results.record, results.counts(), step.n_trials
    head = f"tokens at equal {BUDGET_NAMES[config.budget]}"
    rows = [["arm", "parameters", "FLOPs per token", "ms per step", head]]
    for arm in plan.arms.values():
        tokens = f"{arm.steps[config.budget] * arm.tokens_per_step:,}"
        cost = [f"{arm.n_params:,}", f"{arm.flops_per_token:,}", f"{1000 * arm.seconds_per_step:.0f}"]
        rows.append([arm.name, *cost, tokens])
    runs = f"{sum(counts.values())} runs, {counts['done'] + counts['diverged']} done"
    if config.looks:
        runs += f", with looks at {', '.join(map(str, config.looks))} seeds"
    lines = [config.question, "", format_table(rows), "", runs, *filter(None, [results.stopped_early()])]
    if most:
        more = f" to {most}" if most > least else ""
        lines += [f"{least}{more} trials of hyperparameters: more than the least if a search has to go on"]
    if alone := len(results.rows_alone()):
        lines += [f"finished runs without a folder, read from results.csv: {alone}; remove a row to run it again"]
    lines += [f"{record.workers} at a time, {record.threads} thread{'s' * (record.threads > 1)} each"]
    if lost := lost_to_new_code(plan, step):
        lines += [lost]
    elif (n := len(results.of(UNUSED))) and not most:  # else names of runs are not known yet
        reason = "settings, text or code have changed, or they are not asked for any more"
        lines += [f"{n} finished run{'s' * (n > 1)} in this folder no longer count: {reason}"]
    lines += [*map(str, plan_warnings(record))]
    time = " to ".join(dict.fromkeys(map(duration, seconds_to_go(plan, step))))
    lines += [f"about {time} to go, as measured on this machine{busy()}; all goes to {plan.reader.folder}"]
    return printable("\n".join(lines))


def plan_json(plan: Plan, step: Step, results: Results) -> dict[str, Any]:
    """Return the plan in numbers. The minimum detectable difference is by the pairs that have finished."""
    record, n = step.record, len(step.record.seeds)
    steps = {name: arm.steps for name, arm in plan.arms.items()}
    sds = [row.sd for row in results.contrasts if row.sd is not None and row.family != "interaction"]
    detectable = minimum_detectable_effect(median(sds), n, level_of(record) / len(record.asked())) if sds else None
    return {
        "runs": {"asked": len(step.runs), "missing": len(step.missing), "trials": step.n_trials},
        "seconds": seconds_to_go(plan, step),
        "seeds": record.seeds,
        "steps": steps,
        "minimum_detectable": detectable,
    }
