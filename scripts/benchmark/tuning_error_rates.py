"""How often verdicts on tuned arms are wrong, by simulation: the table in docs/ablations.md.

    python scripts/benchmark/tuning_error_rates.py csv=FILE [repetitions=2000]   simulate; continues a FILE that exists
    python scripts/benchmark/tuning_error_rates.py table=FILE                    print its table as Markdown

Two arms have equal losses at their best settings, or such that differ by a true difference. The loss of each arm is a
surface over k hyperparameters. The searches, the choice of settings, the regrets and the tests are those of an ablation.
A reported run is the loss at the chosen settings and noise. A cell is a surface, where the searches begin, and how many
seeds a trial has. One search serves all numbers of seeds, margins and true differences of a cell.
"""

import csv
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are small

import numpy as np

from lm.ablation.judge.power import with_tuning
from lm.ablation.judge.statistics import difference_p, equivalence_p
from lm.ablation.response_surface import Array, combine_regrets, regrets
from lm.ablation.tuning import ArmTrials, Key, run_searches
from lm.config.ablation import TuneConfig

CURVATURES = np.array([0.035, 0.012, 0.01])  # nats per squared factor of two: lr, embedding matrix, LM head
TRIAL_SD, DIFFERENCE_SD = 0.006, 0.0075  # nats: of a run at one tuning seed, of a paired difference
OPTIMUM_SD = 0.3  # factors by which the best value of a hyperparameter moves with the seed, if it does
CLIFF = 0.6  # factors above the best value of the first hyperparameter where training diverges
MARGINS, SEEDS, ALPHA = (0.005, 0.02), (5, 8), 0.05
BLOCK = 250  # repetitions in a row of the CSV file


@dataclass(frozen=True)
class Cell:
    k: int  # hyperparameters
    surface: str  # quadratic, lopsided (soft below its best value, steep above), cliff
    correlation: float  # of each pair of hyperparameters in the curvature
    start: str  # near: each arm within a factor of its best; far: the arm 0.8 to 1.8 factors off, its baseline at it
    optimum: str  # fixed, or moving with the seed
    tuning_seeds: int

    def loss(self, x: Array) -> Array:
        """(..., k) factors from the best settings, to the excess over the loss there (...)."""
        c = CURVATURES[: self.k]
        root = np.sqrt(c)

        def valley(t: Array) -> Array:
            a = 1.5 * math.log(2)
            return 2 / a**2 * (np.exp(a * t) - 1 - a * t) if self.surface == "lopsided" else t**2

        together = root.sum() ** 2 * valley((root * x).sum(-1) / root.sum())
        loss = (1 - self.correlation) * (c * valley(x)).sum(-1) + self.correlation * together
        return np.where(x[..., 0] > CLIFF, np.inf, loss) if self.surface == "cliff" else loss


def cells() -> Iterator[Cell]:
    for tuning_seeds in (2, 1):
        for optimum in ("fixed", "moving"):
            for k in (1, 2, 3):
                for surface in ("quadratic", "lopsided", "cliff"):
                    for correlation in (0.0, 0.5, 0.7) if k > 1 else (0.0,):
                        for start in ("near", "far"):
                            yield Cell(k, surface, correlation, start, optimum, tuning_seeds)


class LazyLosses(dict[Key, float]):
    """Makes a trial when it is asked for."""

    def __init__(self, make: Callable[[Key], float]) -> None:
        super().__init__()
        self.make = make

    def get(self, key: Key, default: object = None) -> float:  # type: ignore[override]
        if key not in self:
            self[key] = self.make(key)
        return self[key]
