"""How likely a number of seeds is to decide, and the error of a mean that also counts the tuning: pure functions."""

import math
import operator
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

ALPHA = 0.05
POWER = 0.8
Values = float | NDArray[np.float64]
Number = TypeVar("Number", float, NDArray[np.float64])


@dataclass(slots=True, frozen=True)
class Tuning:
    """What is uncertain about the best settings of two arms, as part of their difference: more seeds do not help."""

    variance: float  # in squared units of the metric
    df: int  # of the estimate of this variance


def welch(*parts: tuple[Number, Number]) -> tuple[Number, Number]:
    """The variance of a sum of independent parts, each with its df, and its df (Satterthwaite, 1946; Welch, 1947)."""
    total = reduce(operator.add, (variance for variance, _ in parts))
    return total, total**2 / reduce(operator.add, (variance**2 / df for variance, df in parts))


def with_tuning(sd: Number, n: Number, tuning: Tuning | None) -> tuple[Number, Number]:
    """The standard deviation of a difference that n seeds would need for the whole error of their mean, and its df.

    Without tuning these are `sd` and n - 1. With it, the error of the mean has a part that more seeds do not reduce.
    `sd` and `n` are numbers, or arrays of one shape, which the answers have too.
    """
    if tuning is None or not tuning.variance:
        return sd, n - 1
    part: tuple[Any, Any] = (tuning.variance, tuning.df)  # numbers, which go with arrays too
    variance, df = welch((sd**2 / n, n - 1), part)
    return np.sqrt(n * variance), df


@lru_cache(10_000)
def critical(quantile: float, df: float) -> float:
    return float(stats.t.ppf(quantile, df))


@lru_cache(1000)
def spreads(df: float, count: int = 1000) -> NDArray[np.float64]:
    """`count` equally likely quantiles of a sample standard deviation of draws from N(0, 1)."""
    middles = (np.arange(count) + 0.5) / count
    return np.sqrt(stats.chi2.ppf(middles, df) / df)


def chance(
    effect: Values,
    n: Values,
    alpha: float = ALPHA,
    margin: Values = 0.0,
    df: Values | None = None,
    count: int = 1000,
) -> NDArray[np.float64]:
    """The probability that n seeds decide: by the two-sided paired t test, or by equivalence within +-margin.

    Effect and margin are in standard deviations of a difference; margin 0 gives the power of the t test alone. The
    mean and the standard deviation of a sample are independent, so given the latter this is a normal probability; it
    is averaged over the latter (to 1e-4 with a `count` of 1000). scipy's noncentral t, the usual way, returns nan far
    from its centre. All but `alpha` and `count` may be arrays of one shape, which the answer has too.
    """
    effects, ns, margins, dfs = np.broadcast_arrays(effect, n, margin, np.subtract(n, 1) if df is None else df)
    flat = [float(one) for one in dfs.flat]
    deviations = np.array([spreads(one, count) for one in flat]).reshape(*dfs.shape, count)
    different, equivalent = (
        np.array([critical(1 - tail, one) for one in flat]).reshape(*dfs.shape, 1) * deviations
        for tail in (alpha / 2, alpha)
    )
    shift, room = (effects * np.sqrt(ns))[..., None], (margins * np.sqrt(ns))[..., None] - equivalent
    found = special.ndtr(shift - different) + special.ndtr(-different - shift)
    found += np.where(room > 0, special.ndtr(room - shift) - special.ndtr(-room - shift), 0.0)
    return np.asarray(np.mean(np.where(room < different, found, 1.0), axis=-1))


@lru_cache(1000)
def detectable(n: int, alpha: float, df: float) -> float:
    surely = (critical(1 - alpha / 2, df) * spreads(df)[-1] + 10) / math.sqrt(n)  # beyond every limit
    return float(optimize.brentq(lambda effect: float(chance(effect, n, alpha, 0.0, df)) - POWER, 0.0, surely))


def minimum_detectable_effect(sd: float, n: int, alpha: float = ALPHA, tuning: Tuning | None = None) -> float | None:
    """The effect, in the unit of `sd`, that a two-sided paired t test at n seeds finds with a probability of POWER.

    `sd` is that of a difference. None for n below two.

    >>> minimum_detectable_effect(sd=0.01, n=5)  # doctest: +ELLIPSIS
    0.0168...
    """
    if n < 2:
        return None
    whole, df = with_tuning(sd, n, tuning)
    return whole * detectable(n, alpha, df)
