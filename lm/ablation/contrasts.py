"""Comparisons of arms: from the runs' frame to a frame of contrasts with a verdict each.

A difference is a sum of the arms' metrics with weights, paired by seed: 1 for an arm and -1 for its baseline. An
interaction, a difference of two differences, has up to four arms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import pandas as pd

from lm.ablation.power import ALPHA, t_quantile
from lm.ablation.record import AblationRecord
from lm.ablation.response_surface import Regret, combine_regrets
from lm.ablation.statistics import judge
from lm.config.ablation import METRICS, interaction

FAMILIES = ("primary", "secondary", "interaction")  # each is corrected for its own number of comparisons
ENDED = ("done", "diverged")
Row = dict[str, Any]  # of the frame of contrasts, with the keys of INTERNAL
INTERNAL = ["sides", "weights", "runs", "failed_arms"]


def compare(
    record: AblationRecord,
    runs: pd.DataFrame,
    regrets: Mapping[str, Regret],
    failed_searches: Mapping[str, str] = MappingProxyType({}),
) -> pd.DataFrame:
    """A row for each arm against its baseline under each budget, then for each interaction.

    `failed_searches` has the arms whose best settings were not found: "divergence" or "edge".

    Columns: `family`, `arm`, `baseline` (of an interaction its name and its formula), `budget`, `primary`, `metric`,
    `equivalence_margin`, the fields of `Comparison`; `regret` and `baseline_regret`, the
    expected regrets of the tuned hyperparameters, and `mean_without_regret`; `seeds`, `differences`, `lost_seeds`,
    `n_planned`, `ended`, `diverged`, `broken`; and `sentence`, the verdict in words. Seeds and counts are by arm.
    `undecided_by` says why more seeds would not decide: "divergence" (an arm has no setting that trains), "survivors",
    or "edge" (settings that may undo a verdict lie beyond a search).
    """
    comparisons = [("", (arm, other), {arm: 1, other: -1}) for arm, other in record.contrasts.items()]
    interactions = [(name, *interaction(formula)) for name, formula in record.interactions.items()]
    rows = [
        _contrast(record, runs, budget, *comparison)
        for group in (comparisons, interactions)
        for budget in record.budgets
        for comparison in group
    ]
    for family in FAMILIES:
        _judge_family(record, [row for row in rows if row["family"] == family], regrets, failed_searches)
    return pd.DataFrame(rows).drop(columns=INTERNAL)


def level_of(record: AblationRecord) -> float:
    """The level of the tests, at each look if several are planned; 1 minus it is that of the intervals.

    It is divided by the number of looks, so that ALPHA holds for all of them whatever the distribution (Bonferroni).
    """
    return ALPHA / max(1, len(record.looks))


def _contrast(
    record: AblationRecord,
    runs: pd.DataFrame,
    budget: str,
    name: str,
    sides: tuple[str, str],
    weights: dict[str, int],
) -> Row:
    """The runs of a comparison and their differences. `name` is that of an interaction, `sides` are both in words."""
    of_arm = {arm: runs[(runs.arm == arm) & (runs.budget == budget)].set_index("seed") for arm in weights}
    scores = {arm: rows[record.metric][rows.status == "done"] for arm, rows in of_arm.items()}
    paired = [seed for seed in record.seeds if all(seed in scores[arm].index for arm in weights)]

    def seeds_of(condition: Callable[[pd.DataFrame], pd.Series]) -> dict[str, list[int]]:
        """By arm, if there are any."""
        seeds = {arm: [*map(int, rows.index[condition(rows)])] for arm, rows in of_arm.items()}
        return {arm: own for arm, own in seeds.items() if own}

    family = "interaction" if name else "primary" if sides[0] in record.primary else "secondary"
    return {
        "family": family,
        "arm": name or sides[0],
        "baseline": record.interactions[name] if name else sides[1],
        "budget": budget,
        "primary": family == "primary",
        "metric": record.metric,
        "equivalence_margin": record.equivalence_margin or None,
        "seeds": paired,  # that all arms have finished
        "differences": [float(sum(weight * scores[arm][seed] for arm, weight in weights.items())) for seed in paired],
        "lost_seeds": [seed for seed in record.seeds if seed not in paired],
        "n_planned": len(record.seeds),
        "ended": {arm: int(rows.status.isin(ENDED).sum()) for arm, rows in of_arm.items()},
        "diverged": seeds_of(lambda rows: rows.status == "diverged"),
        "broken": seeds_of(lambda rows: rows.is_own_failure),
        "sides": sides,
        "weights": weights,
        "failed_arms": [],  # whose searches have undone a verdict
        # the same for contrasts of the same runs: under several budgets they are one comparison
        "runs": " ".join(run_dir for rows in of_arm.values() for run_dir in rows.run_dir) or f"{sides} {budget}",
    }


def _judge_family(
    record: AblationRecord, rows: Sequence[Row], regrets: Mapping[str, Regret], failed_searches: Mapping[str, str]
) -> None:
    """Add to the rows of a family what their differences say."""
    lower_is_better, unit = METRICS[record.metric]
    tunings = {row["runs"]: combine_regrets(row["weights"], regrets) for row in rows}
    comparisons = judge(
        {row["runs"]: row["differences"] for row in rows},
        record.equivalence_margin,
        lower_is_better,
        {runs: tuning for runs, tuning in tunings.items() if tuning},
        level_of(record),
    )
    for row in rows:
        comparison, weights = asdict(comparisons[row["runs"]]), row["weights"]
        expected = {arm: regrets[arm].mean for arm in weights if arm in regrets}
        row |= comparison | {
            "undecided_by": None,
            "regret": expected.get(row["sides"][0]),  # an interaction may have the name of an arm
            "baseline_regret": expected.get(row["sides"][1]),
            "mean_without_regret": None,
            "is_tuning_counted": bool(tunings[row["runs"]]),
        }
        if not record.equivalence_margin:
            row |= {"p_equivalent": None, "p_equivalent_adjusted": None}
        if row["is_tuning_counted"] and row["mean_difference"] is not None:
            shift = sum(weight * expected[arm] for arm, weight in weights.items())
            row["mean_without_regret"] = row["mean_difference"] - (shift if lower_is_better else -shift)
        if undone := _undone(row, failed_searches):
            row |= {"undecided_by": undone[0], "failed_arms": undone[1], "verdict": "undecided", "limited_by": None}
        row["sentence"] = verdict_sentence(row, unit)


def _undone(row: Row, failed_searches: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Why a verdict cannot be given whatever the differences are, and the arms to which it is due.

    An arm of which no setting trains is compared with nothing. Against survivorship bias, an arm that diverged or
    failed can be called worse, not better or equivalent. An arm that would gain from more search can be called better,
    not worse or equivalent.
    """
    arms = {*row["weights"]}
    positive = {arm for arm, weight in row["weights"].items() if weight > 0}
    favoured = {"better": positive, "worse": arms - positive, "equivalent": arms, "undecided": set()}[row["verdict"]]
    opposed = arms - favoured if row["verdict"] in ("better", "worse") else arms
    reasons = {
        "divergence": {arm for arm in arms if failed_searches.get(arm) == "divergence"},
        "survivors": favoured & {*row["broken"], *row["diverged"]},
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


def verdict_sentence(row: Row, unit: str) -> str:
    """The verdict of a contrast in a sentence, with the seeds that it had to leave out for a reason."""
    sentence, undecided = _difference_sentence(row, unit), _undecided(row)
    if not (row["diverged"] or row["broken"]):
        return sentence
    rest = ""
    if row["mean_difference"] is not None:
        which = f"{'all' if row['family'] == 'interaction' else 'both'} finished"
        seeds = f"{row['n_seeds']} seed{'s' * (row['n_seeds'] > 1)} that {which}"
        digits = digits_of(row)
        rest = f"; on the {seeds} the difference is {row['mean_difference']:+z.{digits}f} {unit}"
    if row["verdict"] == "undecided" and rest:
        return f"{undecided}: {_missing(row)}{rest}."
    return f"{sentence} {_missing(row)}."


def _undecided(row: Row) -> str:
    """Without a full stop: that a comparison is undecided, and whose search has failed if that is the reason."""
    (arm, baseline), reason = row["sides"], ""
    if row["undecided_by"] == "divergence":
        reason = f", for no setting was found with which {' and '.join(row['failed_arms'])} trains"
    if row["undecided_by"] == "edge":
        reason = f", for the best settings of {' and '.join(row['failed_arms'])} lie beyond what was tried"
    return f"{arm} compared with {baseline} is undecided{reason}"


def _difference_sentence(row: Row, unit: str) -> str:
    """A verdict in words. Confidence intervals (CI) are not corrected for the number of comparisons.

    Differences are signed: arm minus baseline. Equivalence leaves 5 % for each side, so its CI is that of 90 %; where
    looks are planned, each leaves the level of a look.
    """
    arm, baseline = row["sides"]
    mean, low, high, margin = (row[key] for key in ("mean_difference", "ci_low", "ci_high", "equivalence_margin"))
    digits, undecided = digits_of(row), _undecided(row)
    if mean is None:
        return f"{undecided}: no seed has finished in both."
    if low is None:
        return f"{undecided}: {mean:+z.{digits}f} {unit} with one seed, which gives no confidence interval."

    def with_interval(level: float, low: float, high: float) -> str:
        ends = f"{percent(level)} CI {low:+z.{digits}f} to {high:+z.{digits}f}"
        return f"{mean:+z.{digits}f} {unit} ({ends}, {row['n_seeds']} seeds)"

    difference = with_interval(1 - row["alpha"], low, high)
    if row["verdict"] in ("better", "worse"):
        return f"{arm} is {row['verdict']} than {baseline}: {difference}."
    if row["verdict"] == "equivalent":
        error = math.sqrt(row["sd"] ** 2 / row["n_seeds"] + row["tuning_sd"] ** 2)
        half = t_quantile(1 - row["alpha"], row["df"] or 1) * error
        difference = with_interval(1 - 2 * row["alpha"], mean - half, mean + half)
        return f"{arm} and {baseline} are equivalent: {difference}, within the equivalence margin of ±{margin:g}."
    if row["undecided_by"] in ("divergence", "edge"):
        return f"{undecided}: {difference}."
    if low * high > 0:
        difference += ", which excludes zero, but not after correction for the number of comparisons"
    return f"{undecided}: {difference}; {_advice(row)}."


def _advice(row: Row) -> str:
    detectable = f"{row['minimum_detectable']:.{digits_of(row)}f} is detectable"
    if row["limited_by"] == "tuning":
        return f"{detectable}, limited by the noise of tuning: more trials or tuning seeds are needed, not more seeds"
    return f"{detectable}, limited by the seeds"


def _missing(row: Row) -> str:
    """How many runs diverged, and on which seeds one failed."""
    parts = []
    if row["diverged"]:
        counts = {arm: (len(row["diverged"].get(arm, ())), n) for arm, n in row["ended"].items()}
        (name, (k, n)), *rest = counts.items()
        parts += [
            ", ".join([f"{name} diverged on {k} of {n} seeds", *(f"{arm} on {k} of {n}" for arm, (k, n) in rest)])
        ]
    parts += [f"{arm} failed on seed {', '.join(map(str, seeds))}" for arm, seeds in row["broken"].items()]
    return " and ".join(parts)
