"""ablate(config) is the composition root of an ablation: plan, tune, run, report."""

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lm.ablation.judge.study import read_study
from lm.ablation.plan.arms import Arm, build_arms
from lm.ablation.plan.calibrate import measure
from lm.ablation.plan.cells import Cell, cell, cells, set_steps
from lm.ablation.report import write_report
from lm.ablation.restore import restore
from lm.ablation.run.cautions import Caution, cautions, looked
from lm.ablation.run.folder import claim, default_dir, read_record
from lm.ablation.run.progress import Progress
from lm.ablation.run.tuning import Tuning
from lm.ablation.run.workers import missing, prepare_workers, run_cells
from lm.config import RunConfig
from lm.config.ablation import AblateConfig
from lm.config.identity import flat
from lm.system.device import cores, set_threads
from lm.system.files import write_text

DESCRIBED = (
    *("words", "matched", "tuned", "n_params", "flops_per_token", "tokens_per_step", "seconds_per_step", "steps"),
    *("vocab_size", "train_tokens", "val_tokens", "identity"),
)
PACKAGES = ("torch", "lightning", "scipy", "numpy", "tokenizers", "datasets")


def ablate(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    command: str,
    planned: Callable[["Laboratory"], None] = lambda _: None,
) -> "Laboratory":
    """Plan an ablation and, unless only the plan is wanted, run what is missing of it and write its report.

    `runs` has the configuration of each arm; `planned` is called in between.

    Raises BadInput before anything is run for what the user can mend.
    """
    path = Path(config.output_dir).expanduser() if config.output_dir else default_dir(config)
    read_record(path, config.ablation, config.overrides)  # refuses another's folder before it is held
    with contextlib.nullcontext() if config.plan_only else claim(path):
        laboratory = Laboratory(config, path, runs, command)
        planned(laboratory)
        if not config.plan_only:
            laboratory.run()
    return laboratory


class Laboratory:
    """An ablation at work in its folder: cells/ and trials/ with a run each, ablation.json, the report."""

    def __init__(self, config: AblateConfig, path: Path, runs: dict[str, RunConfig], command: str) -> None:
        self.config, self.ablation, self.path, self.command = config, config.ablation, path, command
        self.record = read_record(self.path, self.ablation, config.overrides)
        restore(self.path)
        if not config.plan_only:
            prepare_workers()
        self.gpus = torch.cuda.device_count()
        threads = self.record.get("threads", 1)  # the same for all cells, whenever they are run
        self.arms = build_arms(self.ablation, runs, threads, quiet=not sys.stderr.isatty())
        self.threads = set_threads(max(arm.run.threads or threads for arm in self.arms.values()))
        self.workers = config.workers or self.gpus or max(1, cores() // self.threads)
        self.record["seconds_per_step"] = measure(self.arms, self.record.get("seconds_per_step", {}))
        set_steps(self.ablation, self.arms)
        self.tuning = Tuning(self.ablation, self.arms, self.path / "trials", self.record)

    def run(self) -> None:
        self.record["tuning_done"] = not self.tuning.open()
        self.write_record()
        with Progress(self.ablation.name, self.ablation.metric, self.workers, self.cost) as self.progress:
            self.progress.expect(missing(self.all_cells(), self.path / "cells"), self.expected_trials())
            if self.ablation.tune.trials:
                self.tune()
                self.write_record()
            untuned = self.tuning.broken()
            self.carry_out([one for one in self.all_cells() if one.arm not in untuned], "cells")
        self.record |= {"ended": now(), "looks": looked(self.ablation, self.record)}
        self.write_record()
        write_report(self.path)

    def cautions(self) -> list[Caution]:
        return cautions(self.tuning, self.record)

    def cost(self, cell: Cell) -> float:
        return self.arms[cell.arm].seconds(cell.run.trainer["max_steps"])

    def expected_trials(self) -> list[Cell]:
        """As many cells as the searches will make at least."""
        first, seeds = self.ablation.budgets[0], self.ablation.tune.seeds
        left = [(self.arms[name], n * len(seeds)) for name, n in self.tuning.to_make().items()]
        return [cell(arm, 0, arm.steps[first], {}) for arm, n in left for _ in range(n)]

    def all_cells(self) -> list[Cell]:
        """Every reported cell once, seed by seed, so that whatever is interrupted has whole pairs."""
        found = {one.name: one for arm in self.arms.values() for _, one in cells(self.ablation, arm)}
        order = {seed: i for i, seed in enumerate(self.ablation.seeds)}
        return sorted(found.values(), key=lambda one: order[one.seed - self.ablation.seed_offsets.get(one.arm, 0)])

    def n_failed(self) -> int:
        """Reported runs that failed or diverged, and trials that came to no end."""
        counts = read_study(self.path).counts()
        return counts["failed"] + counts["diverged"] + sum(map(len, self.tuning.broken().values()))

    def carry_out(self, wanted: list[Cell], folder: str) -> None:
        place = self.path / folder
        ahead = missing(wanted, place)
        self.progress.begin(ahead, place, folder == "trials")
        run_cells(ahead, place, self.workers, self.gpus, self.progress.tick)

    def tune(self) -> None:
        for batch in self.tuning.rounds():
            for _ in range(2):  # what was killed gets another try: an arm must not lose a value by an accident
                self.carry_out(batch, "trials")
            self.write_record()
        self.record |= {"trials_made": self.tuning.decided, "tuning_done": not self.tuning.broken()}

    def write_record(self) -> None:
        """ablation.json: all that the report needs beside the runs themselves."""
        self.record.setdefault("begun", now())
        self.record |= asdict(self.ablation) | {
            "overrides": self.config.overrides,
            "common": self.ablation.overrides,
            "contrasts": self.ablation.contrasts(),
            "cautions": self.cautions(),
            "untuned": {name: [f"trials/{one.name}" for one in lost] for name, lost in self.tuning.broken().items()},
            "command": self.command,
            "threads": self.threads,
            "workers": self.workers,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {self.gpus} GPUs",
            "python": platform.python_version(),
            "versions": {package: version(package) for package in PACKAGES},
            "arms": {name: self.describe(arm) for name, arm in self.arms.items()},
            "searches": {name: search.summary() for name, search in self.tuning.searches.items() if search.done},
            "cells": [
                {"arm": arm.name, "seed": one.seed - self.ablation.seed_offsets.get(arm.name, 0), "budget": budget}
                | {"run_dir": f"cells/{one.name}", "steps": one.run.trainer["max_steps"]}
                for arm in self.arms.values()
                for budget, one in cells(self.ablation, arm)
            ],
        }
        write_text(self.path / "ablation.json", json.dumps(self.record, indent=1) + "\n")

    def describe(self, arm: Arm) -> dict[str, Any]:
        settings = flat(asdict(arm.run) | {"logger": {}})
        return {key: getattr(arm, key) for key in DESCRIBED} | {"settings": settings}


def now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
