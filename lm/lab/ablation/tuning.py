"""The ladder: every arm is scored at its own best value of one setting, and the interval counts the search.

A *rung* is half a factor of two: rung 2 doubles the value of the arm's configuration, rung -1 divides it by 1.41. The
pilot finds the middle of an arm's ladder on the first two seeds. Then five rungs around the middle are trained at every
seed. A least-squares cubic through the five means has its lowest point at some factor, and the score of a seed is the
value at this factor of the same cubic through the losses of the seed: a sum with fixed weights. To first order the
choice of the factor adds nothing to the scores, because the curve is flat at its lowest point. So a paired t interval
over the seeds holds, and no score depends on another arm (docs/statistics.md has the simulated error rates).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial
from scipy import special

LADDER = (-2, -1, 0, 1, 2)  # rungs around the middle
AROUND = (0, -2, 2)  # rungs that the pilot compares
PILOT_SEEDS = 2
MOST_QUARTERS = 3  # times that a value at which training diverges is divided by four
MOST_MOVES = 9  # of the middle, by a factor of two each
LEAST = 3  # values that a curve needs
FAR = 0.5  # nats per token above the lowest mean: a value beyond is no longer part of the valley
LOST = ("diverged", "failed")


def factor(rung: int) -> float:
    """Return the factor of a rung, rounded so that every machine gives a run the same name.

    >>> [factor(rung) for rung in (-4, -1, 0, 1, 2)]
    [0.25, 0.707107, 1.0, 1.41421, 2.0]
    """
    return float(f"{2 ** (rung / 2):.6g}")


def pilot(loss: Callable[[int], float | None]) -> tuple[int | None, list[int]]:
    """Return the middle rung of an arm's ladder, or None and the rungs that are to be trained first.

    `loss` gives the mean loss at a rung: infinite if training diverged, None if it has not been trained.
    """
    middle = 0
    for _ in range(MOST_QUARTERS):
        if loss(middle) == math.inf:
            middle -= 4
    for _ in range(MOST_MOVES):
        around = {middle + rung: loss(middle + rung) for rung in AROUND}
        if unknown := [rung for rung, value in around.items() if value is None]:
            return None, unknown
        lowest = min(around, key=lambda rung: around[rung] or 0.0)
        if lowest == middle:
            break
        middle = lowest
    return middle, []


@dataclass(slots=True, frozen=True, eq=False)
class Ladder:
    """The losses of an arm over the factors of its tuned setting, and its scores at the best factor."""

    losses: pd.DataFrame  # seeds by factors, of the factors that count; lower is better
    dropped: list[float] = field(default_factory=list)  # factors that diverged, failed or lie FAR above the lowest
    best: float | None = None  # factor at the lowest point of the curve; None: too few factors train at every seed
    scores: dict[int, float] = field(default_factory=dict)  # by seed, at the best factor
    gain: float = 0.0  # the slope at an end of the ladder over one factor of two, if the best factor is that end
    end: str = ""  # the end that the best factor is: "lower" or "upper"
    p_equal: float | None = None  # of the F test that the factors make no difference

    @property
    def n_tried(self) -> int:
        return len(self.losses.columns) + len(self.dropped)


def climb(rows: pd.DataFrame) -> Ladder:
    """Return the ladder of an arm from its runs: columns seed, factor, status, loss and val_loss.

    `loss` is the metric, lower where better; `val_loss` says which factors are too far from the lowest. A seed counts
    if it has finished at every factor that counts.
    """
    lost = {*rows["factor"][rows["status"].isin(LOST)]}
    done = rows[(rows["status"] == "done") & ~rows["factor"].isin(lost)]
    tried = sorted({*rows["factor"]} - lost)
    tables = (done.pivot(index="seed", columns="factor", values=key) for key in ("val_loss", "loss"))
    val_losses, losses = (table.astype(float).reindex(columns=tried).dropna() for table in tables)
    losses = losses.loc[:, near_lowest(val_losses.to_numpy())]
    kept = [float(factor) for factor in losses.columns]
    lost |= {*tried} - {*kept}
    if len(kept) < LEAST or losses.empty:
        return Ladder(losses, sorted(lost))
    point = lowest_point(np.log2(kept), losses.mean().to_numpy())
    scores = {int(seed): float(score) for seed, score in (losses @ point.weights).items()}
    p_equal = _p_equal(losses.to_numpy())
    return Ladder(losses, sorted(lost), float(2**point.best), scores, point.gain, point.end, p_equal)


def near_lowest(val_losses: np.ndarray) -> np.ndarray:
    """Return which factors (factors,) have a mean over the seeds (seeds, factors) not FAR above the lowest."""
    if not len(val_losses):
        return np.ones(val_losses.shape[1], bool)
    means = val_losses.mean(axis=0)
    return np.asarray(means <= means.min(initial=math.inf) + FAR)


class LowestPoint(NamedTuple):
    best: float  # in factors of two
    weights: np.ndarray  # (factors,): the curve's value at `best` as a sum of losses; the weights sum to 1
    gain: float
    end: str


def lowest_point(x: np.ndarray, mean: np.ndarray) -> LowestPoint:
    """Return where the curve through the mean losses (factors,) is lowest; `x` has the factors as powers of two.

    The curve is a least-squares cubic through five means, or a parabola through three or four.
    """
    degree = 3 if len(x) == len(LADDER) else 2
    powers = np.vander(x, degree + 1, increasing=True)
    curve = Polynomial(np.linalg.lstsq(powers, mean)[0])
    slopes = curve.deriv()
    roots = slopes.trim(1e-9).roots()  # a leading coefficient of rounding size would spoil the other root
    turns = [float(root.real) for root in roots if root.imag == 0 and x[0] < root.real < x[-1]]
    best = min((float(x[0]), float(x[-1]), *turns), key=lambda at: float(curve(at)))
    weights = np.linalg.lstsq(powers.T, best ** np.arange(degree + 1))[0]
    slope = float(slopes(best))
    end = "lower" if best == x[0] else "upper" if best == x[-1] else ""
    gain = {"lower": slope, "upper": -slope}.get(end, 0.0)
    return LowestPoint(best, weights, max(gain, 0.0), end)


def _p_equal(losses: np.ndarray) -> float | None:
    """Return the p of the F test that columns (factors) do not differ, in rows (seeds) as blocks."""
    n_seeds, n_factors = losses.shape
    if min(n_seeds, n_factors) < 2:
        return None
    of_factors = losses - losses.mean(axis=1, keepdims=True)
    rest = of_factors - of_factors.mean(axis=0)
    df = (n_factors - 1, (n_factors - 1) * (n_seeds - 1))
    between, within = n_seeds * (of_factors.mean(axis=0) ** 2).sum() / df[0], (rest**2).sum() / df[1]
    if within > 0:
        return float(special.fdtrc(*df, between / within))
    return 0.0 if between > 0 else 1.0  # a setting without an effect leaves the losses as they are
