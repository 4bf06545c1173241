"""ablate(config) is the composition root of an ablation: plan, tune, run, report."""

import contextlib
import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import filelock
import torch

from lm.ablation.calibrate import calibrate
from lm.ablation.config import AblateConfig
from lm.ablation.plan import Arm, Cell, Compose, build_arms, cell, cells, set_steps
from lm.ablation.progress import Progress
from lm.ablation.report import write_report
from lm.ablation.search import Search
from lm.ablation.workers import Place, missing, prepare_workers, run_cells
from lm.config import BadInput
from lm.device import set_threads
from lm.files import remove_partial, write_text
from lm.run import config_hash, flat

PACKAGES = ("torch", "lightning", "scipy", "numpy", "tokenizers", "datasets")
log = logging.getLogger(__name__)


def ablate(
    config: AblateConfig, compose: Compose, command: str, planned: Callable[["Laboratory"], None] = lambda _: None
) -> "Laboratory":
    """Plan an ablation and, unless only the plan is wanted, run what is missing of it and write its report.

    `planned` is called in between.

    Raises BadInput before anything is run for what the user can mend.
    """
    laboratory = Laboratory(config, compose, command)
    planned(laboratory)
    if not config.plan_only:
        with laboratory.claim():
            laboratory.run()
    return laboratory


class Laboratory:
    """An ablation at work in its folder: cells/ and trials/ with a run each, ablation.json, the report."""

    def __init__(self, config: AblateConfig, compose: Compose, command: str) -> None:
        self.config, self.ablation, self.command = config, config.ablation, command
        self.path = Path(config.output_dir).expanduser() if config.output_dir else default_dir(config)
        self.record: dict[str, Any] = self.refuse_another()
        prepare_workers()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.gpus = torch.cuda.device_count()
        threads = self.record.get("threads", 1)  # the same for all cells, whenever they are run
        self.arms = build_arms(self.ablation, config.overrides, compose, threads, quiet=not sys.stderr.isatty())
        self.threads = set_threads(max(arm.run.threads or threads for arm in self.arms.values()))
        self.workers = config.workers or self.gpus or max(1, cores // self.threads)
        self.measure()
        set_steps(self.ablation, self.arms)
        self.n_trials = [self.ablation.tune.trials, self.ablation.tune.trials + self.ablation.tune.widening]
        if "trials_made" in self.record and self.record["tune"] == asdict(self.ablation.tune):
            self.n_trials = [self.record["trials_made"]]
        self.searches = {name: Search(self.ablation, arm, self.path / "trials") for name, arm in self.arms.items()}

    def refuse_another(self) -> dict[str, Any]:
        """What an earlier call has left in the folder. Raises BadInput if that was not this ablation."""
        path = self.path / "ablation.json"
        try:
            there = json.loads(path.read_text())
        except FileNotFoundError:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise BadInput(f"output_dir={self.path}: holds no ablation; name a new or an empty folder") from None
            return {}
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read ({error})") from error
        here = {"name": self.ablation.name, "overrides": self.config.overrides, "metric": self.ablation.metric}
        for key, value in here.items():
            if there.get(key) != value:
                found = f"{key} is {there.get(key)} there, {value} now"
                raise BadInput(f"output_dir={self.path}: holds another ablation ({found}); name another output_dir")
        return there

    def measure(self) -> None:
        """Seconds per step, measured once on each machine: later calls keep the number of steps that follows."""
        known = self.record.get("seconds_per_step", {})
        keys = {name: f"{config_hash(arm.run)[:16]} {platform.node()}" for name, arm in self.arms.items()}
        fresh = [name for name in self.arms if keys[name] not in known]
        if (
            fresh
        ):  # together with the others: only times taken in turns compare; the others keep theirs, and their steps
            log.info("measuring a training step of each arm")
            found = dict(zip(self.arms, calibrate(list(self.arms.values())), strict=True))
            then = [known[keys[name]] / found[name] for name in self.arms if keys[name] in known]
            known |= {keys[name]: found[name] * (median(then) if then else 1) for name in fresh}
        self.record["seconds_per_step"] = known
        for name, arm in self.arms.items():
            arm.seconds_per_step = known[keys[name]]

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            raise BadInput(f"output_dir={self.path}: another process is at work there") from None
        try:
            remove_partial(self.path)
            yield
        finally:
            lock.release()

    def run(self) -> None:
        self.record["tuning_done"] = not self.ablation.tune.trials
        self.write_record()
        with Progress(self.ablation.name, self.workers, self.cost) as self.progress:
            self.progress.expect(missing(self.all_cells(), self.path / "cells"), self.expected_trials())
            self.search()
            self.write_record()
            self.mention_others()
            self.carry_out(self.all_cells(), "cells")
        self.write_record()
        write_report(self.path)

    def mention_others(self) -> None:
        """Say so where finished runs lie that are not used: they were made of something else."""
        names = {one.name for one in self.all_cells()}
        others = [path.parent for path in self.path.glob("cells/*/result.json") if path.parent.name not in names]
        if others:
            log.info("%d finished runs of other settings, text or code lie there too and are not used", len(others))

    def cost(self, cell: Cell) -> float:
        return self.arms[cell.arm].seconds(cell.run.trainer["max_steps"])

    def expected_trials(self) -> list[Cell]:
        """As many cells as the search of each arm will make at least."""
        settings, first = self.ablation.tune, self.ablation.budgets[0]
        times = settings.trials * len(settings.seeds)
        return [cell(arm, 0, arm.steps[first], {}) for arm in self.arms.values() for _ in range(times)]

    def all_cells(self) -> list[Cell]:
        """Every reported cell once, seed by seed, so that whatever is interrupted has whole pairs."""
        found = {one.name: one for arm in self.arms.values() for _, one in cells(self.ablation, arm)}
        order = {seed: i for i, seed in enumerate(self.ablation.seeds)}
        return sorted(found.values(), key=lambda one: order[one.seed - self.ablation.reseed.get(one.arm, 0)])

    def n_failed(self) -> int:
        """Reported cells that failed or diverged."""
        found = (Place(self.path / "cells" / one.name).status()["status"] for one in self.all_cells())
        return sum(status in ("failed", "diverged") for status in found)

    def carry_out(self, wanted: list[Cell], folder: str) -> None:
        place = self.path / folder
        self.progress.begin(missing(wanted, place), place, folder == "trials")
        run_cells(missing(wanted, place), place, self.workers, self.gpus, self.progress.tick)

    def search(self) -> None:
        """Tune every arm with the same number of trials, and all of them once more if one ended at an edge.

        Arms that are added later get as many as the first ones had, so that what is decided stays.
        """
        settings = self.ablation.tune
        if not settings.trials:
            return
        for number in self.n_trials:
            while batch := [one for search in self.searches.values() for one in search.next_cells(number)]:
                self.carry_out(batch, "trials")
                self.write_record()
            if all(search.settled() for search in self.searches.values()):
                break
        self.record["trials_made"] = number
        for search in self.searches.values():
            search.apply()
        self.record["tuning_done"] = True

    def write_record(self) -> None:
        """ablation.json: all that the report needs beside the runs themselves."""
        self.record |= asdict(self.ablation) | {
            "overrides": self.config.overrides,
            "common": self.ablation.overrides,
            "contrasts": self.ablation.contrasts(),
            "command": self.command,
            "threads": self.threads,
            "workers": self.workers,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {self.gpus} GPUs",
            "python": platform.python_version(),
            "versions": {package: version(package) for package in PACKAGES},
            "arms": {name: self.describe(arm) for name, arm in self.arms.items()},
            "searches": {name: search.summary() for name, search in self.searches.items() if search.done},
            "cells": [
                {"arm": arm.name, "seed": one.seed - self.ablation.reseed.get(arm.name, 0), "budget": budget}
                | {"run_dir": f"cells/{one.name}", "steps": one.run.trainer["max_steps"]}
                for arm in self.arms.values()
                for budget, one in cells(self.ablation, arm)
            ],
        }
        write_text(self.path / "ablation.json", json.dumps(self.record, indent=1) + "\n")

    def describe(self, arm: Arm) -> dict[str, Any]:
        keys = ("words", "matched", "tuned", "n_params", "flops_per_token", "tokens_per_step", "seconds_per_step")
        settings = flat(asdict(arm.run) | {"logger": {}})
        return {key: getattr(arm, key) for key in (*keys, "steps", "vocab_size", "identity")} | {"settings": settings}


def default_dir(config: AblateConfig) -> Path:
    """ablations/ and the name; other overrides make another folder."""
    words = json.dumps(config.overrides)
    suffix = f"-{hashlib.sha256(words.encode()).hexdigest()[:8]}" if config.overrides else ""
    return Path("ablations") / f"{config.ablation.name}{suffix}"
