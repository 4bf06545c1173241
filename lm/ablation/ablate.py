"""ablate(config) is the entry point of an ablation: plan, tune, run, report."""

import contextlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import torch

from lm.ablation.judge.study import read_study
from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.arms import build_arms
from lm.ablation.plan.calibrate import machine, measure
from lm.ablation.plan.cells import Cell, all_cells, cell, cell_records, set_steps
from lm.ablation.plan.changes import set_aside
from lm.ablation.record import AblationRecord, Caution, Look, write_record
from lm.ablation.report import looks_of, write_report
from lm.ablation.run.cautions import cautions
from lm.ablation.run.folder import claim, default_dir, earlier
from lm.ablation.run.progress import Progress
from lm.ablation.run.startup import measure_startup
from lm.ablation.run.tuning import Tuning
from lm.ablation.run.workers import missing, prepare_workers, run_cells
from lm.config import RunConfig
from lm.config.ablation import AblateConfig, Question
from lm.system.device import cores, set_threads

PACKAGES = ("torch", "lightning", "scipy", "numpy", "tokenizers", "datasets")


def ablate(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    command: str,
    planned: Callable[["AblationRunner"], None] = lambda _: None,
) -> "AblationRunner":
    """Plan an ablation and, unless only the plan is wanted, run what is missing of it and write its report.

    `runs` has the configuration of each arm; `planned` is called in between.

    Raises BadInput before anything is run for what the user can mend.
    """
    path = Path(config.output_dir).expanduser() if config.output_dir else default_dir(config)
    earlier(path, config)  # refuses another's folder before it is held
    with contextlib.nullcontext() if config.plan_only else claim(path):
        runner = AblationRunner(config, path, runs, command)
        planned(runner)
        if not config.plan_only:
            runner.run()
    return runner


class AblationRunner:
    """An ablation and its folder: cells/ and trials/ with a run each, ablation.json, the report."""

    def __init__(self, config: AblateConfig, path: Path, runs: dict[str, RunConfig], command: str) -> None:
        self.config, self.ablation, self.path, self.command = config, config.ablation, path, command
        before, self.outcomes = earlier(path, config), Outcomes(path)
        if not config.plan_only:
            prepare_workers()
        self.gpus = torch.cuda.device_count()
        threads = before.threads if before else 1  # the same for all runs, whenever they are made
        self.arms = build_arms(self.ablation, runs, threads, quiet=not sys.stderr.isatty())
        self.threads = set_threads(max(arm.run.threads or threads for arm in self.arms.values()))
        self.workers = config.workers or self.gpus or max(1, cores() // self.threads)
        self.seconds_per_step = measure(self.arms, before.seconds_per_step if before else {})
        set_steps(self.ablation, self.arms)
        self.tuning = Tuning(self.ablation, self.arms, self.outcomes, before)
        self.before, self.begun = before, before.begun if before else now()
        self.planned = sorted({*self.ablation.seeds, *(before.planned or before.seeds if before else [])})
        self.startup_seconds = before.startup_seconds if before else {}
        if machine() not in self.startup_seconds and (self.missing() or self.expected_trials()):
            self.startup_seconds[machine()] = measure_startup(self.arms[self.ablation.baseline], self.gpus)

    def run(self) -> None:
        self.write_record()
        with Progress(self.ablation.name, self.ablation.metric, self.path, self.workers, self.cost) as self.progress:
            self.progress.expect(self.missing(), self.expected_trials())
            if self.ablation.tune.trials:
                self.tune()
            untuned = self.tuning.broken()
            self.carry_out([one for one in self.all_cells() if one.arm not in untuned])
        ended = now()
        self.write_record(ended)
        write_report(self.path)
        self.write_record(ended)  # with the verdict that was shown

    def cautions(self) -> list[Caution]:
        return cautions(self.tuning, self.looks(), self.planned)

    def looks(self) -> list[Look]:
        """What was asked whenever a verdict was seen; each look that asked otherwise once."""
        found = [*(self.before.looks if self.before else []), *looks_of(self.path)]
        return [one for i, one in enumerate(found) if one not in found[:i]]

    def missing(self) -> list[Cell]:
        return missing(self.all_cells(), self.outcomes)

    def set_aside(self) -> dict[str, str]:
        """Finished runs that no longer count, and why."""
        return set_aside(self.before, cell_records(self.ablation, self.arms), self.arms, self.outcomes)

    def cost(self, cell: Cell) -> float:
        """Seconds."""
        return self.startup_seconds.get(machine(), 0.0) + self.arms[cell.arm].seconds(cell.steps)

    def expected_trials(self) -> list[Cell]:
        """As many runs as the searches will make at least."""
        first, seeds = self.ablation.budgets[0], self.ablation.tune.seeds
        left = [(self.arms[name], n * len(seeds)) for name, n in self.tuning.to_make().items()]
        return [cell(arm, 0, arm.steps[first], {}, "trials") for arm, n in left for _ in range(n)]

    def all_cells(self) -> list[Cell]:
        return all_cells(self.ablation, self.arms)

    def n_failed(self) -> int:
        """Reported runs that failed or diverged, and search trials without an outcome."""
        counts = read_study(self.path).counts()
        return counts["failed"] + counts["diverged"] + sum(map(len, self.tuning.broken().values()))

    def carry_out(self, wanted: list[Cell], trials: bool = False) -> None:
        ahead = missing(wanted, self.outcomes)
        self.progress.begin(ahead, trials)
        run_cells(ahead, self.path, self.workers, self.gpus, self.progress.tick)

    def tune(self) -> None:
        for batch in self.tuning.rounds():
            for _ in range(2):  # what was killed gets another try: an arm must not lose a value by an accident
                self.carry_out(batch, trials=True)
            self.write_record()
        self.write_record()

    def write_record(self, ended: str | None = None) -> None:
        tuning = self.tuning
        record = AblationRecord(
            **{one.name: getattr(self.ablation, one.name) for one in fields(Question)},
            overrides=self.config.overrides,
            common=self.ablation.overrides,
            contrasts=self.ablation.contrasts(),
            arms={name: arm.record() for name, arm in self.arms.items()},
            cells=cell_records(self.ablation, self.arms),
            cautions=self.cautions(),
            begun=self.begun,
            ended=ended,
            tuning_done=not tuning.open(),
            untuned=tuning.broken(),
            searches={name: search.record() for name, search in tuning.searches.items() if search.done},
            trials_made=tuning.decided,
            looks=self.looks(),
            planned=self.planned,
            command=self.command,
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {self.gpus} GPUs",
            threads=self.threads,
            workers=self.workers,
            python=platform.python_version(),
            versions={package: version(package) for package in PACKAGES},
            seconds_per_step=self.seconds_per_step,
            startup_seconds=self.startup_seconds,
            sources={file: value for arm in self.arms.values() for file, value in arm.sources.items()},
            set_aside=self.set_aside(),
        )
        write_record(record, self.path)


def now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
