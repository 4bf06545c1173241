"""ablate(config) is the entry point of an ablation: plan, tune, run, report."""

import contextlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import torch

from lm.ablation.judge.looks import decides, look_now
from lm.ablation.judge.study import study_of
from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.arms import build_arms, common_threads, sources_of
from lm.ablation.plan.bases import NAME, build_bases
from lm.ablation.plan.calibrate import machine, measure
from lm.ablation.plan.cells import Cell, cell, cells, set_steps
from lm.ablation.plan.changes import set_aside
from lm.ablation.record import AblationRecord, asked, first_seeds, write_record
from lm.ablation.report import write_report
from lm.ablation.run.executors import EXECUTORS
from lm.ablation.run.folder import claim, default_dir, earlier
from lm.ablation.run.progress import Progress
from lm.ablation.run.tuning import Tuning
from lm.ablation.run.workers import measure_startup, place_of, run_cells
from lm.ablation.seen import remember, verdicts_seen
from lm.config import RunConfig
from lm.config.ablation import AblateConfig
from lm.system.device import set_threads

PACKAGES = ("torch", "lightning", "scipy", "numpy", "tokenizers", "datasets")


def ablate(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    command: str,
    planned: Callable[["AblationRunner"], None] = lambda _: None,
    base: RunConfig | None = None,
) -> "AblationRunner":
    """Plan an ablation and, unless only the plan is wanted, run what is missing of it and write its report.

    `runs` has the configuration of each arm, `base` of the runs that they start from; `planned` is called in between.

    Raises BadInput before anything is run for what the user can mend.
    """
    path = Path(config.output_dir).expanduser() if config.output_dir else default_dir(config)
    earlier(path, config)  # refuses another's folder before it is held
    with contextlib.nullcontext() if config.plan_only else claim(path):
        runner = AblationRunner(config, path, runs, command, base)
        planned(runner)
        if not config.plan_only:
            runner.run()
    return runner


class AblationRunner:
    """An ablation and its folder: bases/, cells/ and trials/ with a run each, ablation.json, the report."""

    def __init__(
        self, config: AblateConfig, path: Path, runs: dict[str, RunConfig], command: str, base: RunConfig | None
    ) -> None:
        self.ablation, self.path, gpus = config.ablation, path, torch.cuda.device_count()
        self.plan_only = config.plan_only
        before, self.outcomes = earlier(path, config), Outcomes(path)
        self.before, self.executor = before, EXECUTORS[config.executor](config, path)
        late = before.ended is not None  # an ablation that has ended may need no engine
        if not (config.plan_only or late):  # early, for an engine gets ready while the plan is made
            self.prepare()
        threads, quiet = common_threads(before, [*runs.values(), *([base] if base else [])]), not sys.stderr.isatty()
        self.arms = build_arms(self.ablation, runs, threads, quiet, before.arms)
        self.bases = build_bases(self.ablation, base, self.arms, self.outcomes, before.bases, threads, quiet)
        self.timed = self.arms | ({NAME: self.bases.arm} if self.bases else {})
        most = set_threads(max(int(arm.run.threads or 1) for arm in self.timed.values()))
        self.workers = config.workers or self.executor.slots(most)
        seconds_per_step = measure(self.timed, before.seconds_per_step, "time" in self.ablation.budgets)
        set_steps(self.ablation, self.arms)
        self.tuning = Tuning(self.ablation, self.arms, self.outcomes, before)
        self.known = replace(  # the earlier record with all that stays during this call
            before,
            **asked(self.ablation),
            overrides=config.overrides,
            common=self.ablation.overrides,
            base=self.ablation.base if self.bases else None,
            contrasts=self.ablation.contrasts(),
            begun=before.begun or now(),
            ended=None,
            planned=sorted({*self.ablation.seeds, *before.planned}),
            command=command,
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {gpus} GPUs",
            threads=threads,
            workers=self.workers,
            python=platform.python_version(),
            versions={package: version(package) for package in PACKAGES},
            seconds_per_step=seconds_per_step,
        )
        self.stopped: int | None = None  # the number of seeds at which a planned look has decided
        self.look()
        ahead = [*self.missing_bases(), *self.missing(self.all_cells()), *self.expected_trials()]
        if ahead and late and not config.plan_only:
            self.prepare()
        if ahead and machine() not in self.known.startup_seconds:
            self.known.startup_seconds[machine()] = measure_startup(
                self.timed[NAME if self.bases else self.ablation.baseline], config
            )

    def prepare(self) -> None:
        self.executor.prepare(place_of(self.path) if self.executor.remote else None)

    def unchanged(self) -> bool:
        """Whether an earlier call has ended with all runs, so that only the report is written again."""
        if self.missing_bases() or self.missing(self.all_cells()) or self.expected_trials():
            return False
        return self.before.ended is not None and replace(self.record(), ended=self.before.ended) == self.before

    def run(self) -> None:
        if self.unchanged():
            write_report(self.path)
            return
        write_record(self.record(), self.path)
        with Progress(self.ablation.name, self.ablation.metric, self.path, self.workers, self.cost) as self.progress:
            self.progress.expect([*self.missing_bases(), *self.missing(self.all_cells())], self.expected_trials())
            self.make_bases(0)
            for batch in self.tuning.rounds():
                for _ in range(2):  # what was killed gets another try: an arm must not lose a value by an accident
                    self.carry_out(batch, trials=True)
                write_record(self.record(), self.path)
            write_record(self.record(), self.path)
            untuned = self.tuning.broken()
            for n in self.ablation.looks or [len(self.ablation.seeds)]:
                self.make_bases(n)
                self.carry_out([one for one in self.all_cells(n) if one.arm not in untuned])
                if self.look(self.progress.say):
                    break
        self.known.ended = now()
        remember(self.path, self.record(), self.record().seeds)
        write_record(self.record(), self.path)  # with the seeds that it has ended with
        write_report(self.path)

    def carry_out(self, wanted: list[Cell], trials: bool = False) -> None:
        ahead = self.missing(wanted)
        self.progress.begin(ahead, trials)
        run_cells(ahead, self.path, self.executor, self.workers, self.progress.tick)

    def missing(self, wanted: list[Cell]) -> list[Cell]:
        """Those that have no result yet. A diverged one has: it would diverge again."""
        return [one for one in wanted if self.outcomes.of(one.run_dir, one.identity).status in ("missing", "failed")]

    def make_bases(self, n: int) -> None:
        if ahead := self.missing_bases(n):
            self.carry_out(ahead)
            write_record(self.record(), self.path)
            cells = [*self.missing_bases(), *self.missing(self.all_cells())]  # under their final names
            self.progress.expect(cells, self.expected_trials())

    def missing_bases(self, n: int | None = None) -> list[Cell]:
        """Those that a missing run starts from: one of the search, of the first n seeds, or of all."""
        if self.bases is None:
            return []
        seeds = {one.seed for one in self.missing(self.all_cells(n))}
        seeds |= {*self.ablation.tune.seeds} if self.tuning.open() else set()
        return self.missing([self.bases.cell(seed) for seed in sorted(seeds)])

    def look(self, say: Callable[[str], None] = lambda _: None) -> bool:
        """Whether the runs have reached a planned look and it decides all that is asked, so that no more are made."""
        self.stopped = None
        if not self.ablation.looks:
            return False
        study = study_of(self.record(), self.outcomes)
        if (n := look_now(study)) is None:
            return False
        self.stopped = n if decides(study, n) else None
        if not self.plan_only:
            remember(self.path, study.record, study.record.seeds[:n])
        say(f"look with {n} of {study.record.looks[-1]} seeds: {'decided' if self.stopped else 'undecided'}")
        return self.stopped is not None

    def all_cells(self, n: int | None = None) -> list[Cell]:
        """Every cell of the first n seeds, or of all that are reported, seed by seed, so that pairs are made whole."""
        order = {seed: i for i, seed in enumerate(self.ablation.seeds[: self.stopped if n is None else n])}
        found = [pair for pair in cells(self.ablation, self.arms) if pair[0].seed in order]
        return list({one.run_dir: one for _, one in sorted(found, key=lambda pair: order[pair[0].seed])}.values())

    def expected_trials(self) -> list[Cell]:
        """As many runs as the searches will make at least."""
        first, seeds = self.ablation.budgets[0], self.ablation.tune.seeds
        left = [(self.arms[name], n * len(seeds)) for name, n in self.tuning.to_make().items()]
        return [cell(arm, 0, arm.steps[first], {}, "trials") for arm, n in left for _ in range(n)]

    def cost(self, cell: Cell) -> float:
        """Seconds."""
        return self.known.startup_seconds.get(machine(), 0.0) + self.timed[cell.arm].seconds(cell.steps)

    def base_seeds(self) -> list[int]:
        tuned = self.ablation.tune.seeds if self.ablation.tune.trials else []
        return sorted({one.seed for one in self.all_cells()} | {*tuned})

    def n_failed(self) -> int:
        """Reported runs that failed or diverged, and search trials without an outcome."""
        counts = study_of(self.record(), self.outcomes).counts()
        return counts["failed"] + counts["diverged"] + sum(map(len, self.tuning.broken().values()))

    def record(self) -> AblationRecord:
        planned, tuning = [one for one, _ in cells(self.ablation, self.arms)], self.tuning
        seen = verdicts_seen(self.path, self.known)
        record = replace(
            self.known,
            arms={name: arm.record() for name, arm in self.arms.items()},
            cells=planned,
            bases=self.bases.record(self.base_seeds()) if self.bases else [],
            tuning_done=not tuning.open(),
            untuned=tuning.broken(),
            searches={name: search.record() for name, search in tuning.searches.items() if search.done},
            trials_made=tuning.decided,
            verdicts_seen=seen,
            sources=sources_of(self.arms),
            set_aside=set_aside(self.known, planned, self.arms, self.outcomes),
        )
        return first_seeds(record, self.stopped)


def now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
