"""ablate(config): plan, tune, run, report. The same call again continues with what is missing."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from tqdm import tqdm

from lm.config import RunConfig
from lm.errors import UserError
from lm.lab.ablation.arms import time_steps
from lm.lab.ablation.execute import EXECUTORS, execute
from lm.lab.ablation.folder import (
    UNUSED,
    RunReader,
    existing_record,
    folder_of,
    lock_output_dir,
    write_record,
)
from lm.lab.ablation.judge import alpha_of, detectable
from lm.lab.ablation.plan import (
    Plan,
    RunSpec,
    Stage,
    make_plan,
    next_runs,
    seconds_to_go,
)
from lm.lab.ablation.question import MIN_SEEDS, AblateConfig
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import Results
from lm.lab.ablation.sentence import margin_in_words
from lm.lab.ablation.warnings import plan_warnings
from lm.system.device import cores
from lm.system.terminal import duration, format_table, printable

REPORT_SHARE = 0.02  # of the time of an ablation, which is spent on reports of what there is so far


def ablate(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    command: str,
    on_plan: Callable[[Plan, Stage, Results], None] = lambda plan, stage, results: None,
) -> Results:
    """Plan an ablation and, unless only the plan is wanted, make the runs that are missing and write the report.

    `runs` has the configuration of each arm; `on_plan` is called before anything is run or written. Raises UserError
    before that, too, for what the user can mend.
    """
    folder = folder_of(config, runs)
    before = existing_record(folder)
    executor = EXECUTORS["local" if config.plan_only else config.executor](config, folder)  # a plan needs no cluster
    plan = make_plan(config, runs, before, RunReader(folder), command, executor.default_workers)
    if untimed := [arm for arm in plan.arms.values() if not arm.seconds_per_step]:
        time_steps(untimed)
    tries = Counter[str]()  # of a run that failed, in this call
    stage = next_runs(plan, tries)
    results = Results(stage.record, plan.reader)
    on_plan(plan, stage, results)
    if config.plan_only:
        return results
    with lock_output_dir(folder):
        if existing_record(folder) != before:
            raise UserError(f"output_dir={folder}: another process has worked there meanwhile; call ablate again")
        progress = _Progress(plan)
        write_record(stage.record, folder)
        while stage.todo:
            total = sum(spec.run.trainer.max_steps for spec in stage.todo)
            with tqdm(total=total, desc=plan.question.name, unit="step", leave=False, disable=None) as bar:
                on_end, on_poll = partial(progress.on_end, stage), partial(_show_steps, bar, stage.todo)
                execute(stage.todo, executor, plan.record.workers, on_end, on_poll)
            tries.update(run.run_dir for run in stage.todo)
            stage = next_runs(plan, tries)
            write_record(stage.record, folder)
        results = Results(stage.record, plan.reader)
        write_report(results)
        return results


def _show_steps(bar: Any, specs: Sequence[RunSpec]) -> None:
    with suppress(OSError):  # of a file system that is away for a moment
        bar.n = sum(spec.files.steps() for spec in specs)
    bar.refresh()


class _Progress:
    """A line for each run that has ended, and now and then the report of what there is so far."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ended = set[str]()  # a run that is tried twice counts once
        self.next_report = time.monotonic() + 1.0 / REPORT_SHARE

    def on_end(self, stage: Stage, run: RunSpec) -> None:
        again = ", second try" if run.run_dir in self.ended else ""
        self.ended.add(run.run_dir)
        left = [other for other in stage.missing if other.run_dir not in self.ended]
        outcome, metric = self.plan.reader.outcome(run.run_dir), self.plan.question.metric
        score = f"{metric} {outcome.result[metric]:.4f}" if outcome.result else outcome.status
        at = f" at {run.factor:.3g} times its {self.plan.question.tune}" if self.plan.arms[run.arm].is_tuned else ""
        reason = f" ({outcome.error})" if outcome.error else ""
        to_go = duration(seconds_to_go(self.plan, replace(stage, missing=left)))
        what = f"run {len(self.ended)} of {len(self.ended) + len(left) + stage.n_open}: {run.arm}{at}, seed {run.seed}"
        self.print_line(f"{what}{again}, {score}{reason}; about {to_go} to go")
        if (start := time.monotonic()) >= self.next_report:
            results = Results(stage.record, self.plan.reader)
            write_report(results, is_refreshed=True)
            self.print_line(f"results so far: {results.folder / 'report.html'}")
            self.next_report = start + (time.monotonic() - start) / REPORT_SHARE

    def print_line(self, line: str) -> None:
        tqdm.write(printable(f"{self.plan.question.name}: {line}"), file=sys.stderr)


# --- what is said of a plan


def plan_table(plan: Plan, stage: Stage, results: Results) -> str:
    """Return the arms with what they cost, the runs, and how long all of it takes."""
    question, record, counts = plan.question, results.record, results.counts()
    rows = [["arm", "parameters", "FLOPs per token", "ms per step", "training tokens"]]
    for arm in plan.arms.values():
        cost = [f"{arm.n_params:,}", f"{arm.flops_per_token:,}", f"{1000 * arm.seconds_per_step:.0f}"]
        rows.append([arm.name, *cost, f"{arm.steps * arm.tokens_per_step:,}"])
    n = sum(counts.values()) + stage.n_open
    runs = f"{n}{' or more' * bool(stage.n_open)} runs, {counts['done'] + counts['diverged']} done"
    if question.looks:
        runs += f", with looks at {', '.join(map(str, question.looks))} seeds"
    lines = [question.question, "", format_table(rows), "", runs, *filter(None, [results.stopped_early()])]
    lines += [f"{record.workers} at a time, {record.threads} thread{'s' * (record.threads > 1)} each"]
    if (unused := int((results.runs["purpose"] == UNUSED).sum())) and not stage.n_open:  # else names are not known yet
        reason = "settings or text have changed, or they are not asked for any more"
        lines += [f"{unused} finished run{'s' * (unused > 1)} in this folder no longer count: {reason}"]
    if len(question.seeds) < MIN_SEEDS:
        lines += [f"fewer than {MIN_SEEDS} seeds give no verdict"]
    lines += [*map(str, plan_warnings(record)), _power(results)]
    time = duration(seconds_to_go(plan, stage))
    lines += [f"about {time} to go, as measured on this machine{_busy()}; the results go to {plan.reader.folder}"]
    return printable("\n".join(lines))


def _busy() -> str:
    """Return a clause that says that other programs share the cores, or an empty text."""
    load = os.getloadavg()[0]
    return f", while it was busy (a load of {load:.0f} on {cores()} cores)" if load > cores() + 1 else ""


def _power(results: Results) -> str:
    """Return the smallest difference that matters, and what these seeds detect, by the pairs that have finished."""
    question = results.question
    line = f"margin: {margin_in_words(question.metric, question.equivalence_margin or 0.0)}"
    if (smallest := minimum_detectable(results)) is not None:
        detected = margin_in_words(question.metric, float(f"{smallest:.2g}"))
        line += f"; {len(question.seeds)} seeds detect about {detected}"
    return line


def minimum_detectable(results: Results) -> float | None:
    """Return the difference that all seeds would detect; None before two pairs have finished."""
    sds = [row.sd for row in results.contrasts if row.sd and row.family != "weighted"]
    n, tests = len(results.question.seeds), len(results.question.primary_arms())
    return detectable(median(sds), n, alpha_of(results.question) / tests) if sds and n > 1 else None


def plan_json(plan: Plan, stage: Stage, results: Results) -> dict[str, Any]:
    """Return the plan in numbers."""
    return {
        "runs": {"asked": len(stage.record.runs), "missing": len(stage.missing), "of_open_ladders": stage.n_open},
        "seconds": seconds_to_go(plan, stage),
        "workers": plan.record.workers,
        "seeds": plan.question.seeds,
        "steps": {name: arm.steps for name, arm in plan.arms.items()},
        "minimum_detectable": minimum_detectable(results),
    }
