"""ablate(config): plan, tune, run, report. The same call again continues with what is missing."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.ablation.execute import execute
from lm.ablation.executors import EXECUTORS, Executor
from lm.ablation.history import lost_to_new_code
from lm.ablation.ledger import record_asked, record_ended
from lm.ablation.plan import Plan, RunSpec, make_plan, now
from lm.ablation.record import AblationRecord, default_dir, existing_record, lock_output_dir, question_of, write_record
from lm.ablation.report import write_report
from lm.ablation.results import Results, RunReader
from lm.config import RunConfig, UserError
from lm.config.ablation import AblateConfig
from lm.system.device import set_threads
from lm.system.terminal import duration, printable

REPORT_SHARE = 0.02  # of the time of an ablation, which is spent on reports of what there is so far


def ablate(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    command: str,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    base: RunConfig | None = None,
) -> Results:
    """Plan an ablation and, unless only the plan is wanted, run what is missing of it and write its report.

    `runs` has the configuration of each arm, `base` of the runs that they start from; `on_plan` is called before
    anything is run or written. Raises UserError before that, too, for what the user can mend.
    """
    folder = Path(config.output_dir) if config.output_dir else default_dir(config)
    before = existing_record(folder, config)
    plan = make_plan(config, runs, base, before, RunReader(folder))
    if not (config.plan_only or config.code == "new") and (lost := lost_to_new_code(plan)):
        raise UserError(f"output_dir={folder}: {lost}")
    executor = EXECUTORS[config.executor](config, folder)
    workers = config.workers or executor.default_workers(set_threads(plan.record.threads))
    plan.record = replace(plan.record, command=command, workers=workers)
    on_plan(plan)
    if config.plan_only:
        return plan.results()
    with lock_output_dir(folder):
        if existing_record(folder, config) != before:
            raise UserError(f"output_dir={folder}: another process has worked there meanwhile; call ablate again")
        if before and _is_unchanged(plan, before) and (folder / "report.html").exists():
            return plan.results()  # nothing to do; `report` draws the report again
        record = plan.current_record()
        if earlier := record_asked(Path(config.ledger), record, folder, is_new=before is None):
            tqdm.write(printable(f"{record.name}: {earlier}"), file=sys.stderr)
        write_record(record, folder)
        runner = _Runner(plan, executor)
        runner.tune()
        runner.make_reported()
        results = _finish(plan)
        if not plan.expected():
            record_ended(Path(config.ledger), results)
        return results


def _is_unchanged(plan: Plan, before: AblationRecord) -> bool:
    """Whether the earlier call has ended with all that is asked now."""
    if not before.ended or plan.expected():
        return False
    record = plan.current_record()
    keys = (*question_of(record), "contrasts", "runs", "trials")
    return [*record.arms] == [*before.arms] and all(getattr(record, key) == getattr(before, key) for key in keys)


def _finish(plan: Plan) -> Results:
    results = plan.results()
    analyses = plan.record.analyses
    if not plan.expected() and results.record.seeds not in analyses:
        analyses = [*analyses, results.record.seeds]
    results.record = replace(results.record, ended=now(), analyses=analyses)
    write_report(results)
    write_record(results.record, results.folder)  # last: from now on nothing is left to do
    return results


class _Runner:
    """Carries out a plan. What it does is decided by the results in the folder alone, so it may be killed anywhere."""

    def __init__(self, plan: Plan, executor: Executor) -> None:
        self.plan, self.executor, self.seconds_to_go = plan, executor, 0.0
        self.n_ended = self.n_runs = self.steps_ended = 0
        self.next_report = time.monotonic() + 1.0 / REPORT_SHARE

    def tune(self) -> None:
        """Make trials as long as the tuning asks for new ones. A failed trial is tried again by the next call."""
        tried: set[str] = set()

        def new_trials() -> list[RunSpec]:
            return [spec for spec in self.plan.tune()[1] if spec.run_dir not in tried]

        while trials := new_trials():
            trials += self.make(new_trials)  # with bases they have other names than before
            tried |= {spec.run_dir for spec in trials}

    def make_reported(self) -> None:
        plan, n_seeds = self.plan, len(self.plan.config.seeds)
        for n in plan.config.looks or [n_seeds]:
            self.make(lambda n=n: plan.reported(n))  # type: ignore[misc]
            if plan.missing(plan.reported(n)):
                return  # some have failed: the same command tries them again before it looks
            if plan.look(n):
                self.say(f"look with {n} of {n_seeds} seeds: decided")
                return

    def make(self, wanted: Callable[[], list[RunSpec]]) -> list[RunSpec]:
        """Make what is missing of these runs, first their bases, on whose weights the names of the others depend.

        Returns the runs whose bases there are.
        """
        plan = self.plan
        self.execute(plan.bases(plan.missing(wanted())))
        specs = [spec for spec in wanted() if plan.base is None or plan.base_sha256(plan.base_spec(spec.seed))]
        self.execute(specs)
        return specs

    def execute(self, specs: Sequence[RunSpec]) -> None:
        plan = self.plan
        if missing := plan.missing(specs):
            self.seconds_to_go = plan.expected_seconds()[0]  # what else is to come is known better each time
            self.n_runs = self.n_ended + len(plan.expected())
            self.steps_ended, total = 0, sum(spec.steps for spec in missing)
            with tqdm(total=total, desc=plan.config.name, unit="step", leave=False, disable=None) as bar:
                execute(missing, self.executor, plan.record.workers, self.on_end, partial(self.on_poll, bar))
            write_record(plan.current_record(), plan.reader.folder)

    def on_end(self, spec: RunSpec) -> None:
        """Print a line for each run, and write what there is into the report, if that has not been done lately."""
        self.n_ended += 1
        self.steps_ended += spec.steps
        self.seconds_to_go -= self.plan.seconds(spec) / self.plan.record.workers
        outcome, metric = self.plan.reader.outcome(spec.run_dir), self.plan.config.metric
        score = f"{metric} {outcome.result[metric]:.4f}" if outcome.result else outcome.status
        values = " ".join(f"{setting}={value:g}" for setting, value in spec.tuned.items())
        arm = f"trial of {spec.arm} at {values}" if spec.is_trial else spec.arm
        reason = f" ({outcome.error})" if outcome.error else ""
        to_go = duration(max(0.0, self.seconds_to_go))
        self.say(f"{self.n_ended} of {self.n_runs}, {arm}, seed {spec.seed}: {score}{reason}; about {to_go} to go")
        if (start := time.monotonic()) >= self.next_report:
            write_report(results := self.plan.results())
            self.say(f"results so far: {results.folder / 'report.html'}")
            self.next_report = start + (time.monotonic() - start) / REPORT_SHARE

    def on_poll(self, bar: Any, running: Collection[RunSpec]) -> None:
        """Let the bar show the steps that have been made."""
        bar.n = self.steps_ended + sum(spec.files.steps() for spec in running)
        bar.refresh()

    def say(self, line: str) -> None:
        tqdm.write(printable(f"{self.plan.config.name}: {line}"), file=sys.stderr)
