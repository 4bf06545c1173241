"""How often verdicts on tuned arms are wrong, by simulation: the table in docs/statistics.md.

    python scripts/benchmark/tuning_error_rates.py csv=FILE [repetitions=2000]     simulate, or go on where FILE ends
    python scripts/benchmark/tuning_error_rates.py table=FILE     print its tables, and the cells beyond what is wanted

Two arms have the same surface of losses over k hyperparameters, each around its own best settings. The truth is the
difference of the arms at their best. Searches, settings, regrets and tests are those of an ablation; a reported run is
the loss at the chosen settings and noise. One pair of searches serves all numbers of seeds, margins and true
differences.
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
import pandas as pd

from lm.lab.ablation.response_surface import Array, combine_regrets
from lm.lab.ablation.settings import TuneConfig
from lm.lab.ablation.statistics import TuningVariance, difference_p, effective_sd, equivalence_p
from lm.lab.ablation.tuning import ArmTrials, Key, failed_searches, regrets, tune

CURVATURES = np.array([0.035, 0.012, 0.01])  # nats per squared factor of two: lr, embedding matrix, LM head
TRIAL_SD, DIFFERENCE_SD = 0.006, 0.0075  # nats: of a run at one tuning seed, of a paired difference
OPTIMUM_SD = 0.3  # factors by which the best value of a hyperparameter moves with the seed, if it does
CLIFF = 0.6  # factors above the best value of the first hyperparameter where training diverges
STEEPNESS = 1.5 * math.log(2)  # of the lopsided surface: twice as high a factor above the best value as one below
TILT = 0.02  # nats per factor by which the loss falls towards a tilted cliff
BLOW_UP, BLOW_UP_AT = 1.0, 0.4  # nats by which a soft cliff rises, factors above the best value
SPIKE, SPIKE_RATE = 0.05, 0.08  # nats by which a trial is too high, and how often one is
HEIGHT, BELOW = 0.3, 6.0  # nats of the plateau of a saturating surface, and how many factors below the best one begins
SURFACES = ("quadratic", "lopsided", "cliff", "tilted_cliff", "soft_cliff", "spikes", "saturating")
CORRELATIONS = (0.0, 0.5, 0.7)
HYPERPARAMETERS = ("optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier")
MARGINS, SEEDS, ALPHA = (0.005, 0.02), (5, 8), 0.05
DIVERGED = 1.0  # nats that a diverged run is worse
BLOCK = 100  # repetitions in a row of the CSV file


@dataclass(frozen=True)
class Cell:
    k: int  # hyperparameters
    surface: str  # see `loss`
    correlation: float  # of each pair of hyperparameters in the curvature
    start: str  # near: each arm within a factor of its best; far: the arm 0.8 to 1.8 factors off, its baseline at it;
    # plateau: the arm BELOW factors below the best value of the first hyperparameter, the baseline at its best
    optimum: str  # fixed, or moving with the seed
    tuning_seeds: int

    def loss(self, x: Array, shift: Array) -> Array:
        """(..., k) factors from the best settings, and how far these are moved, to the excess over the least loss.

        A cliff is where training diverges above a value of the first hyperparameter: beyond the best one, or, of a
        tilted cliff, right above it. A soft cliff is a step to a loss that stays finite. A saturating surface is flat
        far from its best.
        """
        if self.surface == "saturating":
            return HEIGHT * (1 - np.exp(-((x - shift) ** 2).sum(-1) / 4))
        curvatures = CURVATURES[: self.k]
        root = np.sqrt(curvatures)

        def valley(t: Array) -> Array:
            return 2 / STEEPNESS**2 * (np.expm1(STEEPNESS * t) - STEEPNESS * t) if self.surface == "lopsided" else t**2

        alone = curvatures * valley(x - shift)
        if self.surface == "tilted_cliff":
            alone[..., 0] = TILT * np.abs(x - shift)[..., 0]
        alone = alone.sum(-1)
        together = root.sum() ** 2 * valley((root * (x - shift)).sum(-1) / root.sum())
        loss = (1 - self.correlation) * alone + self.correlation * together
        height, at = {
            "cliff": (np.inf, CLIFF),
            "tilted_cliff": (np.inf, 0.0),
            "soft_cliff": (BLOW_UP, BLOW_UP_AT),
        }.get(self.surface, (0.0, 0.0))
        return np.where(x[..., 0] > at, loss + height, loss)

    def shifts(self, n: int, random: np.random.Generator) -> Array:
        """(n, k) by how much the best settings move with each of n seeds; all arms alike."""
        return OPTIMUM_SD * random.standard_normal((n, self.k)) if self.optimum == "moving" else np.zeros((n, self.k))

    def best(self, random: np.random.Generator) -> dict[str, Array]:
        """The best settings of each arm, in factors from where its search begins."""
        if self.start == "near":
            return {arm: random.uniform(-1, 1, self.k) for arm in ("arm", "baseline")}
        far = random.uniform(0.8, 1.8, self.k) * random.choice([-1, 1], self.k)
        if self.start == "plateau":
            far = np.array([BELOW, *[0.0] * (self.k - 1)])
        return {"arm": far, "baseline": np.zeros(self.k)}


IDENTITY = [*(field.name for field in fields(Cell)), "block"]


def cells() -> Iterator[Cell]:
    for tuning_seeds, optimum, k in product((2, 1), ("fixed", "moving"), (3, 2, 1)):
        for surface, correlation, start in product(SURFACES[:-1], CORRELATIONS if k > 1 else (0.0,), ("near", "far")):
            yield Cell(k, surface, correlation, start, optimum, tuning_seeds)


class LazyLosses(dict[Key, float]):
    """Makes a trial when it is asked for."""

    def __init__(self, make: Callable[[Key], float]) -> None:
        super().__init__()
        self.make = make

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: Key) -> float:
        self[key] = self.make(key)
        return self[key]


def tune_pair(
    cell: Cell, config: TuneConfig, random: np.random.Generator
) -> tuple[dict[str, float], Array, TuningVariance | None, dict[float, dict[str, str]]]:
    """Tune both arms.

    Returns what tuning did, the differences of reported runs if the arms are equal, the variance due to tuning, and for
    each margin the arms whose search has failed.
    """
    best, shifts = cell.best(random), cell.shifts(cell.tuning_seeds, random)
    sd = TRIAL_SD / math.sqrt(cell.tuning_seeds)

    def trials(arm: str) -> LazyLosses:
        def make(key: Key) -> float:
            spike = SPIKE * (random.random() < SPIKE_RATE) if cell.surface == "spikes" else 0.0
            return float(cell.loss(np.log2(key) - best[arm], shifts).mean() + sd * random.standard_normal() + spike)

        return LazyLosses(make)

    arms = {arm: ArmTrials(dict.fromkeys(HYPERPARAMETERS[: cell.k], 1.0), trials(arm)) for arm in best}
    state = tune(arms, config)
    tuned = state.arms
    shifts = cell.shifts(max(SEEDS), random)
    excess = {}
    for arm, chosen in tuned.items():
        x = np.log2([*chosen.settings.values()]) - best[arm]
        excess[arm] = np.minimum(cell.loss(x, shifts), DIVERGED)
    known = regrets(tuned)
    counts = {
        "settings": np.mean([len(arm.losses) for arm in arms.values()]),
        "searches": 1 + max(search for _, search in state.trials["arm"]),
        "regret": excess["arm"].mean(),
        "expected_regret": known["arm"].mean if "arm" in known else 0.0,
    }
    differences = excess["arm"] - excess["baseline"] + DIFFERENCE_SD * random.standard_normal(max(SEEDS))
    failed = {margin: failed_searches(tuned, margin) for margin in MARGINS}
    return counts, differences, combine_regrets({"arm": 1, "baseline": -1}, known), failed


def verdict(mean: float, sd: float, n: int, df: float, margin: float, failed: dict[str, str]) -> str:
    """As in an ablation, the arm that would gain from more search is not called worse, nor two arms equivalent."""
    if equivalence_p(mean, sd, n, df, margin) <= ALPHA:
        return "undecided" if failed else "equivalent"
    loser = "arm" if mean > 0 else "baseline"
    undone = loser in failed or "divergence" in failed.values()
    return "different" if difference_p(mean, sd, n, df) <= ALPHA and not undone else "undecided"


def outcomes(differences: Array, tuning: TuningVariance | None, failed: dict[float, dict[str, str]]) -> dict[str, bool]:
    """What is decided with each number of seeds and margin, of equal arms, worse arms and better arms."""

    def decide(mean: float, margin: float) -> str:
        return verdict(mean, sd, n, df, margin, failed[margin])

    row = {}
    for n in SEEDS:
        mean = float(differences[:n].mean())
        sd, df = effective_sd(float(differences[:n].std(ddof=1)), n, tuning)
        row[f"covered_{n}"] = difference_p(mean, sd, n, df) > ALPHA
        for margin in MARGINS:
            row[f"false_{margin}_{n}"] = decide(mean, margin) == "different"
            row[f"equivalent_worse_{margin}_{n}"] = decide(mean + margin, margin) == "equivalent"
            row[f"equivalent_better_{margin}_{n}"] = decide(mean - margin, margin) == "equivalent"
    row["power_worse"] = decide(mean + 0.01, 0.005) == "different"
    row["power_better"] = decide(mean - 0.01, 0.005) == "different"
    return row


def simulate(cell: Cell, repetitions: int, searches: int = 3, block: int = 0) -> dict[str, float]:
    """The means over repetitions with the trials of so many searches; blocks are independent of each other."""
    numbers = [cell.k, SURFACES.index(cell.surface), round(10 * cell.correlation), cell.tuning_seeds]
    random = np.random.default_rng([*numbers, cell.start == "far", cell.optimum == "moving", block])
    config, total = TuneConfig(trials=searches * (4 * cell.k + 2)), Counter[str]()
    for _ in range(repetitions):
        counts, *outcome = tune_pair(cell, config, random)
        total.update(counts | outcomes(*outcome))
    return {name: float(value / repetitions) for name, value in total.items()}


def write(path: Path, repetitions: int) -> None:
    """Append a row for each block of a cell: a block of every cell, then the others, two tuning seeds first."""
    text = path.read_text() if path.exists() else ""
    made = {tuple(row[name] for name in IDENTITY) for row in csv.DictReader(text.splitlines())}
    jobs = [*product(range(repetitions // BLOCK), cells())]
    jobs.sort(key=lambda job: (job[0] > 0, job[0] > 0 and job[1].tuning_seeds == 1))
    with path.open("a", newline="") as file:
        for block, cell in jobs:
            identity = asdict(cell) | {"block": block}
            if tuple(map(str, identity.values())) in made:
                continue
            row = identity | {name: round(value, 6) for name, value in simulate(cell, BLOCK, block=block).items()}
            writer = csv.DictWriter(file, row)
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
            file.flush()


def table(path: Path) -> str:
    """For each number of tuning seeds, k and start: means over all cells, and in brackets the worst of them.

    False verdicts are those at the margin where they are more frequent, 0.005, and false equivalence that at 0.02.
    Power is of quadratic surfaces whose optimum is fixed, by correlation, and of the cell and sign where it is lowest.
    """
    names = [field.name for field in fields(Cell)]
    frame = pd.read_csv(path).groupby(names).mean().reset_index()
    lines = [
        "| tuning seeds | k | start | settings | false verdicts | false equivalence | coverage | power | lowest |",
        "| ---: | ---: | --- | ---: | --- | --- | --- | --- | ---: |",
    ]
    groups = dict([*frame.groupby(["tuning_seeds", "k", "start"])])
    for (seeds, k, start), cells in sorted(
        groups.items(), key=lambda item: (-item[0][0], item[0][1], item[0][2] == "far")
    ):
        false, equivalent = cells.filter(regex="^false_0.005"), cells.filter(regex="^equivalent_.*_0.02")
        covered, power = cells.filter(regex="^covered"), cells.filter(regex="^power").min(axis=1)
        plain = cells[(cells.surface == "quadratic") & (cells.optimum == "fixed")].sort_values("correlation").index
        rates = [f"{rate.stack().mean():.3f} ({rate.stack().max():.3f})" for rate in (false, equivalent)]
        rates.append(f"{covered.stack().mean():.3f} ({covered.stack().min():.3f})")
        by_correlation = ", ".join(f"{power[index]:.2f}" for index in plain)
        lines.append(
            f"| {seeds} | {k} | {start} | {cells.settings.mean():.0f} | {' | '.join(rates)} | {by_correlation} "
            f"| {power.min():.2f} |"
        )
    return "\n".join(lines)


def by_surface(path: Path) -> str:
    """The same for each surface and start, with two tuning seeds, over all numbers of hyperparameters."""
    frame = pd.read_csv(path).query("tuning_seeds == 2").groupby([field.name for field in fields(Cell)]).mean()
    lines = [
        "| surface | start | false verdicts | false equivalence | coverage | power |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for surface, start in product(SURFACES[:-1], ("near", "far")):
        cells = frame.xs((surface, start), level=("surface", "start"))
        rates = [
            f"{rate.stack().mean():.3f} ({getattr(rate.stack(), worst)():.3f})"
            for pattern, worst in (("^false_0.005", "max"), ("^equivalent_.*_0.02", "max"), ("^covered", "min"))
            for rate in [cells.filter(regex=pattern)]
        ]
        power = cells.filter(regex="^power").min(axis=1).mean()
        lines.append(f"| {surface.replace('_', ' ')} | {start} | {' | '.join(rates)} | {power:.2f} |")
    return "\n".join(lines)


def misses(path: Path) -> str:
    """The cells with two tuning seeds in which a rate of errors is above 0.1 or coverage is below 0.9."""
    names = [field.name for field in fields(Cell)]
    frame = pd.read_csv(path).groupby(names).mean().reset_index()
    frame["false"] = frame.filter(regex="^false_").max(axis=1)
    frame["equivalent"] = frame.filter(regex="^equivalent_").max(axis=1)
    frame["covered"] = frame.filter(regex="^covered_").min(axis=1)
    missed = (frame.false > 0.1) | (frame.equivalent > 0.1) | (frame.covered < 0.9)
    lines = [
        "| k | start | surface | correlation | optimum | false verdicts | false equivalence | coverage |",
        "| ---: | --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for cell in frame[missed & (frame.tuning_seeds == 2)].itertuples():
        lines.append(
            f"| {cell.k} | {cell.start} | {cell.surface} | {cell.correlation} | {cell.optimum} "
            f"| {cell.false:.3f} | {cell.equivalent:.3f} | {cell.covered:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = dict(argument.split("=", 1) for argument in arguments)
    if "table" in options:
        print(*(show(Path(options["table"])) for show in (table, misses, by_surface)), sep="\n\n")
    else:
        write(Path(options["csv"]), int(options.get("repetitions", 2000)))


if __name__ == "__main__":
    main(sys.argv[1:])
