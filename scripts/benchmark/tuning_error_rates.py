"""How often verdicts on tuned arms are wrong, by simulation: the table in docs/ablations.md.

    python scripts/benchmark/tuning_error_rates.py csv=FILE [repetitions=2000]   simulate, or go on where FILE ends
    python scripts/benchmark/tuning_error_rates.py table=FILE                    print the table of FILE as Markdown

Two arms have the same surface of losses over k hyperparameters, each around its own best settings. The truth is the
difference of the arms at their best. Searches, settings, regrets and tests are those of an ablation; a reported run is
the loss at the chosen settings and noise. Where training diverges at chosen settings a run is a whole nat worse. One
pair of searches serves all numbers of seeds, margins and true differences.
"""

import csv
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are small

import numpy as np

from lm.ablation.judge.power import Tuning, with_tuning
from lm.ablation.judge.statistics import difference_p, equivalence_p
from lm.ablation.response_surface import Array, combine_regrets
from lm.ablation.tuning import ArmTrials, Key, regrets, tune
from lm.config.ablation import TuneConfig

CURVATURES = np.array([0.035, 0.012, 0.01])  # nats per squared factor of two: lr, embedding matrix, LM head
TRIAL_SD, DIFFERENCE_SD = 0.006, 0.0075  # nats: of a run at one tuning seed, of a paired difference
OPTIMUM_SD = 0.3  # factors by which the best value of a hyperparameter moves with the seed, if it does
CLIFF = 0.6  # factors above the best value of the first hyperparameter where training diverges
STEEPNESS = 1.5 * math.log(2)  # of the lopsided surface: twice as high a factor above the best value as one below
SURFACES, CORRELATIONS = ("quadratic", "lopsided", "cliff"), (0.0, 0.5, 0.7)
MARGINS, SEEDS, ALPHA = (0.005, 0.02), (5, 8), 0.05
BLOCK = 250  # repetitions in a row of the CSV file


@dataclass(frozen=True)
class Cell:
    k: int  # hyperparameters
    surface: str  # quadratic, lopsided, or cliff: a quadratic that ends where training diverges
    correlation: float  # of each pair of hyperparameters in the curvature
    start: str  # near: each arm within a factor of its best; far: the arm 0.8 to 1.8 factors off, its baseline at it
    optimum: str  # fixed, or moving with the seed
    tuning_seeds: int

    def loss(self, x: Array, shift: Array) -> Array:
        """(..., k) factors from the best settings, and how far these are moved, to the excess over the least loss."""
        curvatures = CURVATURES[: self.k]
        root = np.sqrt(curvatures)

        def valley(t: Array) -> Array:
            return 2 / STEEPNESS**2 * (np.expm1(STEEPNESS * t) - STEEPNESS * t) if self.surface == "lopsided" else t**2

        alone = (curvatures * valley(x - shift)).sum(-1)
        together = root.sum() ** 2 * valley((root * (x - shift)).sum(-1) / root.sum())
        loss = (1 - self.correlation) * alone + self.correlation * together
        return np.where(x[..., 0] > CLIFF, np.inf, loss) if self.surface == "cliff" else loss

    def shifts(self, n: int, random: np.random.Generator) -> Array:
        """(n, k) by how much the best settings move with each of n seeds; all arms alike."""
        return OPTIMUM_SD * random.standard_normal((n, self.k)) if self.optimum == "moving" else np.zeros((n, self.k))

    def best(self, random: np.random.Generator) -> dict[str, Array]:
        """The best settings of each arm, in factors from where its search begins."""
        if self.start == "near":
            return {arm: random.uniform(-1, 1, self.k) for arm in ("arm", "baseline")}
        far = random.uniform(0.8, 1.8, self.k) * random.choice([-1, 1], self.k)
        return {"arm": far, "baseline": np.zeros(self.k)}


IDENTITY = [*(field.name for field in fields(Cell)), "block"]


def cells() -> Iterator[Cell]:
    for tuning_seeds, optimum, k in product((2, 1), ("fixed", "moving"), (1, 2, 3)):
        for surface, correlation, start in product(SURFACES, CORRELATIONS if k > 1 else (0.0,), ("near", "far")):
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


def tuned_pair(
    cell: Cell, config: TuneConfig, random: np.random.Generator
) -> tuple[dict[str, float], Array, Tuning | None]:
    """Tune both arms: counts, the differences of reported runs but for the true one, and what tuning adds to their error."""
    best, shifts = cell.best(random), cell.shifts(cell.tuning_seeds, random)
    reported, sd = cell.shifts(max(SEEDS), random), TRIAL_SD / math.sqrt(cell.tuning_seeds)

    def losses(arm: str) -> LazyLosses:
        return LazyLosses(
            lambda key: cell.loss(np.log2(key) - best[arm], shifts).mean() + sd * random.standard_normal()
        )

    arms = {arm: ArmTrials({str(j): 1.0 for j in range(cell.k)}, losses(arm)) for arm in best}
    tuned = tune(arms, config).arms
    excess = {}
    for arm, result in tuned.items():
        excess[arm] = cell.loss(np.log2([*result.settings.values()]) - best[arm], reported)
    known = regrets(tuned)
    counts = {
        "settings": np.mean([len(arm.losses) for arm in arms.values()]),
        "searches": tuned["arm"].n_searches,
        "regret": min(excess["arm"].mean(), 1.0),
        "expected_regret": known["arm"].mean,
    }
    differences = np.minimum(excess["arm"], 1.0) - np.minimum(excess["baseline"], 1.0)
    differences += DIFFERENCE_SD * random.standard_normal(max(SEEDS))
    return counts, differences, combine_regrets({"arm": 1, "baseline": -1}, known)


def outcomes(differences: Array, tuning: Tuning | None) -> dict[str, bool]:
    """What is decided, with each number of seeds and margin, for equal arms and for true differences."""
    row = {}
    for n in SEEDS:
        mean = float(differences[:n].mean())
        sd, df = with_tuning(float(differences[:n].std(ddof=1)), n, tuning)
        row[f"covered_{n}"] = difference_p(mean, sd, n, df) > ALPHA

        def verdict(true: float, margin: float) -> str:
            if equivalence_p(mean + true, sd, n, df, margin) <= ALPHA:  # noqa: B023
                return "equivalent"
            return "different" if difference_p(mean + true, sd, n, df) <= ALPHA else "undecided"  # noqa: B023

        for margin in MARGINS:
            row[f"false_{margin}_{n}"] = verdict(0.0, margin) == "different"
            row[f"equivalent_worse_{margin}_{n}"] = verdict(margin, margin) == "equivalent"
            row[f"equivalent_better_{margin}_{n}"] = verdict(-margin, margin) == "equivalent"
    row["power_worse"], row["power_better"] = (verdict(sign * 0.01, 0.005) == "different" for sign in (1, -1))
    return row


def simulate(cell: Cell, repetitions: int, restarts: int = TuneConfig().restarts, block: int = 0) -> dict[str, float]:
    """The means over repetitions; blocks are independent of each other."""
    fields = [cell.k, SURFACES.index(cell.surface), round(10 * cell.correlation), cell.tuning_seeds]
    random = np.random.default_rng([*fields, cell.start == "far", cell.optimum == "moving", block])
    config, total = TuneConfig(trials=4 * cell.k + 2, restarts=restarts), Counter[str]()
    for _ in range(repetitions):
        counts, differences, tuning = tuned_pair(cell, config, random)
        total.update(counts | outcomes(differences, tuning))
    return {name: value / repetitions for name, value in total.items()}


def write(path: Path, repetitions: int) -> None:
    """Block after block, the cells of two tuning seeds first, after one block of each cell."""
    made = {tuple(row[name] for name in IDENTITY) for row in csv.DictReader(path.open())} if path.exists() else set()
    jobs = sorted(
        product(range(repetitions // BLOCK), cells()),
        key=lambda job: (job[0] > 0, job[1].tuning_seeds == 1 and job[0] > 0, job[0]),
    )
    with path.open("a", newline="") as file:
        for block, cell in jobs:
            identity = asdict(cell) | {"block": block}
            if tuple(map(str, identity.values())) not in made:
                row = identity | {name: round(value, 6) for name, value in simulate(cell, BLOCK, block=block).items()}
                writer = csv.DictWriter(file, row)
                if not file.tell():
                    writer.writeheader()
                writer.writerow(row)
                file.flush()
