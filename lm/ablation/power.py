"""Power of paired tests at few seeds, and the standard error of a mean that also counts the tuning: pure functions."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

ALPHA = 0.05
POWER = 0.8
MAX_SEEDS = 100  # above which nobody wants to know how many seeds a verdict takes
SEEDS_QUANTILES = (0.1, 0.9)  # of the number of seeds needed
GRID_POINTS = 10  # of the posterior standard deviation, and for each as many of the mean
GRID_QUANTILES = 40  # that a probability is averaged over there: enough for whole numbers of seeds
Array = NDArray[np.float64]
Values = float | Array


@dataclass(slots=True, frozen=True)
class TuningVariance:
    """Variance of a difference because the arms' hyperparameters may not be their best. More seeds do not reduce it."""

    variance: float  # in squared units of the metric
    df: int  # degrees of freedom of its estimate


def satterthwaite(*parts: tuple[Any, Any]) -> tuple[Any, Any]:
    """The variance of a sum of independent parts (variance, df), and its df (Satterthwaite, 1946; Welch, 1947)."""
    total = sum(variance for variance, _ in parts)
    return total, total**2 / sum(variance**2 / df for variance, df in parts)


def effective_sd(sd: Any, n: Any, tuning: TuningVariance | None) -> tuple[Any, Any]:
    """The value for which sd / sqrt(n) is the total standard error (seeds and tuning), and its degrees of freedom.

    Without tuning these are `sd` and n - 1. `sd` and `n` are numbers, or arrays of one shape.
    """
    if tuning is None or not tuning.variance:
        return sd, n - 1
    variance, df = satterthwaite((sd**2 / n, n - 1), (tuning.variance, tuning.df))
    return np.sqrt(n * variance), df


@lru_cache(10_000)
def t_quantile(quantile: float, df: float) -> float:
    return float(stats.t.ppf(quantile, df))


@lru_cache(1000)
def sd_quantiles(df: float, count: int = 1000) -> Array:
    """`count` equally likely quantiles of a sample standard deviation of draws from N(0, 1)."""
    midpoints = (np.arange(count) + 0.5) / count
    return np.sqrt(stats.chi2.ppf(midpoints, df) / df)


def decision_probability(
    effect: Values,
    n: Values,
    alpha: float = ALPHA,
    margin: Values = 0.0,
    df: Values | None = None,
    count: int = 1000,
) -> Array:
    """The probability that n seeds decide: by the two-sided paired t test, or by equivalence within +-margin.

    Effect and margin are in standard deviations of a difference; margin 0 gives the power of the t test alone. The
    mean and the standard deviation of a sample are independent, so given the latter this is a normal probability; it
    is averaged over the latter (to 1e-4 with a `count` of 1000). `scipy.stats.nct` is not used: it returns nan for
    large noncentrality with few degrees of freedom. All but `alpha` and `count` may be arrays of one shape, which the
    result has too.
    """
    effects, ns, margins, dfs = np.broadcast_arrays(effect, n, margin, np.subtract(n, 1) if df is None else df)
    flat_dfs = [float(value) for value in dfs.flat]
    deviations = np.array([sd_quantiles(value, count) for value in flat_dfs]).reshape(*dfs.shape, count)
    different, equivalent = (
        np.array([t_quantile(1 - tail, value) for value in flat_dfs]).reshape(*dfs.shape, 1) * deviations
        for tail in (alpha / 2, alpha)
    )
    shift, room = (effects * np.sqrt(ns))[..., None], (margins * np.sqrt(ns))[..., None] - equivalent
    probability = special.ndtr(shift - different) + special.ndtr(-different - shift)
    probability += np.where(room > 0, special.ndtr(room - shift) - special.ndtr(-room - shift), 0.0)
    return np.asarray(np.mean(np.where(room < different, probability, 1.0), axis=-1))


@lru_cache(1000)
def standardized_mde(n: int, alpha: float, df: float) -> float:
    """The minimum detectable effect in standard deviations of a difference."""
    upper = (t_quantile(1 - alpha / 2, df) * sd_quantiles(df)[-1] + 10) / math.sqrt(n)  # detected for certain

    def excess(effect: float) -> float:
        return float(decision_probability(effect, n, alpha, 0.0, df)) - POWER

    return float(optimize.brentq(excess, 0.0, upper))


def minimum_detectable_effect(sd: float, n: int, alpha: float = ALPHA, tuning: TuningVariance | None = None) -> float:
    """The effect, in the unit of `sd`, that a two-sided paired t test at n seeds finds with a probability of POWER.

    `sd` is that of a difference.

    >>> minimum_detectable_effect(sd=0.01, n=5)  # doctest: +ELLIPSIS
    0.0168...
    """
    total, df = effective_sd(sd, n, tuning)
    return float(total * standardized_mde(n, alpha, df))


def seeds_needed(
    mean: float, sd: float, n: int, margin: float, alpha: float = ALPHA, tuning: TuningVariance | None = None
) -> tuple[int | None, int | None]:
    """How many new seeds would give a verdict after n seeds did not; at least one more than these.

    Computes the number for a grid of equally likely points of the posterior of the true mean and standard deviation
    given n differences (prior 1 / variance: a normal mean given a scaled inverse chi-squared variance; Box and Tiao,
    1973), and returns its 10 % and 90 % quantiles; None: more than MAX_SEEDS.
    """
    deviations, shifts = _posterior_grid(n)
    numbers = seeds_to_decide(mean + shifts * sd, deviations * sd, margin, alpha, tuning)
    ends = np.quantile(numbers, SEEDS_QUANTILES, method="inverted_cdf")
    low, high = (max(int(end), n + 1) if end <= MAX_SEEDS else None for end in ends)
    return low, high


@lru_cache(1000)
def _posterior_grid(n: int) -> tuple[Array, Array]:
    """Standard deviations, and distances of the mean from the observed one, in observed standard deviations."""
    midpoints = (np.arange(GRID_POINTS) + 0.5) / GRID_POINTS
    deviations = np.repeat(1 / sd_quantiles(n - 1, GRID_POINTS), GRID_POINTS)
    return deviations, deviations * np.tile(special.ndtri(midpoints), GRID_POINTS) / math.sqrt(n)


def seeds_to_decide(
    mean: Values, sd: Values, margin: float, alpha: float = ALPHA, tuning: TuningVariance | None = None
) -> Array:
    """The fewest seeds, 2 to MAX_SEEDS, that give a verdict with a probability of POWER; infinity if more.

    `mean` and `sd` are the true ones of a difference, and arrays of one shape if there are many. Counts either verdict,
    a difference or equivalence, at the level `alpha`; for a family, pass its level divided by its size, which is never
    more than Holm's method allows.
    """
    means, sds = np.broadcast_arrays(np.asarray(mean, float), np.asarray(sd, float))

    def is_enough(n: Array) -> NDArray[np.bool_]:
        total, df = effective_sd(sds, n, tuning)
        certain = total == 0
        total = np.where(certain, 1.0, total)
        df = np.maximum(np.rint(df), 1)
        probability = decision_probability(means / total, n, alpha, margin / total, df, GRID_QUANTILES)
        return certain | (probability >= POWER)

    too_few, enough = np.full(means.shape, 1.0), np.full(means.shape, MAX_SEEDS + 1.0)
    while np.any(enough - too_few > 1):
        middle = np.clip((too_few + enough) // 2, 2, MAX_SEEDS)
        decides = is_enough(middle)
        too_few = np.where(decides, too_few, np.maximum(too_few, middle))
        enough = np.where(decides, np.minimum(enough, middle), enough)
    return np.where(enough > MAX_SEEDS, math.inf, enough)
