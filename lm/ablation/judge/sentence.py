"""A verdict in words."""

import math

from lm.ablation.judge.power import ALPHA, MOST_SEEDS, critical
from lm.ablation.judge.statistics import Comparison


def decimals(margin: float) -> int:
    """Decimals with which a difference is printed: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))


def sentence(name: str, baseline: str, comparison: Comparison, unit: str, margin: float) -> str:
    """A verdict in words. Confidence intervals (CI) are not corrected for the number of comparisons.

    Differences are signed: arm minus baseline. Equivalence leaves 5 % for each side, so its CI is that of 90 %.
    """
    one, digits = comparison, decimals(margin)
    undecided = f"{name} compared with {baseline} is undecided"
    if one.mean is None:
        return f"{undecided}: no seed has finished in both."
    mean = f"{one.mean:+z.{digits}f} {unit}"
    if one.ci_low is None or one.ci_high is None:
        return f"{undecided}: {mean} with one seed, which gives no confidence interval."
    found = f"{mean} (95 % CI {one.ci_low:+z.{digits}f} to {one.ci_high:+z.{digits}f}, {one.n} seeds)"
    if one.verdict in ("better", "worse"):
        return f"{name} is {one.verdict} than {baseline}: {found}."
    if one.verdict == "equivalent":
        half = critical(1 - ALPHA, one.df or 1) * math.sqrt((one.sd or 0.0) ** 2 / one.n + one.tuning_sd**2)
        ends = f"90 % CI {one.mean - half:+z.{digits}f} to {one.mean + half:+z.{digits}f}, {one.n} seeds"
        return f"{name} and {baseline} are equivalent: {mean} ({ends}), within the equivalence margin of ±{margin:g}."
    if one.ci_low * one.ci_high > 0:
        found += ", which excludes zero, but not after correction for the number of comparisons"
    more = f"about {one.seeds_needed} new seeds would probably decide"
    more = more if one.seeds_needed else f"even {MOST_SEEDS} seeds would probably not decide"
    return f"{undecided}: {found}; {more}."
