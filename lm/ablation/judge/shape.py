"""What the t test takes for granted: the shape of the differences, and a test that asks less of it."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FEWEST = 6  # with five differences no sign-flip p is below 1/16
EXACT = 16  # differences of which all patterns of signs are tried
DRAWN = 10_000  # patterns of more differences
BITS = 1 << np.arange(EXACT)
TINY = 1e-9  # relative: sums of the same numbers in another order may differ by as much


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """The two-sided p of the sign-flip test of the mean; None for fewer than six differences.

    If the arms are the same, the sign of each difference is a fair coin whatever its size is, so the share of the
    patterns of signs that give a mean as far from zero as the observed one is a p value, for noise of any shape
    (Fisher, 1935). All patterns are tried up to 16 differences, above that 10,000 random ones, always the same.
    """
    n = len(differences)
    if n < FEWEST:
        return None
    values = np.array(differences)
    means = np.abs(signs(n) @ values)
    least = abs(values.sum()) - TINY * np.abs(values).sum()
    reached = int((means >= least).sum())
    return reached / len(means) if n <= EXACT else (reached + 1) / (len(means) + 1)


@lru_cache(maxsize=1)  # each number of seeds asks for the same ones several times
def signs(n: int) -> NDArray[np.int8]:
    """(patterns, n) of 1 and -1."""
    if n > EXACT:
        return np.random.default_rng(n).choice(np.array([-1, 1], np.int8), (DRAWN, n))
    return np.where(np.arange(1 << n)[:, None] & BITS[:n], np.int8(1), np.int8(-1))


def normality_p(differences: Sequence[float]) -> float:
    """The p of the test of a normal distribution that finds skew and spikes best (Shapiro and Wilk, 1965).

    1 for fewer than three differences, or if all are equal.
    """
    if len(differences) < 3 or np.ptp(differences) == 0:
        return 1.0
    return float(stats.shapiro(differences).pvalue)
