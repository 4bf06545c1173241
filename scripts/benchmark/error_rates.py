"""How often verdicts are wrong, by simulation of the code that ships: the tables and the plot of docs/statistics.md.

    python scripts/benchmark/error_rates.py csv=FILE [repetitions=400]    tuned arms, half an hour on one core
    python scripts/benchmark/error_rates.py table=FILE [plot=FILE.svg]    the table of a CSV file
    python scripts/benchmark/error_rates.py real=DIR     seeds of a finished tuned ablation, drawn again and again
    python scripts/benchmark/error_rates.py looks    planned looks
    python scripts/benchmark/error_rates.py text    a validation text for each pair, and one for all

Two arms have losses of one shape over their learning rate, each around its own best. The truth is the difference of the
arms at their best, which is 0. The pilot, the ladder, the scores and the test are the code of an ablation.
"""

import csv
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are small

import numpy as np
import pandas as pd

from lm.lab.ablation.judge import ALPHA, paired_test
from lm.lab.ablation.results import read_results
from lm.lab.ablation.tuning import LADDER, LEAST, PILOT_SEEDS, lowest_point, near_lowest, pilot

SHAPES = ("quadratic", "lopsided", "cliff", "soft cliff", "spikes", "skewed noise")
HARD = ("tilted cliff", "plateau", "cusp", "second basin")
CURVATURE = 0.035  # nats per squared factor of two
SLOPE = 0.02  # nats per factor: of a cusp, and of the loss before a tilted cliff
SD = 0.01  # nats, of a run at one seed
MARGIN = 0.02
SEEDS = (3, 5, 8, 10)
STEEPNESS = 1.5 * math.log(2)  # of the lopsided shape: twice as high a factor above the best value as one below
Array = np.ndarray


@dataclass(frozen=True)
class Cell:
    shape: str
    ratio: int  # of the curvatures or slopes of the two arms
    apart: int  # factors between the best values of the arms
    start: str  # near: within a factor of the best of the baseline; far: 2.5 to 3.5 factors from it
    correlation: float  # of the losses of a pair
    alone: bool = False  # whether the arm alone is tuned, against runs at the best value of the baseline

    def loss(self, x: Array, ratio: int) -> Array:
        """Return the excess over the least loss, at x factors from the best value; infinite where training diverges."""
        c, slope = CURVATURE / ratio, SLOPE / ratio
        if self.shape == "lopsided":
            return c * 2 / STEEPNESS**2 * (np.expm1(STEEPNESS * x) - STEEPNESS * x)
        if self.shape == "cliff":
            return np.where(x > 0.6, np.inf, c * x**2)
        if self.shape == "soft cliff":
            return c * x**2 + (x > 0.4)
        if self.shape == "tilted cliff":
            return np.where(x > 0, np.inf, slope * np.abs(x))
        if self.shape == "plateau":
            return 4 * c * (1 - np.exp(-(x**2) / 4))
        if self.shape == "cusp":
            return slope * np.abs(x)
        if self.shape == "second basin":
            return np.minimum(c * x**2, 0.01 + c * (x + 4) ** 2)
        return c * x**2

    def runs(self, x: float, of_seeds: Array, ratio: int, random: np.random.Generator) -> Array:
        """Return the losses of a run at each seed. The seed gives a part of the noise, the rest is drawn anew."""
        own = random.standard_normal(len(of_seeds))
        if self.shape == "skewed noise":
            own = random.exponential(size=len(of_seeds)) - 1
        noise = SD * (math.sqrt(self.correlation) * of_seeds + math.sqrt(1 - self.correlation) * own)
        spikes = 0.05 * (random.random(len(of_seeds)) < 0.08) if self.shape == "spikes" else 0.0
        return self.loss(np.float64(x), ratio) + noise + spikes


def cells() -> Iterator[Cell]:
    for shape, ratio, apart, start, correlation in product(
        (*SHAPES, *HARD), (1, 4), (0, 1, 3), ("near", "far"), (0.0, 0.5, 0.9)
    ):
        yield Cell(shape, ratio, apart, start, correlation)
    for shape in SHAPES:
        yield Cell(shape, 1, 0, "near", 0.5, alone=True)


def ladder(cell: Cell, best: float, of_seeds: Array, ratio: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Return the factors of an arm's ladder (in powers of two) and the losses there, (seeds, factors)."""
    made = dict[int, Array]()  # by rung, of the pilot's seeds

    def loss(rung: int) -> float:
        if rung not in made:
            made[rung] = cell.runs(rung / 2 - best, of_seeds[:PILOT_SEEDS], ratio, random)
        return float(made[rung].mean())

    middle, _ = pilot(loss)
    rungs = [(middle or 0) + rung for rung in LADDER]
    losses = []
    for rung in rungs:
        first = made.get(rung, cell.runs(rung / 2 - best, of_seeds[:PILOT_SEEDS], ratio, random))
        rest = cell.runs(rung / 2 - best, of_seeds[PILOT_SEEDS:], ratio, random)
        losses.append(np.concatenate([first, rest]))
    return np.array(rungs) / 2, np.array(losses).T


def scores(x: Array, losses: Array) -> tuple[Array, float]:
    """Return the scores (seeds,) of an arm as `climb` gives them, and what the arm may still gain."""
    kept = np.isfinite(losses).all(axis=0)
    x, losses = x[kept], losses[:, kept]
    near = near_lowest(losses)
    if near.sum() < LEAST:  # undecided
        return np.full(len(losses), np.inf), 0.0
    point = lowest_point(x[near], losses[:, near].mean(axis=0))
    return losses[:, near] @ point.weights, point.gain


def outcomes(cell: Cell, random: np.random.Generator) -> dict[str, float]:
    """Return what is decided with each number of seeds: of equal arms, and of arms that differ."""
    near = random.uniform(-1, 1)
    start = near if cell.start == "near" else random.choice([-1, 1]) * random.uniform(2.5, 3.5)
    of_seeds = random.standard_normal(max(SEEDS))
    arm = ladder(cell, start + cell.apart, of_seeds, cell.ratio, random)
    base = None if cell.alone else ladder(cell, start, of_seeds, 1, random)
    fixed = cell.runs(0.0, of_seeds, 1, random)
    row = {}
    for n in SEEDS:
        first, down = scores(arm[0], arm[1][:n])
        second, up = scores(base[0], base[1][:n]) if base else (fixed[:n], 0.0)
        differences = first - second
        if not np.isfinite(differences).all():
            row |= {f"false_{n}": 0, f"covered_{n}": 1, f"alike_{n}": 0}
            row |= {f"equivalent_{side}_{n}": 0 for side in ("worse", "better")}
            row |= {f"power{size}_{n}": 0 for size in (1, 2, 4)}
            continue
        test = paired_test([*differences], MARGIN, down, up)
        row[f"false_{n}"] = (test.p or 1) <= ALPHA
        row[f"covered_{n}"] = test.low <= 0 <= test.high
        row[f"alike_{n}"] = (test.p_equivalent or 1) <= ALPHA
        for side, sign in (("worse", 1), ("better", -1)):
            test = paired_test([*(differences + sign * MARGIN)], MARGIN, down, up)
            row[f"equivalent_{side}_{n}"] = (test.p_equivalent or 1) <= ALPHA
        for size in (1, 2, 4):
            found = [paired_test([*(differences + sign * size * SD)], None, down, up) for sign in (1, -1)]
            row[f"power{size}_{n}"] = sum((test.p or 1) <= ALPHA for test in found) / 2
    return {name: float(value) for name, value in row.items()}


def simulate(cell: Cell, repetitions: int) -> dict[str, float]:
    """Return the mean outcomes."""
    seed = [*(repr(value).encode().hex() for value in asdict(cell).values())]
    random = np.random.default_rng(int("".join(seed), 16) % 2**63)
    total = Counter[str]()
    for _ in range(repetitions):
        total.update(outcomes(cell, random))
    return {name: value / repetitions for name, value in total.items()}


def write(path: Path, repetitions: int) -> None:
    """Append a row for each cell that the file does not have."""
    names = [field.name for field in fields(Cell)]
    text = path.read_text() if path.exists() else ""
    made = {tuple(row[name] for name in names) for row in csv.DictReader(text.splitlines())}
    with path.open("a", newline="") as file:
        for cell in cells():
            identity = asdict(cell)
            if tuple(map(str, identity.values())) in made:
                continue
            row = identity | {name: round(value, 5) for name, value in simulate(cell, repetitions).items()}
            writer = csv.DictWriter(file, row)
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
            file.flush()


def table(path: Path) -> str:
    """Return by shape the means over all cells and numbers of seeds, in brackets the worst cell, and the power."""
    frame = pd.read_csv(path)
    lines = [
        "| shape | false verdicts | false equivalence | coverage | power, 5 seeds: 1, 2, 4 sd | alike |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    groups = [(shape, frame[(frame["shape"] == shape) & ~frame["alone"]]) for shape in (*SHAPES, *HARD)]
    groups.append(("one arm tuned alone", frame[frame["alone"]]))
    for shape, own in groups:
        rates = []
        for pattern, worst in (("^false_", "max"), ("^equivalent_", "max"), ("^covered_", "min")):
            values = own.filter(regex=pattern).stack()
            rates.append(f"{values.mean():.3f} ({getattr(values, worst)():.3f})")
        power = ", ".join(f"{own[f'power{size}_5'].mean():.2f}" for size in (1, 2, 4))
        lines.append(f"| {shape} | {' | '.join(rates)} | {power} | {own['alike_5'].mean():.2f} |")
    misses = frame.assign(false=frame.filter(regex="^false_").max(axis=1)).query("false > 0.09 and not alone")
    lines += ["", "| shape | curvatures | optima apart | starts | worst |", "| --- | ---: | ---: | --- | ---: |"]
    for (shape, ratio, apart), own in misses.groupby(["shape", "ratio", "apart"], sort=False):
        starts = " and ".join(own["start"].unique())
        lines.append(f"| {shape} | {ratio}x | {apart} | {starts} | {own['false'].max():.2f} |")
    return "\n".join(lines)


def plot(path: Path, image: Path) -> None:
    """Draw the false verdicts of every cell by shape: the mean over the numbers of seeds."""
    from matplotlib.figure import Figure

    frame = pd.read_csv(path)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    shapes = [*SHAPES, *HARD]
    for y, shape in enumerate(shapes):
        own = frame[(frame["shape"] == shape) & ~frame["alone"]]
        for ratio, color in ((1, "#0072B2"), (4, "#D55E00")):
            values = own[own["ratio"] == ratio].filter(regex="^false_").mean(axis=1).to_numpy()
            axes.plot(values, np.full(len(values), y + (ratio - 2) / 12), ".", color=color, alpha=0.4, ms=4)
    axes.axvline(0.05, color="black", lw=1)
    axes.set(yticks=range(len(shapes)), yticklabels=shapes, xlabel="share of false verdicts on equal arms (5 % wanted)")
    axes.plot([], [], ".", color="#0072B2", label="equal curvatures")
    axes.plot([], [], ".", color="#D55E00", label="curvatures 4x apart")
    axes.legend(frameon=False)
    axes.invert_yaxis()
    figure.savefig(image, metadata={"Date": None})


def real(folder: Path, repetitions: int = 4000) -> str:
    """Return how often an arm gets a verdict against itself, by curves of real runs.

    Each time two groups of seeds of one tuned arm are drawn, without a seed in both. The loss of a seed is taken minus
    the mean of the seed over the arms, because pairs of an ablation share the text of their seed.
    """
    losses = {arm: table for arm, ladder in read_results(folder).ladders.items() if len(table := ladder.losses) >= 6}
    if not losses:
        sys.exit(
            f"real={folder}: expected a tuned ablation of six seeds or more, of which two groups of three are drawn"
        )
    of_seeds = pd.concat([table.mean(axis=1) for table in losses.values()], axis=1).mean(axis=1)
    lines = ["| arm | best factor | sd of a run | seeds | false verdicts | coverage |"]
    lines += ["| --- | ---: | ---: | ---: | --- | --- |"]
    for arm, table in losses.items():
        random = np.random.default_rng(0)
        curves, x = table.sub(of_seeds, axis=0).dropna().to_numpy(), np.log2(table.columns.to_numpy(float))
        best, sd = 2 ** lowest_point(x, curves.mean(axis=0)).best, float(curves.std(axis=0, ddof=1).mean())
        for n in (n for n in SEEDS if 2 * n <= len(curves)):
            wrong, covered = 0, 0
            for _ in range(repetitions):
                chosen = random.permutation(len(curves))[: 2 * n]
                (first, down), (second, up) = scores(x, curves[chosen[:n]]), scores(x, curves[chosen[n:]])
                test = paired_test([*(first - second)], None, down, up)
                wrong += (test.p or 1) <= ALPHA
                covered += test.low <= 0 <= test.high
            rates = f"{wrong / repetitions:.3f} | {covered / repetitions:.3f}"
            lines.append(f"| {arm} | {best:.2f} | {sd:.4f} | {n} | {rates} |")
    return "\n".join(lines)


def looks(repetitions: int = 4000) -> str:
    """Return for plans of looks how often equal arms get a verdict at any look, and the power beside one look."""
    lines = ["| looks | level | false verdicts | false equivalence | power | of one look |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for plan in ((5, 8, 12), (3, 5, 8), (5, 10), (4, 8, 12)):
        random = np.random.default_rng([*plan])
        values, alpha = random.standard_normal((repetitions, plan[-1])), ALPHA / len(plan)

        def any_look(
            shift: float,
            margin: float,
            key: str,
            plan: tuple[int, ...] = plan,
            level: float = alpha,
            values: Array = values,
        ) -> float:
            tests = ([paired_test([*(row[:n] + shift)], margin, alpha=level) for n in plan] for row in values)
            return float(np.mean([any((getattr(test, key) or 0) <= level for test in own) for own in tests]))

        numbers = [any_look(0.0, 0.5, "p"), any_look(3.0, 3.0, "p_equivalent"), any_look(1.0, 0.5, "p")]
        once = any_look(1.0, 0.5, "p", plan[-1:], ALPHA)
        rates = " | ".join(f"{rate:.3f}" for rate in numbers[:2])
        lines.append(f"| {', '.join(map(str, plan))} | {alpha:.4f} | {rates} | {numbers[2]:.2f} | {once:.2f} |")
    return "\n".join(lines)


def text(repetitions: int = 4000) -> str:
    """Return the coverage of the interval for the difference on any text of this kind.

    A token's paired difference has a standard deviation of 0.5 nats, in blocks of 64 with a design effect of 1.3; a
    share of the variance of a block is common to all seeds. The seeds of a difference vary by 0.0106 nats.
    """
    lines = ["| text | seeds | common | one text for all pairs | a text for each pair |"]
    lines += ["| --- | ---: | ---: | --- | --- |"]
    for (name, tokens), seeds, common in product((("30 kB", 1000), ("1 MB", 33_000)), (5, 8), (0.5, 0.9)):
        random, blocks = np.random.default_rng([tokens, seeds, round(10 * common)]), tokens // 64
        sd = math.sqrt(0.25 * 1.3 / 64 / blocks)  # of the mean over a validation text
        cells = []
        for is_own in (False, True):
            covered, widths = 0, 0.0
            for _ in range(repetitions):
                shared = random.standard_normal(seeds if is_own else 1)
                of_text = sd * (math.sqrt(common) * shared + math.sqrt(1 - common) * random.standard_normal(seeds))
                test = paired_test([*(0.0106 * random.standard_normal(seeds) + of_text)], None)
                covered += test.low <= 0 <= test.high
                widths += (test.high - test.low) / 2
            cells.append(f"{covered / repetitions:.2f} (±{widths / repetitions:.3f})")
        lines.append(f"| {name} | {seeds} | {common} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = dict(argument.partition("=")[::2] for argument in arguments)
    if "table" in options:
        print(table(Path(options["table"])))
        if "plot" in options:
            plot(Path(options["table"]), Path(options["plot"]))
    elif "real" in options:
        print(real(Path(options["real"])))
    elif "csv" in options:
        write(Path(options["csv"]), int(options.get("repetitions", 400)))
    else:
        for name, made in (("looks", looks), ("text", text)):
            if name in options:
                print(made())


if __name__ == "__main__":
    main(sys.argv[1:])
