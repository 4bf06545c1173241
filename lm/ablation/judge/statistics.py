"""From paired differences to a verdict: pure functions.

A difference is an arm's metric minus its baseline's at the same seed. Paired by seed, the arms share their data order
and all of their initialisation that they can, so what the seed adds to both drops out.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

ALPHA = 0.05
POWER = 0.8
MOST_SEEDS = 100


@dataclass(slots=True, frozen=True)
class Comparison:
    """What paired differences say, in the metric's unit. Everything that needs two seeds is None with fewer."""

    n: int
    mean: float | None
    wins: int  # seeds on which the arm is better
    sd: float | None = None
    ci_low: float | None = None  # of the 95 % interval, not corrected for the number of comparisons
    ci_high: float | None = None
    p_different: float | None = None
    p_equivalent: float | None = None
    p_different_adjusted: float | None = None  # for the number of comparisons in the family
    p_equivalent_adjusted: float | None = None
    minimum_detectable: float | None = None
    verdict: str = "undecided"  # better, worse, equivalent, undecided
    seeds_needed: int | None = None  # where undecided: about so many, if looked at once; None also above 100


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """The t interval of the mean, in the unit of the values (Student, 1908); None for fewer than two values."""
    if len(values) < 2:
        return None
    mean, error = fmean(values), stdev(values) / math.sqrt(len(values))
    half = critical((1 + level) / 2, len(values)) * error
    return mean - half, mean + half


@cache
def critical(quantile: float, n: int) -> float:
    return float(stats.t.ppf(quantile, n - 1))


def above(t: float, n: int) -> float:
    return float(special.stdtr(n - 1, -t))  # stats.t.sf, thirty times faster


@cache
def spreads(n: int, count: int = 1000) -> NDArray[np.float64]:
    """`count` equally likely quantiles of the sample standard deviation of n draws from N(0, 1)."""
    middles = (np.arange(count) + 0.5) / count
    return np.sqrt(stats.chi2.ppf(middles, n - 1) / (n - 1))


def chance(effect: float, n: int, alpha: float = ALPHA, margin: float = 0.0) -> float:
    """The probability that n seeds decide: by the two-sided paired t test, or by equivalence within +-margin.

    Effect and margin are in standard deviations of a difference; margin 0 gives the power of the t test alone. The
    mean and the standard deviation of a sample are independent, so given the latter this is a normal probability; it
    is averaged over the latter (to 1e-4). scipy's noncentral t, the usual way, returns nan far from its centre.
    """
    limit, shift = critical(1 - alpha / 2, n) * spreads(n), effect * math.sqrt(n)
    room = margin * math.sqrt(n) - critical(1 - alpha, n) * spreads(n)
    different = special.ndtr(shift - limit) + special.ndtr(-limit - shift)
    equivalent = np.where(room > 0, special.ndtr(room - shift) - special.ndtr(-room - shift), 0.0)
    return float(np.mean(np.where(room < limit, different + equivalent, 1.0)))


@cache
def detectable(n: int, alpha: float, power: float) -> float:
    surely = (critical(1 - alpha / 2, n) * spreads(n)[-1] + 10) / math.sqrt(n)  # beyond every limit
    return float(optimize.brentq(lambda effect: chance(effect, n, alpha) - power, 0.0, surely))


def minimum_detectable_effect(sd: float, n: int, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """The effect, in the unit of `sd`, that a two-sided paired t test at n seeds finds with this power.

    `sd` is that of a difference. None for n below two.

    >>> minimum_detectable_effect(sd=0.01, n=5)  # doctest: +ELLIPSIS
    0.0168...
    """
    return None if n < 2 else sd * detectable(n, alpha, power)


def difference_p(mean: float, sd: float, n: int) -> float:
    """The two-sided p of the paired t test."""
    if sd == 0:
        return float(mean == 0)
    return 2 * above(abs(mean) * math.sqrt(n) / sd, n)


def equivalence_p(mean: float, sd: float, n: int, margin: float) -> float:
    """The larger p of the two one-sided tests that the true difference is within +-margin (Schuirmann, 1987)."""
    if sd == 0:
        return float(abs(mean) >= margin)
    return above((margin - abs(mean)) * math.sqrt(n) / sd, n)


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


def seeds_to_decide(mean: float, sd: float, margin: float, comparisons: int = 1) -> int | None:
    """The fewest seeds, 2 to 100, that would give a verdict with a probability of 80 %; None if more.

    Supposes that the truth is the observed mean and standard deviation, and counts either verdict, a difference or
    equivalence, at ALPHA / comparisons: never fewer than Holm's method needs. The probability is that of `chance`.
    """
    if sd == 0:
        return 2
    alpha, sizes = ALPHA / comparisons, range(2, MOST_SEEDS + 1)
    i = bisect_left(sizes, True, key=lambda n: chance(mean / sd, n, alpha, margin / sd) >= POWER)
    return sizes[i] if i < len(sizes) else None


def judge(family: Mapping[str, Sequence[float]], margin: float, lower_is_better: bool = True) -> dict[str, Comparison]:
    """A verdict on each comparison of a family from its paired differences, corrected for their number (Holm).

    `margin`, in the metric's unit, is the equivalence margin: the smallest difference that would change a decision.
    equivalent: the true difference is shown to be smaller than the margin, be it zero or not. better, worse: there is
    shown to be a difference. Else undecided, as with fewer than two seeds; such comparisons do not count in the
    correction. At most 5 % of families without any true difference contain a better or a worse, and at most 5 % of
    those whose differences all exceed the margin contain an equivalent, if one looks once. Adding seeds until
    something is decided finds a difference where there is none more often: from 5 seeds, one by one, up to 10, in
    about one case of ten.

    Raises ValueError for a difference that is not finite, or for a margin of zero or less.
    """
    if not 0 < margin < math.inf:
        raise ValueError(f"margin={margin}: expected a number above 0")
    for name, values in family.items():
        for value in values:
            if not math.isfinite(value):
                raise ValueError(f"{name}: a difference is {value}; a run that diverged is no number to average")
    samples = {name: (fmean(values), stdev(values), len(values)) for name, values in family.items() if len(values) > 1}
    different = [difference_p(*sample) for sample in samples.values()]
    equivalent = [equivalence_p(*sample, margin) for sample in samples.values()]
    adjusted = zip(holm(different), holm(equivalent), strict=True)
    wins = {name: sum((value < 0) == lower_is_better for value in values if value) for name, values in family.items()}
    found = {
        name: Comparison(len(values), values[0] if values else None, wins[name]) for name, values in family.items()
    }
    for name, p, q, (p_adjusted, q_adjusted) in zip(samples, different, equivalent, adjusted, strict=True):
        mean, sd, n = samples[name]
        verdict, needed = "undecided", None
        if q_adjusted <= ALPHA:
            verdict = "equivalent"
        elif p_adjusted <= ALPHA:
            verdict = "better" if (mean < 0) == lower_is_better else "worse"
        elif needed := seeds_to_decide(mean, sd, margin, len(samples)):
            needed = max(needed, n + 1)  # n have just failed to, if only by bad luck
        low, high = interval(family[name]) or (None, None)
        tests = (p, q, p_adjusted, q_adjusted, minimum_detectable_effect(sd, n))
        found[name] = Comparison(n, mean, wins[name], sd, low, high, *tests, verdict, needed)
    return found
