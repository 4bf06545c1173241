"""How likely a number of seeds is to decide, and the error of a mean that also counts the tuning: pure functions."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

ALPHA = 0.05
POWER = 0.8
MOST_SEEDS = 100


@dataclass(slots=True, frozen=True)
class Tuning:
    """What is uncertain about the best settings of two arms, as part of their difference: more seeds do not help."""

    variance: float  # in squared units of the metric
    df: int  # of the estimate of this variance


def welch(*parts: tuple[float, float]) -> tuple[float, float]:
    """The variance of a sum of independent parts, each with its df, and its df (Satterthwaite, 1946; Welch, 1947)."""
    total = sum(variance for variance, _ in parts)
    return total, total**2 / sum(variance**2 / df for variance, df in parts)


def with_tuning(sd: float, n: int, tuning: Tuning | None) -> tuple[float, float]:
    """The standard deviation of a difference that n seeds would need for the whole error of their mean, and its df.

    Without tuning these are `sd` and n - 1. With it, the error of the mean has a part that more seeds do not reduce.
    """
    if tuning is None or not tuning.variance:
        return sd, n - 1
    variance, df = welch((sd**2 / n, n - 1), (tuning.variance, tuning.df))
    return math.sqrt(n * variance), df


@lru_cache(10_000)
def critical(quantile: float, df: float) -> float:
    return float(stats.t.ppf(quantile, df))


@lru_cache(1000)
def spreads(df: float, count: int = 1000) -> NDArray[np.float64]:
    """`count` equally likely quantiles of a sample standard deviation of draws from N(0, 1)."""
    middles = (np.arange(count) + 0.5) / count
    return np.sqrt(stats.chi2.ppf(middles, df) / df)


def chance(effect: float, n: int, alpha: float = ALPHA, margin: float = 0.0, df: float | None = None) -> float:
    """The probability that n seeds decide: by the two-sided paired t test, or by equivalence within +-margin.

    Effect and margin are in standard deviations of a difference; margin 0 gives the power of the t test alone. The
    mean and the standard deviation of a sample are independent, so given the latter this is a normal probability; it
    is averaged over the latter (to 1e-4). scipy's noncentral t, the usual way, returns nan far from its centre.
    """
    df = df or n - 1
    limit, shift = critical(1 - alpha / 2, df) * spreads(df), effect * math.sqrt(n)
    room = margin * math.sqrt(n) - critical(1 - alpha, df) * spreads(df)
    different = special.ndtr(shift - limit) + special.ndtr(-limit - shift)
    equivalent = np.where(room > 0, special.ndtr(room - shift) - special.ndtr(-room - shift), 0.0)
    return float(np.mean(np.where(room < limit, different + equivalent, 1.0)))


@lru_cache(1000)
def detectable(n: int, alpha: float, power: float, df: float) -> float:
    surely = (critical(1 - alpha / 2, df) * spreads(df)[-1] + 10) / math.sqrt(n)  # beyond every limit
    return float(optimize.brentq(lambda effect: chance(effect, n, alpha, 0.0, df) - power, 0.0, surely))


def minimum_detectable_effect(
    sd: float, n: int, alpha: float = ALPHA, power: float = POWER, tuning: Tuning | None = None
) -> float | None:
    """The effect, in the unit of `sd`, that a two-sided paired t test at n seeds finds with this power.

    `sd` is that of a difference. None for n below two.

    >>> minimum_detectable_effect(sd=0.01, n=5)  # doctest: +ELLIPSIS
    0.0168...
    """
    if n < 2:
        return None
    whole, df = with_tuning(sd, n, tuning)
    return whole * detectable(n, alpha, power, df)


def seeds_to_decide(
    mean: float, sd: float, margin: float, comparisons: int = 1, tuning: Tuning | None = None
) -> int | None:
    """The fewest seeds, 2 to 100, that would give a verdict with a probability of 80 %; None if more.

    Supposes that the truth is the observed mean and standard deviation, and counts either verdict, a difference or
    equivalence, at ALPHA / comparisons: never fewer than Holm's method needs. The probability is that of `chance`.
    """

    def decided(n: int) -> bool:
        whole, df = with_tuning(sd, n, tuning)
        return chance(mean / whole, n, ALPHA / comparisons, margin / whole, df) >= POWER

    if with_tuning(sd, 2, tuning)[0] == 0:
        return 2
    sizes = range(2, MOST_SEEDS + 1)
    i = bisect_left(sizes, True, key=decided)
    return sizes[i] if i < len(sizes) else None
