"""Comparisons of arms: from the runs' frame to a frame of contrasts with a verdict each.

A difference is a sum of the arms' metrics with weights, paired by seed: 1 for an arm and -1 for its baseline. Others,
such as an interaction, which is a difference of differences, have weights of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import pandas as pd

from lm.ablation.record import AblationRecord
from lm.ablation.response_surface import Regret, combine_regrets
from lm.ablation.sentences import sentence
from lm.ablation.statistics import ALPHA, Comparison, TuningVariance, judge
from lm.config.ablation import METRICS, weighted_sum

FAMILIES = ("primary", "secondary", "interaction")  # each is corrected for its own number of comparisons
ENDED = ("done", "diverged")
INTERNAL = ("sides", "weights", "key", "failed_arms", "is_stopped")  # no columns


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
    is_stopped: bool  # after `futility` seeds, for it was not ahead
    weights: dict[str, float]
    sides: tuple[str, str]  # what is compared with what, in words
    key: str  # weights and runs: the same under several budgets that the same runs serve, which are one comparison
    regret: float | None = None  # expected, of the arm's tuned hyperparameters
    baseline_regret: float | None = None
    mean_without_regret: float | None = None
    is_tuning_counted: bool = False
    undecided_by: str | None = None
    failed_arms: list[str] = field(default_factory=list)  # whose searches have undone a verdict

    def row(self, record: AblationRecord) -> dict[str, Any]:
        shown = {key: value for key, value in vars(self).items() if key not in INTERNAL}
        return shown | {"sentence": sentence(self, record)}


NUMBERS = {item.name: float for item in fields(Contrast) if item.type == float | None}  # a missing one is NaN


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
    tunings = {member.key: combine_regrets(member.weights, regrets) for member in members}
    tested = {family: _tested(record, family, members, tunings) for family in FAMILIES}
    contrasts = [
        _contrast(member, tested[member.family][member.key], regrets, bool(tunings[member.key]), failed_searches)
        for member in members
    ]
    return pd.DataFrame([contrast.row(record) for contrast in contrasts]).astype(NUMBERS)


def level_of(record: AblationRecord) -> float:
    """The level of the tests, at each look if several are planned; 1 minus it is that of the intervals.

    It is divided by the number of looks, so that ALPHA holds for all of them whatever the distribution (Bonferroni).
    """
    return ALPHA / max(1, len(record.looks))


def _paired(
    record: AblationRecord, runs: pd.DataFrame, budget: str, weights: dict[str, float], name: str = ""
) -> Contrast:
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
    return Contrast(
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
        key=f"{weights} {[run_dir for rows in of_arm.values() for run_dir in rows.run_dir] or budget}",
    )


def _sides(weights: Mapping[str, float]) -> tuple[str, str]:
    """What is compared with what, in words: the arms with positive weights, and the others.

    >>> _sides({"a": 1, "b": -1, "c": -1, "d": 1})
    ('a + d', 'b + c')
    """
    first, second = ({arm: sign * w for arm, w in weights.items() if sign * w > 0} for sign in (1, -1))
    return weighted_sum(first), weighted_sum(second)


def _tested(
    record: AblationRecord, family: str, members: Sequence[Contrast], tunings: Mapping[str, TuningVariance | None]
) -> dict[str, Comparison]:
    own = {member.key: member for member in members if member.family == family}
    return judge(
        {key: member.differences for key, member in own.items()},
        record.equivalence_margin,
        METRICS[record.metric][0],
        {key: tuning for key, tuning in tunings.items() if tuning and key in own},
        level_of(record),
        {key for key, member in own.items() if member.is_stopped},
    )


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
