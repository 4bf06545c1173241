"""A verdict in words, for the page, the terminal, report.json and `lm.compare`."""

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from lm.ablation.record import AblationRecord, ArmRecord
from lm.ablation.statistics import t_quantile
from lm.config.ablation import METRICS
from lm.config.identity import key_of

if TYPE_CHECKING:
    from lm.ablation.contrasts import Contrast

TOO_FAR = 5.0  # nats, above which a ratio of perplexities tells nothing


def decimals(margin: float) -> int:
    """Decimals with which a difference is printed: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))


def digits_of(row: Any) -> int:
    """The decimals of a contrast. Without a margin half the interval takes its place, or a hundredth of the mean.

    >>> digits_of({"equivalence_margin": None, "mean_difference": 80.0, "ci_low": 78.0, "ci_high": 82.0})
    2
    """
    keys = ("equivalence_margin", "mean_difference", "ci_low", "ci_high")
    margin, mean, low, high = (0.0 if pd.isna(row[key]) else row[key] for key in keys)
    return decimals(margin or max((high - low) / 2, abs(mean) / 100) or 1.0)


def percent(level: float) -> str:
    """A confidence level, to a tenth.

    >>> percent(0.95), percent(0.97888)
    ('95 %', '97.9 %')
    """
    return f"{100 * level:.3g} %"


def sentence(contrast: "Contrast", record: AblationRecord) -> str:
    """The verdict of a contrast, with perplexity, parameters and FLOPs, and with the seeds that it had to leave out.

    Arms that are values of one setting are called by these values. Differences are signed: arm minus baseline.
    """
    costs = _costs(contrast, record)
    undecided = _undecided(contrast, record)
    finding = _finding(contrast, record, costs, undecided)
    if not (contrast.diverged or contrast.broken):
        return finding
    if contrast.verdict == "undecided" and contrast.mean_difference is not None:
        which = f"{'all' if contrast.family == 'interaction' else 'both'} finished"
        seeds = f"{contrast.n_seeds} seed{'s' * (contrast.n_seeds > 1)} that {which}"
        return f"{undecided}: {_lost(contrast)}; on the {seeds} the difference is {_difference(contrast)}{costs}."
    return f"{finding} {_lost(contrast)}."


def _finding(contrast: "Contrast", record: AblationRecord, costs: str, undecided: str) -> str:
    """Confidence intervals (CI) are not corrected for the number of comparisons.

    Equivalence leaves 5 % for each side, so its CI is that of 90 %; where looks are planned, each leaves the level of a
    look.
    """
    arm, baseline = _names(contrast, record) or contrast.sides
    mean, low, high, margin = contrast.mean_difference, contrast.ci_low, contrast.ci_high, contrast.equivalence_margin
    if mean is None:
        return f"{undecided}: no seed has finished in {'all' if contrast.family == 'interaction' else 'both'}{costs}."
    if low is None or high is None:
        one = "" if contrast.undecided_by == "futility" else " with one seed, which gives no confidence interval"
        return f"{undecided}: {_difference(contrast)}{one}{costs}."
    digits = digits_of(vars(contrast))

    def with_interval(level: float, low: float, high: float) -> str:
        ends = f"{percent(level)} CI {low:+z.{digits}f} to {high:+z.{digits}f}"
        return _difference(contrast, f"{ends}, {contrast.n_seeds} seeds")

    difference = with_interval(1 - contrast.alpha, low, high)
    if contrast.verdict in ("better", "worse"):
        return f"{arm} is {contrast.verdict} than {baseline}: {difference}{costs}."
    if contrast.verdict == "equivalent":
        error = math.sqrt((contrast.sd or 0.0) ** 2 / contrast.n_seeds + contrast.tuning_sd**2)
        half = t_quantile(1 - contrast.alpha, contrast.df or 1) * error
        difference = with_interval(1 - 2 * contrast.alpha, mean - half, mean + half)
        within = f"within the equivalence margin of ±{margin:g}"
        return f"{arm} and {baseline} are equivalent: {difference}, {within}{costs}."
    if contrast.undecided_by in ("divergence", "edge", "futility"):
        return f"{undecided}: {difference}{costs}."
    if low * high > 0 and contrast.p is not None:
        difference += ", which excludes zero, but not after correction for the number of comparisons"
    return f"{undecided}: {difference}{costs}; {_limit(contrast)}."


def _undecided(contrast: "Contrast", record: AblationRecord) -> str:
    """Without a full stop: that a comparison is undecided, and whose search has failed if that is the reason."""
    blamed, n = " and ".join(contrast.failed_arms), contrast.n_planned
    reasons = {
        "divergence": f", for no setting was found with which {blamed} trains",
        "edge": f", for the best settings of {blamed} lie beyond what was tried",
        "futility": f", for it was stopped (not ahead after {n} seed{'s' * (n > 1)})",
    }
    names = _names(contrast, record)
    compared = " against ".join(names) if names else " compared with ".join(contrast.sides)
    return f"{compared} is undecided{reasons.get(str(contrast.undecided_by), '')}"


def _difference(contrast: "Contrast", *about: str) -> str:
    """The mean difference, of losses as perplexity too, and what is to be known `about` it in brackets."""
    mean, unit = contrast.mean_difference or 0.0, METRICS[contrast.metric][1]
    number = f"{mean:+z.{digits_of(vars(contrast))}f} {unit}"
    if contrast.metric == "val_loss" and contrast.family != "interaction" and abs(mean) < TOO_FAR:
        share = f"{100 * abs(math.expm1(mean)):.1f} %"
        words = f"{share} {'lower' if mean < 0 else 'higher'}" if share != "0.0 %" else "the same"
        return f"{words} perplexity ({', '.join([number, *about])})"
    return " ".join([number, *(f"({text})" for text in about)])


def _limit(contrast: "Contrast") -> str:
    if contrast.p is None:
        return "two equal differences are no test: more seeds are needed"
    detectable = f"{contrast.minimum_detectable:.{digits_of(vars(contrast))}f} is detectable"
    if contrast.limited_by == "tuning":
        return f"{detectable}, limited by the noise of tuning: more trials or tuning seeds are needed, not more seeds"
    return f"{detectable}, limited by the seeds"


def _lost(contrast: "Contrast") -> str:
    """How many runs diverged, and on which seeds one failed."""
    parts = []
    if contrast.diverged:
        counts = {arm: f"on {len(contrast.diverged.get(arm, ()))} of {n}" for arm, n in contrast.ended.items()}
        (name, first), *rest = counts.items()
        parts += [", ".join([f"{name} diverged {first} seeds", *map(" ".join, rest)])]
    parts += [f"{arm} failed on seed {', '.join(map(str, seeds))}" for arm, seeds in contrast.broken.items()]
    return " and ".join(parts)


def _pair(contrast: "Contrast", record: AblationRecord) -> list[ArmRecord]:
    """The arm and its baseline; empty of a weighted sum, and of rows of other programs, of which nothing is known."""
    pair = [record.arms[name] for name in (contrast.arm, contrast.baseline) if name in record.arms]
    return pair if len(pair) == 2 and pair[0].n_params else []


def _names(contrast: "Contrast", record: AblationRecord) -> tuple[str, str] | None:
    """The values of the one setting in which two arms differ, the first with its name; None if it is more."""
    overrides = [arm.overrides for arm in _pair(contrast, record) if arm.overrides]
    if len(overrides) < 2:
        return None
    (*added, own), (*others, other) = overrides
    key = key_of(own)
    if key_of(other) != key or own == other or added != others:
        return None
    return f"{key.rpartition('.')[2]}={own.partition('=')[2]}", other.partition("=")[2]


def _costs(contrast: "Contrast", record: AblationRecord) -> str:
    """The parameters and FLOPs of an arm beside those of its baseline; empty where they are not known."""
    if not (pair := _pair(contrast, record)):
        return ""
    parts, (arm, baseline) = [], pair
    for noun, own, other in (
        ("parameters", arm.n_params, baseline.n_params),
        ("FLOPs per token", arm.flops_per_token, baseline.flops_per_token),
    ):
        change = 100 * abs(own / other - 1)
        shown = f"{change:.2g}" if change < 99.5 else f"{change:.0f}"
        parts.append(f"same {noun}" if own == other else f"{shown} % {'more' if own > other else 'fewer'} {noun}")
    return f"; {', '.join(parts)}"
