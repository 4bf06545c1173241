"""How many seeds would give a verdict: a range, because neither the true difference nor its spread is known."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lm.ablation.judge.power import ALPHA, POWER, Tuning, chance, spreads, with_tuning

Array = NDArray[np.float64]
MOST_SEEDS = 100
RANGE = (0.1, 0.9)  # quantiles of the number of seeds
POINTS = 10  # of the standard deviation, and for each as many of the mean
COUNT = 40  # quantiles that a probability is averaged over: enough for whole numbers of seeds


class Advice(NamedTuple):
    """Numbers of new seeds that a range of 80 % lies between; None: above 100."""

    fewest: int | None
    most: int | None


def advise(mean: float, sd: float, n: int, margin: float, alpha: float = ALPHA, tuning: Tuning | None = None) -> Advice:
    """How many new seeds would give a verdict after n seeds did not; at least one more than these.

    Truths that the mean and the standard deviation of n differences leave open (their posterior with the prior
    1 / variance: a normal mean given a scaled inverse chi-squared variance; Box and Tiao, 1973), on a grid of equally
    likely points, need a number of seeds each.
    """
    deviations, shifts = truths(n)
    found = seeds_to_decide(mean + shifts * sd, deviations * sd, margin, alpha, tuning)
    ends = np.quantile(found, RANGE, method="inverted_cdf")
    return Advice(*(max(int(end), n + 1) if end <= MOST_SEEDS else None for end in ends))


@lru_cache(1000)
def truths(n: int) -> tuple[Array, Array]:
    """Standard deviations, and distances of the mean from the observed one, in observed standard deviations."""
    middles = (np.arange(POINTS) + 0.5) / POINTS
    deviations = np.repeat(1 / spreads(n - 1, POINTS), POINTS)
    return deviations, deviations * np.tile(special.ndtri(middles), POINTS) / math.sqrt(n)


def seeds_to_decide(
    mean: float | Array, sd: float | Array, margin: float, alpha: float = ALPHA, tuning: Tuning | None = None
) -> Array:
    """The fewest seeds, 2 to 100, that would give a verdict with a probability of 80 %; infinity if more.

    `mean` and `sd` are the truth about a difference, and arrays of one shape if there are many. Counts either verdict,
    a difference or equivalence, at the level `alpha`; that of a family divided by its size is never more than Holm's
    method allows.
    """
    means, sds = np.broadcast_arrays(np.asarray(mean, float), np.asarray(sd, float))

    def enough(n: Array) -> NDArray[np.bool_]:
        whole, df = with_tuning(sds, n, tuning)
        certain = whole == 0
        safe = np.where(certain, 1.0, whole)
        return certain | (chance(means / safe, n, alpha, margin / safe, np.maximum(np.rint(df), 1), COUNT) >= POWER)

    few, many = np.full(means.shape, 1.0), np.full(means.shape, MOST_SEEDS + 1.0)  # not enough; enough
    while np.any(many - few > 1):
        middle = np.clip((few + many) // 2, 2, MOST_SEEDS)
        decides = enough(middle)
        few, many = np.where(decides, few, np.maximum(few, middle)), np.where(decides, np.minimum(many, middle), many)
    return np.where(many > MOST_SEEDS, math.inf, many)
