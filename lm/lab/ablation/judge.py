"""From the runs of an ablation to verdicts: paired differences, the plain t interval, and the tests of a family.

A difference is a sum of the arms' scores with weights, paired by seed: 1 for an arm and -1 for its baseline. Paired
arms share their seed, their data order and their text, so what these add to both arms drops out.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple

import pandas as pd
from scipy import special

from lm.config import DataConfig
from lm.lab.ablation.folder import ArmRecord
from lm.lab.ablation.question import METRICS, MIN_SEEDS, MOST_SEEDS, Question, weighted_sum
from lm.lab.ablation.tuning import Ladder, climb

ALPHA = 0.05
POWER = 0.8
SAME = 2.0**-21  # of the largest difference: four roundings to single precision, which make no two differences
ROUNDING = 1e-15  # of the values: what a difference may have by rounding to double precision alone
FAMILIES = ("primary", "secondary", "weighted")  # each is corrected for its own number of comparisons


@dataclass(slots=True, kw_only=True)
class Contrast:
    """A comparison and its verdict. Differences and intervals are in the metric's unit: arm minus baseline."""

    name: str  # of a weighted sum its own, else arm - baseline
    family: str
    primary: bool
    arm: str
    baseline: str  # of a weighted sum its formula
    metric: str
    budget: str
    equivalence_margin: float | None
    alpha: float  # level of the tests; 1 - alpha is that of the interval
    n_planned: int  # seeds at which one of the arms was to be scored
    n_seeds: int
    seeds: list[int]  # at which all arms have a score
    differences: list[float]
    mean_difference: float | None = None
    sd: float | None = None  # of a difference
    ci_low: float | None = None  # with what the arm may still gain at an end of its ladder
    ci_high: float | None = None  # with what the baseline may still gain
    gain_low: float = 0.0  # part of the interval's ends that an end of a ladder adds
    gain_high: float = 0.0
    wins: int = 0  # seeds at which the arm is better
    p: float | None = None  # of a difference
    p_equivalent: float | None = None
    p_adjusted: float | None = None  # for the number of comparisons in the family
    p_equivalent_adjusted: float | None = None
    minimum_detectable: float | None = None  # with a probability of 0.8, at alpha divided by the number of comparisons
    seeds_needed: int | None = None  # to detect a difference of the margin
    verdict: str = "undecided"  # better, worse, equivalent, undecided
    # null: the interval; else seeds (too few), equal (differences), survivors, untrainable, or unstable (a ladder)
    undecided_by: str | None = None
    diverged: dict[str, list[int]] = field(default_factory=dict)  # by arm, the seeds
    failed: dict[str, list[int]] = field(default_factory=dict)
    untrainable: list[str] = field(default_factory=list)  # arms that diverged or failed wherever they were tried
    weights: dict[str, float] = field(default_factory=dict)  # of the arms
    best: dict[str, float | None] = field(default_factory=dict)  # by tuned arm, the factor of its best value
    gains: dict[str, float] = field(default_factory=dict)  # by arm at an end of its ladder, what it may still gain
    tried: dict[str, int] = field(default_factory=dict)  # by tuned arm, how many values were tried
    dropped: dict[str, int] = field(default_factory=dict)  # by tuned arm, how many of them were left out
    sentence: str = ""

    @property
    def half_width(self) -> float:
        """Half the interval, 0 if there is none."""
        return ((self.ci_high or 0.0) - (self.ci_low or 0.0)) / 2

    @property
    def digits(self) -> int:
        """The decimals of a difference: two more than the margin, and two digits of half the interval.

        Without a margin, half the interval takes its place, or 1 % of the mean.
        """
        half, mean = self.half_width, abs(self.mean_difference or 0.0)
        digits = decimals(self.equivalence_margin or max(half, mean / 100) or 1.0)
        return max(digits, decimals(10 * half)) if half else digits


@dataclass(slots=True)
class Scored:
    """The scores of an arm by seed (lower is better), and the seeds that it lost."""

    seeds: set[int]  # at which it was to be scored
    untrainable: str  # "failed" or "diverged" if no run trained at MIN_SEEDS seeds or more; else empty
    scores: dict[int, float]
    diverged: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    ladder: Ladder | None = None  # of a tuned arm


def judge(question: Question, runs: pd.DataFrame, arms: Mapping[str, ArmRecord]) -> list[Contrast]:
    """Return each arm against its baseline, then each weighted sum, with a verdict.

    `runs`: a row for each reported run with the columns arm, seed, factor (of the tuned setting), status and those of
    the metrics.

    equivalent: the true difference is shown to lie within the margin, be it zero or not (two one-sided t tests;
    Schuirmann, 1987). better, worse: the two-sided paired t test rejects. Both after Holm's correction (1979) for the
    number of comparisons of the family. An arm that diverged or failed at some seeds is never called better or
    equivalent, because the seeds that it survived would favour it. An arm that diverged at all seeds is worse than an
    arm that lost no seed. An arm that failed says nothing about itself: its code or its machine may be the reason.
    """
    most_seeds = MOST_SEEDS
    if question.folds and "data.val_fraction" in (settings := arms[question.baseline].settings):
        # More seeds than parts would each score less text, so their differences would vary more.
        most_seeds = DataConfig(val_fraction=settings["data.val_fraction"]).n_folds
    scored = {arm: score(question, runs[runs["arm"] == arm], arms[arm].is_tuned) for arm in question.arms}
    weights = {f"{arm} - {other}": {arm: 1.0, other: -1.0} for arm, other in question.pairs().items()}
    weights |= question.contrasts
    contrasts = [_contrast(question, name, own, scored) for name, own in weights.items()]
    for family in FAMILIES:
        _adjust([contrast for contrast in contrasts if contrast.family == family], most_seeds)
    for contrast in contrasts:
        contrast.verdict, contrast.undecided_by = _verdict(contrast, scored)
    return contrasts


def score(question: Question, runs: pd.DataFrame, is_tuned: bool) -> Scored:
    """Return the scores of an arm from its runs. A seed of a tuned arm has one if its ladder is whole."""
    sign = METRICS[question.metric].sign
    frame = runs.assign(loss=sign * runs[question.metric].astype(float))
    statuses, seeds = {*frame["status"]}, {*map(int, frame["seed"])}
    untrainable = ""
    if statuses <= {"diverged", "failed"} and len(seeds) >= MIN_SEEDS:
        untrainable = "failed" if "failed" in statuses else "diverged"
    if is_tuned:
        ladder = climb(frame)
        return Scored(seeds, untrainable, ladder.scores, ladder=ladder)
    done = frame[frame["status"] == "done"].set_index("seed")["loss"]
    diverged, failed = ([*map(int, frame["seed"][frame["status"] == kind])] for kind in ("diverged", "failed"))
    return Scored(seeds, untrainable, {int(seed): float(loss) for seed, loss in done.items()}, diverged, failed)


def alpha_of(question: Question) -> float:
    """Return the level of the tests: ALPHA divided by the number of looks (Bonferroni)."""
    return ALPHA / max(1, len(question.looks))


def _contrast(question: Question, name: str, weights: Mapping[str, float], scored: Mapping[str, Scored]) -> Contrast:
    sign = METRICS[question.metric].sign
    own = {arm: scored[arm] for arm in weights}
    ladders = {arm: result.ladder for arm, result in own.items() if result.ladder}
    seeds = [seed for seed in question.seeds if all(seed in arm.scores for arm in own.values())]
    losses = [sum(weight * own[arm].scores[seed] for arm, weight in weights.items()) for seed in seeds]
    first, other = sides(weights)
    is_pair = name not in question.contrasts
    primary = is_pair and first in question.primary_arms()
    contrast = Contrast(
        name=name,
        family="weighted" if not is_pair else "primary" if primary else "secondary",
        primary=primary,
        arm=first if is_pair else name,
        baseline=other if is_pair else weighted_sum(weights),
        metric=question.metric,
        budget=question.budget,
        equivalence_margin=question.equivalence_margin,
        alpha=alpha_of(question),
        n_planned=len(set[int]().union(*(result.seeds for result in own.values()))),
        n_seeds=len(seeds),
        seeds=seeds,
        differences=[sign * loss for loss in losses],
        mean_difference=sign * fmean(losses) if losses else None,
        wins=sum(loss < 0 for loss in losses),
        diverged={arm: result.diverged for arm, result in own.items() if result.diverged},
        failed={arm: result.failed for arm, result in own.items() if result.failed},
        untrainable=[arm for arm, result in own.items() if result.untrainable],
        weights=dict(weights),
        best={arm: ladder.best for arm, ladder in ladders.items()},
        tried={arm: ladder.n_tried for arm, ladder in ladders.items()},
        dropped={arm: len(ladder.dropped) for arm, ladder in ladders.items() if ladder.dropped},
        gains={arm: ladder.gain for arm, ladder in ladders.items() if ladder.gain},
    )
    if len(losses) > 1:
        gains = [weight * contrast.gains.get(arm, 0.0) for arm, weight in weights.items()]
        down, up = sum(max(gain, 0.0) for gain in gains), sum(max(-gain, 0.0) for gain in gains)
        largest = max(abs(arm.scores[seed]) for arm in own.values() for seed in seeds)
        are_equal = max(losses) - min(losses) <= max(SAME * max(map(abs, losses)), ROUNDING * largest)
        test = paired_test(losses, question.equivalence_margin, down, up, contrast.alpha, are_equal)
        contrast.sd, contrast.p, contrast.p_equivalent = test.sd, test.p, test.p_equivalent
        if test.p is not None:  # equal differences have no interval
            contrast.ci_low, contrast.ci_high = sorted((sign * test.low, sign * test.high))
        contrast.gain_low, contrast.gain_high = (down, up) if sign > 0 else (up, down)
    return contrast


class PairedTest(NamedTuple):
    """What paired differences say. Without a p where all are equal, and without one of equivalence for no margin."""

    sd: float
    low: float
    high: float
    p: float | None
    p_equivalent: float | None


def paired_test(
    losses: Sequence[float],
    margin: float | None,
    down: float = 0.0,
    up: float = 0.0,
    alpha: float = ALPHA,
    are_equal: bool = False,
) -> PairedTest:
    """Return the t interval of the mean of paired differences of losses, and its p values unless `are_equal`.

    At an end of its ladder an arm may still gain: the true difference may be lower by `down` or higher by `up`.
    """
    n, mean, sd = len(losses), fmean(losses), stdev(losses)
    error, df = sd / math.sqrt(n), n - 1
    half = float(special.stdtrit(df, 1 - alpha / 2)) * error
    low, high = mean - half - down, mean + half + up
    if are_equal or error == 0:
        return PairedTest(sd, low, high, None, None)
    away = mean - down if mean > 0 else -mean - up
    nearer = None if margin is None else margin - max(mean + up, down - mean)
    p_equivalent = None if nearer is None else float(special.stdtr(df, -nearer / error))
    return PairedTest(sd, low, high, min(1.0, 2 * float(special.stdtr(df, -away / error))), p_equivalent)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number, in the order given (Holm, 1979).

    >>> holm([0.02, 0.01, 0.5])
    [0.04, 0.03, 0.5]
    """
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def _adjust(family: Sequence[Contrast], most_seeds: int) -> None:
    """Correct the comparisons of a family that have a test for their number, and say what they would detect."""
    for key in ("p", "p_equivalent"):
        tested = [contrast for contrast in family if getattr(contrast, key) is not None]
        for contrast, p in zip(tested, holm([getattr(contrast, key) for contrast in tested]), strict=True):
            setattr(contrast, f"{key}_adjusted", p)
    tested = [contrast for contrast in family if contrast.p is not None]
    for contrast in tested:
        if contrast.gains:  # more seeds do not shrink what an end of a ladder leaves open
            continue
        alpha, sd = contrast.alpha / len(tested), contrast.sd or 0.0
        contrast.minimum_detectable = detectable(sd, contrast.n_seeds, alpha)
        if margin := contrast.equivalence_margin:
            contrast.seeds_needed = _seeds_needed(margin, sd, alpha, most_seeds)


def _seeds_needed(margin: float, sd: float, alpha: float, most: int) -> int | None:
    numbers = range(MIN_SEEDS, most + 1)
    place = bisect_left(numbers, True, key=lambda n: detectable(sd, n, alpha) <= margin)
    return numbers[place] if place < len(numbers) else None


def detectable(sd: float, n: int, alpha: float = ALPHA) -> float:
    """Return the difference that a paired t test of n seeds finds with a probability of about POWER.

    `sd` is the standard deviation of a difference.

    >>> detectable(sd=0.01, n=5)  # doctest: +ELLIPSIS
    0.0166...
    """
    return float(special.stdtrit(n - 1, 1 - alpha / 2) + special.stdtrit(n - 1, POWER)) * sd / math.sqrt(n)


def interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, float] | None:
    """Return the t interval of the mean (Student, 1908); None for fewer than two values."""
    return paired_test(values, None, alpha=alpha)[1:3] if len(values) > 1 else None


def _verdict(contrast: Contrast, scored: Mapping[str, Scored]) -> tuple[str, str | None]:
    """Return the verdict, and why there is none if the interval is not the reason."""
    arms = {*contrast.weights}
    positive = {arm for arm, weight in contrast.weights.items() if weight > 0}
    if untrainable := {*contrast.untrainable}:
        others = [scored[arm] for arm in arms - untrainable]
        others_are_whole = all(len(s.scores) >= MIN_SEEDS and not (s.diverged or s.failed) for s in others)
        have_diverged = all(scored[arm].untrainable == "diverged" for arm in untrainable)
        if len(arms) == 2 and len(untrainable) == 1 and have_diverged and others_are_whole:
            return "worse" if untrainable == positive else "better", None
        return "undecided", "untrainable"
    ladders = [scored[arm].ladder for arm in arms]
    if any(ladder is not None and ladder.best is None and ladder.dropped for ladder in ladders):
        return "undecided", "unstable"
    if contrast.n_seeds < MIN_SEEDS:
        return "undecided", "seeds"
    if contrast.p_adjusted is None or contrast.mean_difference is None:
        return "undecided", "equal"
    verdict, alpha = "undecided", contrast.alpha
    if contrast.p_equivalent_adjusted is not None and contrast.p_equivalent_adjusted <= alpha:
        verdict = "equivalent"
    elif contrast.p_adjusted <= alpha:
        verdict = "better" if METRICS[contrast.metric].sign * contrast.mean_difference < 0 else "worse"
    favoured = {"better": positive, "worse": arms - positive, "equivalent": arms}.get(verdict, set())
    if favoured & {*contrast.diverged, *contrast.failed}:
        return "undecided", "survivors"
    return verdict, None


def sides(weights: Mapping[str, float]) -> tuple[str, str]:
    """Return what is compared with what: the arms with positive weights, and the arms with negative weights.

    >>> sides({"a": 1, "b": -1, "c": -1, "d": 1})
    ('a + d', 'b + c')
    """
    first, second = ({arm: sign * w for arm, w in weights.items() if sign * w > 0} for sign in (1, -1))
    return weighted_sum(first), weighted_sum(second)


def decimals(margin: float) -> int:
    """Return the decimals with which a difference is printed: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))
