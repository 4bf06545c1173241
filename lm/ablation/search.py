"""The tuning of one arm with real runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm.ablation import tune
from lm.ablation.arms import Arm
from lm.ablation.config import METRICS, AblationConfig
from lm.ablation.plan import Cell, cell
from lm.config import BadInput
from lm.run import flat


class Search:
    """The tuning of one arm: its knobs, the trials made so far, and their losses."""

    def __init__(self, ablation: AblationConfig, arm: Arm, folder: Path) -> None:
        self.settings, self.arm, self.folder = ablation.tune, arm, folder
        self.steps, self.metric = arm.steps[ablation.budgets[0]], ablation.metric
        self.sign = 1 if METRICS[self.metric][0] else -1
        known = flat(asdict(arm.run))
        for knob in self.settings.knobs:
            if knob not in known or not isinstance(known[knob], float | None):
                raise BadInput(f"ablation.tune.knobs: {knob} is none of a run's settings that take any number")
        self.knobs = [knob for knob in self.settings.knobs if known[knob]]  # not null, not zero
        self.start = [float(known[knob]) for knob in self.knobs]
        self.done: tune.Trials = {}
        self.asked: list[tune.Point] = []

    def values(self, point: tune.Point) -> dict[str, float]:
        return dict(zip(self.knobs, tune.values(point, self.start, self.settings.factor), strict=True))

    def cells(self, point: tune.Point) -> list[Cell]:
        return [cell(self.arm, seed, self.steps, self.values(point)) for seed in self.settings.seeds]

    def next_cells(self, budget: int) -> list[Cell]:
        """The cells of the next trials, after taking in those that were asked for before."""
        self.done |= {point: self.loss(point) for point in self.asked}
        self.asked = tune.propose(self.done, len(self.knobs), budget)
        return [one for point in self.asked for one in self.cells(point)]

    def loss(self, point: tune.Point) -> float:
        """The mean over the tuning seeds; infinity where one of them has no result."""
        results = [self.folder / one.name / "result.json" for one in self.cells(point)]
        if not all(path.exists() for path in results):
            return float("inf")
        return sum(self.sign * json.loads(path.read_text())[self.metric] for path in results) / len(results)

    def settled(self) -> bool:
        return all(tune.inside(self.done))

    def apply(self) -> None:
        """Give the arm the best settings found; its own, where no trial came to an end."""
        self.arm.tuned = self.values(tune.best(self.done))

    def summary(self) -> dict[str, Any]:
        return {
            "knobs": self.knobs,
            "seeds": self.settings.seeds,
            "inside": dict(zip(self.knobs, tune.inside(self.done), strict=True)) if self.done else {},
            "trials": [
                {"values": self.values(point), self.metric: self.sign * loss if loss < float("inf") else None}
                | {"run_dirs": [f"trials/{one.name}" for one in self.cells(point)]}
                for point, loss in self.done.items()
            ],
        }
