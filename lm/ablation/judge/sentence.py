"""A verdict in words."""

import math

from lm.ablation.judge.statistics import ALPHA, MOST_SEEDS, Comparison, critical


def decimals(margin: float) -> int:
    """Digits after the point in which a difference is said: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))


def sentence(name: str, baseline: str, comparison: Comparison, unit: str, margin: float) -> str:
    """A verdict in words. Confidence intervals (CI) are not corrected for the number of comparisons.

    Equivalence leaves 5 % for each side, so it is the 90 % CI that lies within +-margin.
    """
    one, digits = comparison, decimals(margin)
    if one.mean is None:
        return f"undecided between {name} and {baseline}: no seed has finished in both."
    signed, size = f"{one.mean:+z.{digits}f} {unit}", f"{abs(one.mean):.{digits}f} {unit}"
    if one.ci_low is None or one.ci_high is None:
        return f"undecided between {name} and {baseline}: {signed} at one seed, which gives no confidence interval."
    if one.verdict in ("better", "worse"):
        low, high = sorted((abs(one.ci_low), abs(one.ci_high)))
        ends = f"95 % CI {low:.{digits}f} to {high:.{digits}f}, {one.n} seeds"
        return f"{name} is {one.verdict} than {baseline} by {size} ({ends})."
    if one.verdict == "equivalent":
        half = critical(1 - ALPHA, one.n) * (one.sd or 0.0) / math.sqrt(one.n)
        ends = f"90 % CI {one.mean - half:+z.{digits}f} to {one.mean + half:+z.{digits}f}, {one.n} seeds"
        small = f"smaller than the equivalence margin of {margin:g}"
        return f"{name} and {baseline} are equivalent: the difference of {signed} ({ends}) is {small}."
    signed += f" (95 % CI {one.ci_low:+z.{digits}f} to {one.ci_high:+z.{digits}f}, {one.n} seeds)"
    if one.ci_low * one.ci_high > 0:
        signed += ", which excludes zero, but not after correction for the number of comparisons"
    more = f"about {one.seeds_needed} new seeds would probably decide"
    more = more if one.seeds_needed else f"even {MOST_SEEDS} seeds would probably not decide"
    return f"undecided between {name} and {baseline}: {signed}; {more}."
