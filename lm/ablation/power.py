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
N_QUANTILES = 1000  # of a sample standard deviation, over which power is averaged: to 1e-4
Array = NDArray[np.float64]


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
    limit, shift = t_quantile(1 - alpha / 2, df) * _sd_quantiles(df), effect * math.sqrt(n)
    return float(np.mean(special.ndtr(shift - limit) + special.ndtr(-limit - shift)))


@lru_cache(1000)
def standardized_mde(n: int, alpha: float, df: float) -> float:
    """The minimum detectable effect in standard deviations of a difference."""
    upper = (t_quantile(1 - alpha / 2, df) * _sd_quantiles(df)[-1] + 10) / math.sqrt(n)  # detected for certain

    return float(optimize.brentq(lambda effect: power(effect, n, alpha, df) - POWER, 0.0, upper))


def minimum_detectable_effect(sd: float, n: int, alpha: float = ALPHA, tuning: TuningVariance | None = None) -> float:
    """The effect, in the unit of `sd`, that a two-sided paired t test at n seeds finds with a probability of POWER.

    `sd` is that of a difference.

    >>> minimum_detectable_effect(sd=0.01, n=5)  # doctest: +ELLIPSIS
    0.0168...
    """
    total, df = effective_sd(sd, n, tuning)
    return float(total * standardized_mde(n, alpha, df))
