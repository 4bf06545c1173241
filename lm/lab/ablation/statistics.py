"""From paired differences to a verdict, and the power of its tests: pure functions.

A difference is an arm's metric minus its baseline's at the same seed. Paired by seed, the arms share their data order
and all of their initialisation that they can, so what the seed adds to both drops out. The standard error of a mean
also counts the tuning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

ALPHA = 0.05
POWER = 0.8
SAME = 1e-5  # relative, of differences that are equal but for rounding, of numbers in single precision too
MIN_EQUAL = 6  # of two equal arms whose values differ by +1 or -1, so many differences are equal in 3 % of cases
ROUNDING = 1e-12  # of the values: what a difference may have by rounding alone
N_QUANTILES = 1000  # of a sample standard deviation, over which power is averaged: to 1e-4
Array = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class TuningVariance:
    """Variance of a difference because the arms' hyperparameters may not be their best. More seeds do not reduce it."""

    variance: float  # in squared units of the metric
    df: int  # degrees of freedom of its estimate


def effective_sd(sd: Any, n: Any, tuning: TuningVariance | None) -> tuple[Any, Any]:
    """The value for which sd / sqrt(n) is the total standard error (seeds and tuning), and its degrees of freedom.

    Without tuning these are `sd` and n - 1. `sd` and `n` are numbers, or arrays of one shape. The variances of both
    parts are added; the degrees of freedom of their sum are those of Satterthwaite (1946) and Welch (1947).
    """
    if tuning is None or not tuning.variance:
        return sd, n - 1
    of_seeds, variance = sd**2 / n, sd**2 / n + tuning.variance
    return np.sqrt(n * variance), variance**2 / (of_seeds**2 / (n - 1) + tuning.variance**2 / tuning.df)


@lru_cache(1000)
def _sd_quantiles(df: float) -> Array:
    """Equally likely quantiles of a sample standard deviation of draws from N(0, 1)."""
    midpoints = (np.arange(N_QUANTILES) + 0.5) / N_QUANTILES
    return np.sqrt(stats.chi2.ppf(midpoints, df) / df)


def power(effect: float, n: int, alpha: float = ALPHA, df: float | None = None) -> float:
    """The probability that the two-sided paired t test of n seeds finds an effect.

    `effect` is in standard deviations of a difference. The mean and the standard deviation of a sample are independent,
    so given the latter this is a normal probability, which is averaged over the latter. `scipy.stats.nct` is not used:
    it returns nan for large noncentrality with few degrees of freedom.
    """
    df = n - 1 if df is None else df
    limit, shift = special.stdtrit(df, 1 - alpha / 2) * _sd_quantiles(df), effect * math.sqrt(n)
    return float(np.mean(special.ndtr(shift - limit) + special.ndtr(-limit - shift)))


@lru_cache(1000)
def standardized_mde(n: int, alpha: float, df: float) -> float:
    """The minimum detectable effect in standard deviations of a difference."""
    upper = (special.stdtrit(df, 1 - alpha / 2) * _sd_quantiles(df)[-1] + 10) / math.sqrt(n)  # detected for certain
    return float(optimize.brentq(lambda effect: power(effect, n, alpha, df) - POWER, 0.0, upper))


def minimum_detectable_effect(sd: float, n: int, alpha: float = ALPHA, tuning: TuningVariance | None = None) -> float:
    """The effect, in the unit of `sd`, that a two-sided paired t test at n seeds finds with a probability of POWER.

    `sd` is that of a difference.

    >>> minimum_detectable_effect(sd=0.01, n=5)  # doctest: +ELLIPSIS
    0.0168...
    """
    total, df = effective_sd(sd, n, tuning)
    return float(total * standardized_mde(n, alpha, df))


@dataclass
class Comparison:
    """What paired differences say, in the metric's unit. Everything that needs two seeds is None with fewer."""

    n_seeds: int = 0
    mean_difference: float | None = None
    wins: int = 0  # seeds on which the arm is better
    sd: float | None = None
    tuning_sd: float = 0.0  # of the mean, because each arm's settings may not be its best
    df: float | None = None  # of the interval and the tests
    ci_low: float | None = None  # of the interval, not corrected for the number of comparisons
    ci_high: float | None = None
    p: float | None = None  # of a difference
    p_equivalent: float | None = None
    p_adjusted: float | None = None  # for the number of comparisons in the family
    p_equivalent_adjusted: float | None = None
    minimum_detectable: float | None = None  # at the level of the tests divided by the number of comparisons
    alpha: float = ALPHA  # level of the tests; 1 - alpha is that of the interval
    verdict: str = "undecided"  # better, worse, equivalent, undecided
    limited_by: str | None = None  # where undecided, what makes the interval wide: "seeds" or "tuning"


def interval(
    values: Sequence[float], level: float = 0.95, tuning: TuningVariance | None = None
) -> tuple[float, float] | None:
    """The t interval of the mean, in the unit of the values (Student, 1908); None for fewer than two values."""
    if len(values) < 2:
        return None
    sd, df = effective_sd(stdev(values), len(values), tuning)
    mean, half = fmean(values), float(special.stdtrit(df, (1 + level) / 2)) * (sd / math.sqrt(len(values)))
    return mean - half, mean + half


def difference_p(mean: float, sd: float, n: int, df: float) -> float:
    """The two-sided p of the paired t test."""
    return 2 * float(special.stdtr(df, -abs(mean) * math.sqrt(n) / sd)) if sd else float(mean == 0)


def equivalence_p(mean: float, sd: float, n: int, df: float, margin: float) -> float:
    """The larger p of the two one-sided tests that the true difference is within +-margin (Schuirmann, 1987)."""
    return float(special.stdtr(df, (abs(mean) - margin) * math.sqrt(n) / sd)) if sd else float(abs(mean) >= margin)


def holm(ps: Sequence[float]) -> list[float]:
    """p values adjusted for their number, in the order given (Holm, 1979).

    >>> holm([0.02, 0.01, 0.5])
    [0.04, 0.03, 0.5]
    """
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def judge_family(
    family: Mapping[str, Sequence[float]],
    margin: float,
    lower_is_better: bool = True,
    tunings: Mapping[str, TuningVariance] = MappingProxyType({}),
    alpha: float = ALPHA,
) -> dict[str, Comparison]:
    """A verdict on each comparison of a family from its paired differences, corrected for their number (Holm).

    `margin`, in the metric's unit, is the equivalence margin: the smallest difference that would change a decision.
    equivalent: the true difference is shown to be smaller than the margin, be it zero or not. better, worse: the
    two-sided test rejects. Else undecided, as with fewer than two seeds; such comparisons do not count in the
    correction. docs/ablations.md says which error rates this holds.

    `tunings`: for comparisons of tuned arms, the variance that their hyperparameters add. The minimum detectable
    effect is at the level `alpha` divided by the number of tests, which is never more than Holm's method allows.
    """
    comparisons = {
        name: _compare(values, margin, lower_is_better, tunings.get(name), alpha) for name, values in family.items()
    }
    different = {name: tested.p for name, tested in comparisons.items() if tested.p is not None}
    equivalent = [tested.p_equivalent for tested in comparisons.values() if tested.p_equivalent is not None]
    for name, p, p_equivalent in zip(different, holm([*different.values()]), holm(equivalent), strict=True):
        tested, tuning = comparisons[name], tunings.get(name)
        tested.p_adjusted, tested.p_equivalent_adjusted = p, p_equivalent
        if p_equivalent <= alpha:
            tested.verdict = "equivalent"
        elif p <= alpha:
            tested.verdict = "better" if ((tested.mean_difference or 0.0) < 0) == lower_is_better else "worse"
        if (sd := tested.sd) is not None:
            n, level = tested.n_seeds, alpha / len(different)
            if not are_equal(sd, tested.mean_difference or 0.0):  # which say nothing of what would be detected
                tested.minimum_detectable = minimum_detectable_effect(sd, n, level, tuning)
            if tested.verdict == "undecided":
                tested.limited_by = "tuning" if tested.tuning_sd > sd / math.sqrt(n) else "seeds"
    return comparisons


def are_equal(sd: float, mean: float) -> bool:
    """Whether differences of this spread and mean are equal but for rounding."""
    return sd <= SAME * abs(mean)


def _compare(
    values: Sequence[float], margin: float, lower_is_better: bool, tuning: TuningVariance | None, alpha: float
) -> Comparison:
    """A comparison by itself, before the correction for the others of its family: no verdict yet.

    Fewer than MIN_EQUAL equal differences are no test: coarse values, such as counts of right answers, are often equal.
    More are one by their signs, whose p falls with their number.
    """
    n, wins = len(values), sum((value < 0) == lower_is_better for value in values if value)
    if (ends := interval(values, 1 - alpha, tuning)) is None:
        return Comparison(n, values[0] if values else None, wins, alpha=alpha)
    mean, sd = fmean(values), stdev(values)
    total_sd, df = effective_sd(sd, n, tuning)
    p, p_equivalent = difference_p(mean, total_sd, n, df), equivalence_p(mean, total_sd, n, df, margin)
    is_test = True
    if are_equal(sd, mean):
        p, p_equivalent, is_test = max(p, 2 * 0.5**n), max(p_equivalent, 0.5**n), n >= MIN_EQUAL
    return Comparison(
        n_seeds=n,
        mean_difference=mean,
        wins=wins,
        sd=sd,
        tuning_sd=math.sqrt(tuning.variance) if tuning else 0.0,
        df=float(df),
        ci_low=ends[0],
        ci_high=ends[1],
        p=p if is_test else None,
        p_equivalent=p_equivalent if is_test else None,
        alpha=alpha,
    )
