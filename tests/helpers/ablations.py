"""Small ablations: planned, carried out by real processes, or by an executor that writes results at once."""

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from lm.lab.ablation.ablate import ablate, plan_table
from lm.lab.ablation.ask import compose_arms, with_folds
from lm.lab.ablation.execute import Ending, Executor
from lm.lab.ablation.folder import REPORTED
from lm.lab.ablation.plan import Plan, Stage
from lm.lab.ablation.question import AblateConfig
from tests.helpers.ablation_folder import question, write_result
from tests.helpers.runs import composed

SMALL = [
    *("data=text", "data.seq_len=32", "data.batch_size=4", "tokenizer=byte", "trainer=cpu", "trainer.max_steps=30"),
    *("model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.d_ff=64"),
]
SHORT = ["trainer.max_steps=6", "checkpoint.every=5", "validation.every=3", "validation.batches=2", "prompts=[]"]


@dataclass
class Lab:
    """Ablations of small runs on one text, in folders below one folder."""

    root: Path
    text: Path
    common: list[str] = field(default_factory=list)  # overrides of all arms beside SMALL
    plans: list[Plan] = field(default_factory=list)  # of all calls
    stages: list[Stage] = field(default_factory=list)  # with which they begin
    tables: list[str] = field(default_factory=list)  # what is said of a plan

    @property
    def out(self):
        return self.root / "out"

    def overrides(self):
        return [*SMALL, *self.common, f"data.path={self.text}", f"data.cache_dir={self.root / 'cache'}"]

    def run(self, *typed, folder="out", plan_only=False, **changes):
        """What ablate.py does with a question that has these changes and with overrides that are typed."""
        ablation = question(**changes)
        ablation = replace(ablation, overrides=[*self.overrides(), *ablation.overrides])
        options = {"output_dir": str(self.root / folder), "overrides": list(typed)}
        config = AblateConfig(ablation=ablation, plan_only=plan_only, workers=2, **options)
        runs = compose_arms(ablation, list(typed), lambda overrides: composed(*overrides))
        config.ablation = with_folds(ablation, runs)

        def on_plan(plan, stage, results):
            self.plans.append(plan)
            self.stages.append(stage)
            self.tables.append(plan_table(plan, stage, results))

        return ablate(config, runs, "the command", on_plan)

    def plan(self, *typed, **changes):
        """The plan alone."""
        self.run(*typed, plan_only=True, **changes)
        return self.plans[-1]

    def asked(self):
        """Return the reported runs that the last plan asks for, with all that is needed to make them."""
        specs = {spec.run_dir: spec for spec in self.plans[-1].specs.values()}
        return [specs[run.run_dir] for run in self.stages[-1].record.runs if run.purpose == REPORTED]

    def results(self, folder="out"):
        """By name, when the results of the finished runs were written."""
        paths = (self.root / folder).glob("runs/*/result.json")
        return {path.parent.name: path.stat().st_mtime_ns for path in paths}


def plan_in_a_moment(monkeypatch):
    """A step of each arm is timed once."""
    monkeypatch.setattr("lm.lab.measures.speed.TIMED_STEPS", 1)


def draw_nothing(monkeypatch):
    """A figure of a report is empty: to draw one takes most of the time of a report."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write("<svg></svg>"))


def instant(loss):
    """An engine whose runs end at once with this loss, diverge (nan), or are "failed" or "killed".

    `made` has their names, in order.
    """

    class Instant(Executor):
        name, seconds = "local", 0.0
        made: ClassVar[list[str]] = []

        def __init__(self, config, folder): ...

        def default_workers(self, threads, needs_gpu):
            return 1

        def submit(self, spec):
            self.made.append(spec.run_dir)
            value = loss(spec)
            if isinstance(value, str):
                return Ending(value, "it broke")
            if value != value:
                spec.files.write_status("diverged", "it diverged")
                return Ending("failed", "")
            write_result(spec.files.run_dir, val_loss=value, seed=spec.run.seed, steps=spec.run.steps)
            return Ending("failed", "")

        def ended(self, handle):
            return handle

        def cancel(self, handle): ...

    return Instant


def workers_of(prefix):
    """The processes that make runs whose names begin so, if they hold the log of their run open."""
    logs = {str(path) for path in [*prefix.parent.glob(f"{prefix.name}*.log"), *prefix.glob("*/*.log")]}
    processes = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):  # it has ended, or is somebody else's
            processes += [int(output.parts[2])] * (os.readlink(output) in logs)
    return processes


def statuses(results):
    return {(run.arm, run.seed): run.status for run in results.reported.itertuples()}
