"""Comparisons of arms: from the frame of runs to contrasts with a verdict each, and its sentence.

A difference is a sum of the arms' metrics with weights, paired by seed: 1 for an arm and -1 for its baseline. Others,
such as an interaction, which is a difference of differences, have weights of their own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pandas as pd
from scipy import special

from lm.cli.arguments import key_of
from lm.lab.ablation.record import AblationRecord, ArmRecord
from lm.lab.ablation.response_surface import Regret, combine_regrets
from lm.lab.ablation.settings import METRICS, weighted_sum
from lm.lab.ablation.statistics import ALPHA, ROUNDING, Comparison, are_equal, judge_family
from lm.system.terminal import fixed, signed

FAMILIES = ("primary", "secondary", "interaction")  # each is corrected for its own number of comparisons
ENDED = ("done", "diverged")
INTERNAL = ("sides", "weights", "failed_arms")  # no columns
TOO_FAR = 5.0  # nats, above which a ratio of perplexities tells nothing


@dataclass(kw_only=True)
class Contrast(Comparison):
    """What is compared, the runs that there are of it, and its verdict. Seeds and counts are by arm."""

    family: str
    arm: str  # of a weighted sum its name
    baseline: str  # of a weighted sum its formula
    budget: str
    primary: bool
    metric: str
    equivalence_margin: float | None
    seeds: list[int]  # that all arms have finished
    differences: list[float]
    lost_seeds: list[int]
    n_planned: int
    ended: dict[str, int]
    diverged: dict[str, list[int]]
    broken: dict[str, list[int]]
    weights: dict[str, float]
    sides: tuple[str, str]  # what is compared with what, in words
    regret: float | None = None  # expected, of the arm's tuned hyperparameters
    baseline_regret: float | None = None
    mean_without_regret: float | None = None
    is_tuning_counted: bool = False
    undecided_by: str | None = None
    failed_arms: list[str] = field(default_factory=list)  # whose searches have undone a verdict
    sentence: str = ""  # the verdict in words

    @property
    def name(self) -> str:
        return self.arm if self.family == "interaction" else f"{self.arm} - {self.baseline}"

    @property
    def digits(self) -> int:
        """Decimals. Without a margin half the interval takes its place, or a hundredth of the mean."""
        mean, low, high = (value or 0.0 for value in (self.mean_difference, self.ci_low, self.ci_high))
        return decimals(self.equivalence_margin or max((high - low) / 2, abs(mean) / 100) or 1.0)

    def row(self) -> dict[str, Any]:
        """For a table or JSON."""
        return {key: value for key, value in vars(self).items() if key not in INTERNAL}


def compare_arms(
    record: AblationRecord,
    runs: pd.DataFrame,
    regrets: Mapping[str, Regret],
    failed_searches: Mapping[str, str] = MappingProxyType({}),
) -> list[Contrast]:
    """Each arm against its baseline, then each weighted sum.

    `failed_searches` has the arms whose best settings were not found: "divergence", "edge" or "flat". `undecided_by`
    says why more seeds would not decide: "divergence" (an arm has no setting that trains), "survivors", or
    "edge" and "flat" (settings that may undo a verdict lie beyond a search).
    """
    pairs = [("", {arm: 1.0, other: -1.0}) for arm, other in record.pairs.items()]
    members = [_paired(record, runs, weights, name) for name, weights in (*pairs, *record.contrasts.items())]
    combined = {member.arm: combine_regrets(member.weights, regrets) for member in members}
    tunings = {key: tuning for key, tuning in combined.items() if tuning}
    tested = dict[str, Comparison]()
    for family in FAMILIES:
        own = {member.arm: member for member in members if member.family == family}
        tested |= judge_family(
            {key: member.differences for key, member in own.items()},
            record.equivalence_margin,
            METRICS[record.metric][0],
            tunings,
            level_of(record),
        )
    contrasts = [
        _contrast(member, tested[member.arm], regrets, member.arm in tunings, failed_searches) for member in members
    ]
    return [replace(contrast, sentence=sentence(contrast, record)) for contrast in contrasts]


def level_of(record: AblationRecord) -> float:
    """The level of the tests, at each look if several are planned; 1 minus it is that of the intervals.

    It is divided by the number of looks, so that ALPHA holds for all of them whatever the distribution (Bonferroni).
    """
    return ALPHA / max(1, len(record.looks))


def _paired(record: AblationRecord, runs: pd.DataFrame, weights: dict[str, float], name: str) -> Contrast:
    """The runs of a comparison and their differences; `name` is that of a weighted sum, or empty."""
    of_arm = {arm: runs[(runs.arm == arm) & (runs.budget == record.budget)].set_index("seed") for arm in weights}
    scores = {arm: rows[record.metric][rows.status == "done"] for arm, rows in of_arm.items()}
    arm, other = sides = _sides(weights)
    paired = [seed for seed in record.seeds if all(seed in scores[arm].index for arm in weights)]

    def seeds_of(condition: Callable[[pd.DataFrame], pd.Series]) -> dict[str, list[int]]:
        """By arm, if there are any."""
        seeds = {arm: [*map(int, rows.index[condition(rows)])] for arm, rows in of_arm.items()}
        return {arm: own for arm, own in seeds.items() if own}

    family = "interaction" if name else "primary" if arm in record.primary else "secondary"
    return Contrast(
        family=family,
        arm=name or arm,
        baseline=weighted_sum(weights) if name else other,
        budget=record.budget,
        primary=family == "primary",
        metric=record.metric,
        equivalence_margin=record.equivalence_margin or None,
        seeds=paired,
        differences=[_sum([weight * scores[arm][seed] for arm, weight in weights.items()]) for seed in paired],
        lost_seeds=[seed for seed in record.seeds if seed not in paired],
        n_planned=len(record.seeds),
        ended={arm: int(rows.status.isin(ENDED).sum()) for arm, rows in of_arm.items()},
        diverged=seeds_of(lambda rows: rows.status == "diverged"),
        broken=seeds_of(lambda rows: rows.is_own_failure),
        weights=weights,
        sides=sides,
    )


def _sum(terms: Sequence[float]) -> float:
    """0 where only rounding differs from it."""
    total = float(sum(terms))
    return 0.0 if abs(total) <= ROUNDING * sum(map(abs, terms)) else total


def _sides(weights: Mapping[str, float]) -> tuple[str, str]:
    """What is compared with what, in words: the arms with positive weights, and the others.

    >>> _sides({"a": 1, "b": -1, "c": -1, "d": 1})
    ('a + d', 'b + c')
    """
    first, second = ({arm: sign * w for arm, w in weights.items() if sign * w > 0} for sign in (1, -1))
    return weighted_sum(first), weighted_sum(second)


def _contrast(
    member: Contrast,
    tested: Comparison,
    regrets: Mapping[str, Regret],
    is_tuning_counted: bool,
    failed_searches: Mapping[str, str],
) -> Contrast:
    expected = {arm: regrets[arm].mean for arm in member.weights if arm in regrets}
    values: dict[str, Any] = asdict(tested) | {"is_tuning_counted": is_tuning_counted}
    if member.equivalence_margin is None:
        values |= {"p_equivalent": None, "p_equivalent_adjusted": None}
    if is_tuning_counted and tested.mean_difference is not None:
        shift = sum(weight * expected[arm] for arm, weight in member.weights.items())
        values["mean_without_regret"] = tested.mean_difference - (shift if METRICS[member.metric][0] else -shift)
    if undone := _undone(member, tested.verdict, failed_searches):
        values |= {"undecided_by": undone[0], "failed_arms": undone[1], "verdict": "undecided", "limited_by": None}
    regret, baseline_regret = (expected.get(side) for side in member.sides)
    return replace(member, **values, regret=regret, baseline_regret=baseline_regret)


def _undone(member: Contrast, verdict: str, failed_searches: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Why a verdict cannot be given whatever the differences are, and the arms to which it is due.

    An arm of which no setting trains is compared with nothing.
    Against survivorship bias, an arm that diverged or failed can be called worse, not better or equivalent. An arm that
    would gain from more search can be called better, not worse or equivalent.
    """
    arms = {*member.weights}
    positive = {arm for arm, weight in member.weights.items() if weight > 0}
    favoured = {"better": positive, "worse": arms - positive, "equivalent": arms, "undecided": set()}[verdict]
    opposed = arms - favoured if verdict in ("better", "worse") else arms
    reasons = {
        "divergence": {arm for arm in arms if failed_searches.get(arm) == "divergence"},
        "survivors": favoured & {*member.broken, *member.diverged},
        "edge": {arm for arm in opposed if failed_searches.get(arm) == "edge"},
        "flat": {arm for arm in opposed if failed_searches.get(arm) == "flat" and verdict != "undecided"},
    }
    return next(((reason, sorted(blamed)) for reason, blamed in reasons.items() if blamed), None)


# --- in words


def decimals(margin: float) -> int:
    """Decimals with which a difference is printed: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))


def percent(level: float) -> str:
    """A confidence level, to a tenth.

    >>> percent(0.95), percent(0.97888)
    ('95 %', '97.9 %')
    """
    return f"{100 * level:.3g} %"


def sentence(contrast: Contrast, record: AblationRecord) -> str:
    """The verdict of a contrast, with perplexity, parameters and FLOPs, and with the seeds that it had to leave out.

    Arms that are values of one setting are called by these values. Differences are signed: arm minus baseline.
    """
    pair = [record.arms[name] for name in (contrast.arm, contrast.baseline) if name in record.arms]
    if len(pair) < 2 or not pair[0].n_params:  # a weighted sum, or rows of other programs, of which nothing is known
        pair = []
    costs, names = _costs(*pair), _names(*pair)
    undecided = _undecided(contrast, " against ".join(names) if names else " compared with ".join(contrast.sides))
    finding = _finding(contrast, names or contrast.sides, costs, undecided)
    if not (contrast.diverged or contrast.broken):
        return finding
    if contrast.verdict == "undecided" and contrast.mean_difference is not None:
        which = f"{'all' if contrast.family == 'interaction' else 'both'} finished"
        seeds = f"{contrast.n_seeds} seed{'s' * (contrast.n_seeds > 1)} that {which}"
        return f"{undecided}: {_lost(contrast)}; on the {seeds} the difference is {_difference(contrast)}{costs}."
    return f"{finding} {_lost(contrast)}."


def _finding(contrast: Contrast, names: tuple[str, str], costs: str, undecided: str) -> str:
    """Confidence intervals (CI) are not corrected for the number of comparisons.

    Equivalence leaves 5 % for each side, so its CI is that of 90 %; where looks are planned, each leaves the level of a
    look.
    """
    mean, low, high, margin = contrast.mean_difference, contrast.ci_low, contrast.ci_high, contrast.equivalence_margin
    if mean is None:
        return f"{undecided}: no seed has finished in {'all' if contrast.family == 'interaction' else 'both'}{costs}."
    if low is None or high is None:
        reason = "with one seed, which gives no confidence interval"
        return f"{undecided}: {_difference(contrast)} {reason}{costs}."
    digits = contrast.digits

    def with_interval(level: float, low: float, high: float) -> str:
        ends = f"{percent(level)} CI {signed(low, digits)} to {signed(high, digits)}"
        return _difference(contrast, f"{ends}, {contrast.n_seeds} seeds")

    difference = with_interval(1 - contrast.alpha, low, high)
    if contrast.verdict in ("better", "worse"):
        return f"{f' is {contrast.verdict} than '.join(names)}: {difference}{costs}."
    if contrast.verdict == "equivalent":
        error = math.sqrt((contrast.sd or 0.0) ** 2 / contrast.n_seeds + contrast.tuning_sd**2)
        half = float(special.stdtrit(contrast.df, 1 - contrast.alpha)) * error
        difference = with_interval(1 - 2 * contrast.alpha, mean - half, mean + half)
        within = f"within the equivalence margin of ±{margin:g}"
        return f"{' and '.join(names)} are equivalent: {difference}, {within}{costs}."
    if contrast.undecided_by in ("divergence", "edge", "flat"):
        return f"{undecided}: {difference}{costs}."
    if low * high > 0 and contrast.p is not None:
        difference += ", which excludes zero, but not after correction for the number of comparisons"
    return f"{undecided}: {difference}{costs}; {_limit(contrast)}."


def _undecided(contrast: Contrast, compared: str) -> str:
    """Without a full stop: that a comparison is undecided, and whose search has failed if that is the reason."""
    blamed = " and ".join(contrast.failed_arms)
    reasons = {
        "divergence": f", for no setting was found with which {blamed} trains",
        "edge": f", for the best settings of {blamed} lie beyond what was tried",
        "flat": f", for the learning rates of {blamed} that were tried make no difference",
    }
    return f"{compared} is undecided{reasons.get(str(contrast.undecided_by), '')}"


def _difference(contrast: Contrast, *about: str) -> str:
    """The mean difference, of losses as perplexity too, and what is to be known `about` it in brackets."""
    mean, unit = contrast.mean_difference or 0.0, METRICS[contrast.metric][1]
    number = f"{signed(mean, contrast.digits)} {unit}"
    if contrast.metric == "val_loss" and contrast.family != "interaction" and abs(mean) < TOO_FAR:
        share = f"{100 * abs(math.expm1(mean)):.1f} %"
        words = f"{share} {'lower' if mean < 0 else 'higher'}" if share != "0.0 %" else "the same"
        return f"{words} perplexity ({', '.join([number, *about])})"
    return " ".join([number, *(f"({text})" for text in about)])


def _limit(contrast: Contrast) -> str:
    if are_equal(contrast.sd or 0.0, contrast.mean_difference or 0.0):
        what = "no test" if contrast.p is None else "a weak test"
        return f"{contrast.n_seeds} equal differences are {what}: more seeds are needed"
    detectable = f"{fixed(contrast.minimum_detectable, contrast.digits)} is detectable"
    if contrast.limited_by == "tuning":
        return f"{detectable}, limited by the noise of tuning: more trials or tuning seeds are needed, not more seeds"
    return f"{detectable}, limited by the seeds"


def _lost(contrast: Contrast) -> str:
    """How many runs diverged, and on which seeds one failed."""
    parts = []
    if contrast.diverged:
        counts = {arm: f"on {len(contrast.diverged.get(arm, ()))} of {n}" for arm, n in contrast.ended.items()}
        (name, first), *rest = counts.items()
        parts += [", ".join([f"{name} diverged {first} seeds", *map(" ".join, rest)])]
    parts += [f"{arm} failed on seed {', '.join(map(str, seeds))}" for arm, seeds in contrast.broken.items()]
    return " and ".join(parts)


def _names(*pair: ArmRecord) -> tuple[str, str] | None:
    """The values of the one setting in which two arms differ, the first with its name; None if it is more."""
    overrides = [arm.overrides for arm in pair if arm.overrides]
    if len(overrides) < 2:
        return None
    (*added, own), (*others, other) = overrides
    key = key_of(own)
    if key_of(other) != key or own == other or added != others:
        return None
    return f"{key.rpartition('.')[2]}={own.partition('=')[2]}", other.partition("=")[2]


def _costs(*pair: ArmRecord) -> str:
    """The parameters and FLOPs of an arm beside those of its baseline; empty where they are not known."""
    sizes = {"parameters": [arm.n_params for arm in pair], "FLOPs per token": [arm.flops_per_token for arm in pair]}
    costs = ""
    for noun, (own, other) in sizes.items() if pair else ():
        change = 100 * abs(own / other - 1)
        more = f"{change:.2g}" if change < 99.5 else f"{change:.0f}"
        size = "same" if own == other else f"{more} % {'more' if own > other else 'fewer'}"
        costs += f"{', ' if costs else '; '}{size} {noun}"
    return costs
