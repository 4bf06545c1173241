"""The level of a test at each of several planned looks, so that all looks together keep ALPHA."""

import math
from functools import lru_cache

import numpy as np
from scipy import special

from lm.ablation.judge.power import ALPHA

DRAWS = 200_000


@lru_cache(100)
def level(looks: tuple[int, ...], comparisons: int = 1) -> float:
    """The nominal level, the same at each look (Pocock, 1977), of two-sided paired t tests at these numbers of seeds.

    If every p value, corrected by Holm's method for the number of comparisons, is compared with it at every look, a
    family without any true difference contains a false one at any look with a probability of at most ALPHA. So do two
    one-sided tests of equivalence. It is a quantile of the smallest p of all looks, in fixed draws of normal
    differences: levels of the normal distribution would give 5.3 to 6.0 % here, for t statistics of few seeds depend
    less on each other. Never below ALPHA / len(looks), which suffices whatever the distribution (Bonferroni).
    """
    if len(looks) < 2:
        return ALPHA
    found = float(np.quantile(smallest(looks), ALPHA / comparisons))
    return min(max(comparisons * found, ALPHA / len(looks)), ALPHA)


@lru_cache(10)
def smallest(looks: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The smallest p over the looks where there is no difference, in each of DRAWS samples."""
    draw, before = np.random.default_rng(0), 0
    total, squares, least = np.zeros(DRAWS), np.zeros(DRAWS), np.ones(DRAWS)  # of the differences, and their squares
    for n in looks:
        more = n - before
        mean = draw.standard_normal(DRAWS) / math.sqrt(more)
        about_mean = draw.chisquare(more - 1, DRAWS) if more > 1 else 0.0
        total, squares, before = total + more * mean, squares + more * mean**2 + about_mean, n
        error = np.sqrt((squares - total**2 / n) / (n - 1) / n)
        least = np.minimum(least, 2 * special.stdtr(n - 1, -np.abs(total / n) / error))
    return least
