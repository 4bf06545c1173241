"""ablate(config): plan, tune, run, report. The same call again continues with what is missing."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.ablation.arms import common_threads, time_steps
from lm.ablation.executors import EXECUTORS, execute
from lm.ablation.ledger import folders_of, record_asked, record_ended
from lm.ablation.plan import Plan, RunSpec, Step, lost_to_new_code, make_plan, next_runs, now, record_of, seconds_to_go
from lm.ablation.record import (
    TRIAL,
    AblationRecord,
    default_dir,
    existing_record,
    lock_output_dir,
    question_of,
    write_record,
)
from lm.ablation.report import write_report
from lm.ablation.results import Results, RunReader, results_of
from lm.config import RunConfig, UserError
from lm.config.ablation import AblateConfig
from lm.system.device import set_threads
from lm.system.terminal import duration, printable

REPORT_SHARE = 0.02  # of the time of an ablation, which is spent on reports of what there is so far


def ablate(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    command: str,
    on_plan: Callable[[Plan, Step, Results], None] = lambda plan, step, results: None,
    base: RunConfig | None = None,
) -> Results:
    """Plan an ablation and, unless only the plan is wanted, run what is missing of it and write its report.

    `runs` has the configuration of each arm, `base` of the runs that they start from; `on_plan` is called before
    anything is run or written. Raises UserError before that, too, for what the user can mend.
    """
    folder = Path(config.output_dir) if config.output_dir else default_dir(config)
    before = existing_record(folder, config)
    threads = before.threads if before else common_threads([*runs.values(), *filter(None, [base])])
    executor = EXECUTORS[config.executor](config, folder)
    default_workers = partial(executor.default_workers, set_threads(threads))
    plan = make_plan(config, runs, base, before, RunReader(folder), threads, default_workers)
    plan = replace(plan, record=replace(plan.record, command=command))
    step = next_runs(plan)
    if step.missing and plan.config.minutes is None:
        time_steps([*plan.arms.values(), *filter(None, [plan.base])])
    if not (config.plan_only or config.code == "new") and (lost := lost_to_new_code(plan, step)):
        raise UserError(f"output_dir={folder}: {lost}")
    record = record_of(plan, step)
    results = results_of(record, plan.reader)
    on_plan(plan, step, results)
    if config.plan_only:
        return results
    with lock_output_dir(folder):
        if existing_record(folder, config) != before:
            raise UserError(f"output_dir={folder}: another process has worked there meanwhile; call ablate again")
        is_done = before is not None and before.ended and not step.missing and _is_same(record, before)
        if is_done and (folder / "report.html").exists():
            return results  # nothing to do; `report` draws the report again
        progress = _Progress(plan)
        others = folders_of(Path(config.ledger)) | {folder.resolve()}  # in which an arm may have had another name
        write_record(record, folder)
        if earlier := record_asked(Path(config.ledger), plan, is_new=before is None):
            progress.say(earlier)
        tried = set[str]()  # a run that failed is tried again by the next call
        while todo := [run for run in step.todo if run.run_dir not in tried]:
            tried |= {run.run_dir for run in todo}
            made = [run for run in todo if not _take_over(run, others)]
            if n := len(todo) - len(made):
                progress.say(f"{n} finished run{'s' * (n > 1)} of the series taken over")
            with progress.begin(step, made, len(todo) - len(made)) as bar:
                execute(made, executor, plan.record.workers, progress.on_end, partial(progress.on_poll, bar))
            step = next_runs(plan)
            write_record(record_of(plan, step), folder)
        if len(step.seeds) < len(plan.config.seeds):
            progress.say(f"look with {len(step.seeds)} of {len(plan.config.seeds)} seeds: decided")
        for arm in step.stopped:
            progress.say(f"{arm} was stopped: not ahead after futility={plan.config.futility} of the seeds")
        return _finish(config, plan, step)


def _take_over(run: RunSpec, folders: Collection[Path]) -> bool:
    """Link the files of the run from an ablation of the series that has finished it under the same hash."""
    kind, name = run.run_dir.split("/")
    copy = run.files.run_dir.parents[1] / ".partial"
    found = (path for folder in folders for path in folder.glob(f"{kind}/*{name.removeprefix(run.arm)}/result.json"))
    for path in found if not run.files.run_dir.exists() else ():  # else it has begun here
        with suppress(OSError):  # of another file system
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path.parent, copy, copy_function=os.link)
            run.files.run_dir.parent.mkdir(exist_ok=True)
            copy.rename(run.files.run_dir)
            return True
    return False


def _is_same(record: AblationRecord, before: AblationRecord) -> bool:
    """Whether an earlier call has asked for the same."""
    keys = (*question_of(record), "pairs", "runs", "stopped")
    return [*record.arms] == [*before.arms] and all(getattr(record, key) == getattr(before, key) for key in keys)


def _finish(config: AblateConfig, plan: Plan, step: Step) -> Results:
    record = record_of(plan, step)
    analyses = record.analyses
    if not step.missing and record.seeds not in analyses:
        analyses = [*analyses, record.seeds]
    results = results_of(replace(record, ended=now(), analyses=analyses), plan.reader)
    write_report(results)
    if not step.missing:
        record_ended(Path(config.ledger), plan, results)
    write_record(results.record, results.folder)  # last: from now on nothing is left to do
    return results


class _Progress:
    """What is said while runs are made, and the report of what there is so far."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.seconds_to_go = plan, 0.0
        self.n_ended = self.n_runs = self.steps_ended = 0
        self.next_report = time.monotonic() + 1.0 / REPORT_SHARE

    def begin(self, step: Step, todo: list[RunSpec], n_taken_over: int) -> Any:
        """The bar of these runs."""
        self.step, self.steps_ended = step, 0
        taken_over = sum(map(self.plan.seconds, step.missing)) - sum(map(self.plan.seconds, todo))
        self.seconds_to_go, _ = seconds_to_go(self.plan, step)  # what is to come is known better each time
        self.seconds_to_go -= taken_over / self.plan.record.workers
        self.n_runs = self.n_ended + len(step.missing)
        self.n_ended += n_taken_over
        total = sum(run.steps for run in todo)
        return tqdm(total=total, desc=self.plan.config.name, unit="step", leave=False, disable=None)

    def on_end(self, run: RunSpec) -> None:
        """Print a line for each run, and write what there is into the report, if that has not been done lately."""
        self.n_ended += 1
        self.steps_ended += run.steps
        self.seconds_to_go -= self.plan.seconds(run) / self.plan.record.workers
        outcome, metric = self.plan.reader.outcome(run.run_dir), self.plan.config.metric
        score = f"{metric} {outcome.result[metric]:.4f}" if outcome.result else outcome.status
        values = " ".join(f"{setting}={value:g}" for setting, value in run.values.items())
        arm = f"trial of {run.arm} at {values}" if run.purpose == TRIAL else run.arm
        reason = f" ({outcome.error})" if outcome.error else ""
        to_go = duration(max(0.0, self.seconds_to_go))
        self.say(f"{self.n_ended} of {self.n_runs}, {arm}, seed {run.seed}: {score}{reason}; about {to_go} to go")
        if (start := time.monotonic()) >= self.next_report:
            results = results_of(record_of(self.plan, self.step), self.plan.reader)
            write_report(results)
            self.say(f"results so far: {results.folder / 'report.html'}")
            self.next_report = start + (time.monotonic() - start) / REPORT_SHARE

    def on_poll(self, bar: Any, running: Collection[RunSpec]) -> None:
        """Let the bar show the steps that have been made."""
        bar.n = self.steps_ended + sum(run.files.steps() for run in running)
        bar.refresh()

    def say(self, line: str) -> None:
        tqdm.write(printable(f"{self.plan.config.name}: {line}"), file=sys.stderr)
