"""A verdict in words."""

import math

from lm.ablation.judge.advice import MOST_SEEDS
from lm.ablation.judge.power import critical
from lm.ablation.judge.statistics import Comparison


def decimals(margin: float) -> int:
    """Decimals with which a difference is printed: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))


def percent(level: float) -> str:
    """A confidence level, to a tenth.

    >>> percent(0.95), percent(0.97888)
    ('95 %', '97.9 %')
    """
    return f"{100 * level:.3g} %"


def sentence(name: str, baseline: str, comparison: Comparison, unit: str, margin: float) -> str:
    """A verdict in words. Confidence intervals (CI) are not corrected for the number of comparisons.

    Differences are signed: arm minus baseline. Equivalence leaves 5 % for each side, so its CI is that of 90 %; where
    looks are planned, each leaves the level of a look.
    """
    one, digits = comparison, decimals(margin)
    undecided = f"{name} compared with {baseline} is undecided"
    if one.mean is None:
        return f"{undecided}: no seed has finished in both."
    mean = f"{one.mean:+z.{digits}f} {unit}"
    if one.ci_low is None or one.ci_high is None:
        return f"{undecided}: {mean} with one seed, which gives no confidence interval."

    def within(level: float, low: float, high: float) -> str:
        return f"{mean} ({percent(level)} CI {low:+z.{digits}f} to {high:+z.{digits}f}, {one.n} seeds)"

    found = within(1 - one.alpha, one.ci_low, one.ci_high)
    if one.verdict in ("better", "worse"):
        return f"{name} is {one.verdict} than {baseline}: {found}."
    if one.verdict == "equivalent":
        half = critical(1 - one.alpha, one.df or 1) * math.sqrt((one.sd or 0.0) ** 2 / one.n + one.tuning_sd**2)
        found = within(1 - 2 * one.alpha, one.mean - half, one.mean + half)
        return f"{name} and {baseline} are equivalent: {found}, within the equivalence margin of ±{margin:g}."
    if one.ci_low * one.ci_high > 0:
        found += ", which excludes zero, but not after correction for the number of comparisons"
    return f"{undecided}: {found}; {advice(one)}."


def advice(one: Comparison) -> str:
    fewest, most = one.seeds_needed_low, one.seeds_needed_high
    if fewest is None:
        return f"even {MOST_SEEDS} seeds would probably not decide"
    if most is None:
        return f"{fewest} new seeds could decide, but it may take more than {MOST_SEEDS} (80 % range)"
    return f"{fewest} to {most} new seeds (80 % range) would probably decide"
