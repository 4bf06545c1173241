"""Comparisons of arms: from the runs' frame to a frame of contrasts with a verdict each.

A difference is a sum of the arms' metrics with weights, paired by seed: 1 for an arm and -1 for its baseline. Others,
such as an interaction, which is a difference of differences, have weights of their own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import pandas as pd

from lm.ablation.record import AblationRecord
from lm.ablation.response_surface import Regret, combine_regrets
from lm.ablation.statistics import ALPHA, Comparison, TuningVariance, judge, t_quantile
from lm.config.ablation import METRICS, weighted_sum

FAMILIES = ("primary", "secondary", "interaction")  # each is corrected for its own number of comparisons
ENDED = ("done", "diverged")
INTERNAL = ("sides", "weights", "runs", "failed_arms", "is_stopped")  # no columns


@dataclass(kw_only=True)
class Paired:
    """What is compared, and the runs that there are of it. Seeds and counts are by arm."""

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
    is_stopped: bool  # after `futility` seeds, for it was not ahead
    weights: dict[str, float]
    sides: tuple[str, str]  # what is compared with what, in words
    runs: str  # the same for contrasts of the same runs: under several budgets they are one comparison


@dataclass(kw_only=True)
class Contrast(Paired, Comparison):
    """A comparison with its verdict."""

    regret: float | None  # expected, of the arm's tuned hyperparameters
    baseline_regret: float | None
    mean_without_regret: float | None
    is_tuning_counted: bool
    undecided_by: str | None = None
    failed_arms: list[str] = field(default_factory=list)  # whose searches have undone a verdict

    def row(self) -> dict[str, Any]:
        shown = {key: value for key, value in vars(self).items() if key not in INTERNAL}
        return shown | {"sentence": verdict_sentence(self, METRICS[self.metric][1])}


def compare(
    record: AblationRecord,
    runs: pd.DataFrame,
    regrets: Mapping[str, Regret],
    failed_searches: Mapping[str, str] = MappingProxyType({}),
) -> pd.DataFrame:
    """A row for each arm against its baseline under each budget, then for each weighted sum.

    `failed_searches` has the arms whose best settings were not found: "divergence" or "edge".

    Columns: the fields of a Contrast, but for those of INTERNAL, and `sentence`, the verdict in words. `undecided_by`
    says why more seeds would not decide: "divergence" (an arm has no setting that trains), "survivors", "edge"
    (settings that may undo a verdict lie beyond a search), or "futility" (the arm was stopped: not ahead).
    """
    weights = [{arm: 1.0, other: -1.0} for arm, other in record.pairs.items()]
    members = [_paired(record, runs, budget, own) for budget in record.budgets for own in weights]
    sums = record.contrasts.items()
    members += [_paired(record, runs, budget, own, name) for budget in record.budgets for name, own in sums]
    tunings = {member.runs: combine_regrets(member.weights, regrets) for member in members}
    tested = {family: _tested(record, family, members, tunings) for family in FAMILIES}
    contrasts = [
        _contrast(member, tested[member.family][member.runs], regrets, bool(tunings[member.runs]), failed_searches)
        for member in members
    ]
    return pd.DataFrame([contrast.row() for contrast in contrasts])


def level_of(record: AblationRecord) -> float:
    """The level of the tests, at each look if several are planned; 1 minus it is that of the intervals.

    It is divided by the number of looks, so that ALPHA holds for all of them whatever the distribution (Bonferroni).
    """
    return ALPHA / max(1, len(record.looks))


def _paired(
    record: AblationRecord, runs: pd.DataFrame, budget: str, weights: dict[str, float], name: str = ""
) -> Paired:
    """The runs of a comparison and their differences; `name` is that of a weighted sum."""
    of_arm = {arm: runs[(runs.arm == arm) & (runs.budget == budget)].set_index("seed") for arm in weights}
    scores = {arm: rows[record.metric][rows.status == "done"] for arm, rows in of_arm.items()}
    arm, other = sides = _sides(weights)
    planned = record.seeds if name else record.seeds_of(arm)
    paired = [seed for seed in planned if all(seed in scores[arm].index for arm in weights)]

    def seeds_of(condition: Callable[[pd.DataFrame], pd.Series]) -> dict[str, list[int]]:
        """By arm, if there are any."""
        seeds = {arm: [*map(int, rows.index[condition(rows)])] for arm, rows in of_arm.items()}
        return {arm: own for arm, own in seeds.items() if own}

    family = "interaction" if name else "primary" if arm in record.primary else "secondary"
    return Paired(
        family=family,
        arm=name or arm,
        baseline=weighted_sum(weights) if name else other,
        budget=budget,
        primary=family == "primary",
        metric=record.metric,
        equivalence_margin=record.equivalence_margin or None,
        seeds=paired,
        differences=[float(sum(weight * scores[arm][seed] for arm, weight in weights.items())) for seed in paired],
        lost_seeds=[seed for seed in planned if seed not in paired],
        n_planned=len(planned),
        ended={arm: int(rows.status.isin(ENDED).sum()) for arm, rows in of_arm.items()},
        diverged=seeds_of(lambda rows: rows.status == "diverged"),
        broken=seeds_of(lambda rows: rows.is_own_failure),
        is_stopped=not name and arm in record.stopped,
        weights=weights,
        sides=sides,
        runs=" ".join(run_dir for rows in of_arm.values() for run_dir in rows.run_dir) or f"{sides} {budget}",
    )


def _sides(weights: Mapping[str, float]) -> tuple[str, str]:
    """What is compared with what, in words: the arms with positive weights, and the others.

    >>> _sides({"a": 1, "b": -1, "c": -1, "d": 1})
    ('a + d', 'b + c')
    """
    first, second = ({arm: sign * w for arm, w in weights.items() if sign * w > 0} for sign in (1, -1))
    return weighted_sum(first), weighted_sum(second)


def _tested(
    record: AblationRecord, family: str, members: Sequence[Paired], tunings: Mapping[str, TuningVariance | None]
) -> dict[str, Comparison]:
    own = {member.runs: member for member in members if member.family == family}
    return judge(
        {runs: member.differences for runs, member in own.items()},
        record.equivalence_margin,
        METRICS[record.metric][0],
        {runs: tuning for runs, tuning in tunings.items() if tuning and runs in own},
        level_of(record),
        {runs for runs, member in own.items() if member.is_stopped},
    )


def _contrast(
    member: Paired,
    tested: Comparison,
    regrets: Mapping[str, Regret],
    is_tuning_counted: bool,
    failed_searches: Mapping[str, str],
) -> Contrast:
    expected = {arm: regrets[arm].mean for arm in member.weights if arm in regrets}
    values = {**asdict(tested), **vars(member)}
    if member.equivalence_margin is None:
        values |= {"p_equivalent": None, "p_equivalent_adjusted": None}
    without = None
    if is_tuning_counted and tested.mean_difference is not None:
        shift = sum(weight * expected[arm] for arm, weight in member.weights.items())
        without = tested.mean_difference - (shift if METRICS[member.metric][0] else -shift)
    if undone := _undone(member, tested.verdict, failed_searches):
        values |= {"undecided_by": undone[0], "failed_arms": undone[1], "verdict": "undecided", "limited_by": None}
    regret, baseline_regret = (expected.get(side) for side in member.sides)
    return Contrast(
        **values,
        regret=regret,
        baseline_regret=baseline_regret,
        mean_without_regret=without,
        is_tuning_counted=is_tuning_counted,
    )


def _undone(member: Paired, verdict: str, failed_searches: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Why a verdict cannot be given whatever the differences are, and the arms to which it is due.

    An arm that was stopped has too few pairs for one. An arm of which no setting trains is compared with nothing.
    Against survivorship bias, an arm that diverged or failed can be called worse, not better or equivalent. An arm that
    would gain from more search can be called better, not worse or equivalent.
    """
    arms = {*member.weights}
    positive = {arm for arm, weight in member.weights.items() if weight > 0}
    favoured = {"better": positive, "worse": arms - positive, "equivalent": arms, "undecided": set()}[verdict]
    opposed = arms - favoured if verdict in ("better", "worse") else arms
    reasons = {
        "futility": {member.arm} if member.is_stopped else set(),
        "divergence": {arm for arm in arms if failed_searches.get(arm) == "divergence"},
        "survivors": favoured & {*member.broken, *member.diverged},
        "edge": {arm for arm in opposed if failed_searches.get(arm) == "edge"},
    }
    return next(((reason, sorted(blamed)) for reason, blamed in reasons.items() if blamed), None)


# --- a verdict in words


def decimals(margin: float) -> int:
    """Decimals with which a difference is printed: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))


def digits_of(row: Any) -> int:
    """The decimals of a contrast. Without a margin half the interval takes its place, or a hundredth of the mean.

    >>> digits_of({"equivalence_margin": None, "mean_difference": 80.0, "ci_low": 78.0, "ci_high": 82.0})
    2
    """
    margin, *ends = (row[key] for key in ("equivalence_margin", "ci_low", "ci_high"))
    mean, low, high = (0.0 if pd.isna(x) else x for x in (row["mean_difference"], *ends))
    return decimals(margin or max((high - low) / 2, abs(mean) / 100) or 1.0)


def percent(level: float) -> str:
    """A confidence level, to a tenth.

    >>> percent(0.95), percent(0.97888)
    ('95 %', '97.9 %')
    """
    return f"{100 * level:.3g} %"


def verdict_sentence(contrast: Contrast, unit: str) -> str:
    """The verdict of a contrast in a sentence, with the seeds that it had to leave out for a reason."""
    sentence, undecided = _difference_sentence(contrast, unit), _undecided(contrast)
    if not (contrast.diverged or contrast.broken):
        return sentence
    rest = ""
    if contrast.mean_difference is not None:
        which = f"{'all' if contrast.family == 'interaction' else 'both'} finished"
        seeds = f"{contrast.n_seeds} seed{'s' * (contrast.n_seeds > 1)} that {which}"
        digits = digits_of(vars(contrast))
        rest = f"; on the {seeds} the difference is {contrast.mean_difference:+z.{digits}f} {unit}"
    if contrast.verdict == "undecided" and rest:
        return f"{undecided}: {_missing(contrast)}{rest}."
    return f"{sentence} {_missing(contrast)}."


def _undecided(contrast: Contrast) -> str:
    """Without a full stop: that a comparison is undecided, and whose search has failed if that is the reason."""
    (arm, baseline), reason = contrast.sides, ""
    if contrast.undecided_by == "divergence":
        reason = f", for no setting was found with which {' and '.join(contrast.failed_arms)} trains"
    if contrast.undecided_by == "edge":
        reason = f", for the best settings of {' and '.join(contrast.failed_arms)} lie beyond what was tried"
    if contrast.undecided_by == "futility":
        reason = f", for it was stopped: not ahead after {contrast.n_planned} seed{'s' * (contrast.n_planned > 1)}"
    return f"{arm} compared with {baseline} is undecided{reason}"


def _difference_sentence(contrast: Contrast, unit: str) -> str:
    """A verdict in words. Confidence intervals (CI) are not corrected for the number of comparisons.

    Differences are signed: arm minus baseline. Equivalence leaves 5 % for each side, so its CI is that of 90 %; where
    looks are planned, each leaves the level of a look.
    """
    arm, baseline = contrast.sides
    mean, low, high, margin = contrast.mean_difference, contrast.ci_low, contrast.ci_high, contrast.equivalence_margin
    digits, undecided = digits_of(vars(contrast)), _undecided(contrast)
    if mean is None:
        return f"{undecided}: no seed has finished in both."
    if low is None and contrast.undecided_by == "futility":
        return f"{undecided}: {mean:+z.{digits}f} {unit}."
    if low is None or high is None:
        return f"{undecided}: {mean:+z.{digits}f} {unit} with one seed, which gives no confidence interval."

    def with_interval(level: float, low: float, high: float) -> str:
        ends = f"{percent(level)} CI {low:+z.{digits}f} to {high:+z.{digits}f}"
        return f"{mean:+z.{digits}f} {unit} ({ends}, {contrast.n_seeds} seeds)"

    difference = with_interval(1 - contrast.alpha, low, high)
    if contrast.verdict in ("better", "worse"):
        return f"{arm} is {contrast.verdict} than {baseline}: {difference}."
    if contrast.verdict == "equivalent":
        error = math.sqrt((contrast.sd or 0.0) ** 2 / contrast.n_seeds + contrast.tuning_sd**2)
        half = t_quantile(1 - contrast.alpha, contrast.df or 1) * error
        difference = with_interval(1 - 2 * contrast.alpha, mean - half, mean + half)
        return f"{arm} and {baseline} are equivalent: {difference}, within the equivalence margin of ±{margin:g}."
    if contrast.undecided_by in ("divergence", "edge", "futility"):
        return f"{undecided}: {difference}."
    if low * high > 0:
        difference += ", which excludes zero, but not after correction for the number of comparisons"
    return f"{undecided}: {difference}; {_advice(contrast)}."


def _advice(contrast: Contrast) -> str:
    detectable = f"{contrast.minimum_detectable:.{digits_of(vars(contrast))}f} is detectable"
    if contrast.limited_by == "tuning":
        return f"{detectable}, limited by the noise of tuning: more trials or tuning seeds are needed, not more seeds"
    return f"{detectable}, limited by the seeds"


def _missing(contrast: Contrast) -> str:
    """How many runs diverged, and on which seeds one failed."""
    parts = []
    if contrast.diverged:
        counts = {arm: (len(contrast.diverged.get(arm, ())), n) for arm, n in contrast.ended.items()}
        (name, (k, n)), *rest = counts.items()
        parts += [
            ", ".join([f"{name} diverged on {k} of {n} seeds", *(f"{arm} on {k} of {n}" for arm, (k, n) in rest)])
        ]
    parts += [f"{arm} failed on seed {', '.join(map(str, seeds))}" for arm, seeds in contrast.broken.items()]
    return " and ".join(parts)
