"""Comparisons of arms: from the runs' frame to a frame of contrasts with a verdict each.

A difference is a sum of the arms' metrics with weights, paired by seed: 1 for an arm and -1 for its baseline. An
interaction, a difference of two differences, has up to four arms.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from lm.ablation.power import MAX_SEEDS, TuningVariance, t_quantile
from lm.ablation.record import AblationRecord
from lm.ablation.response_surface import Regret, combine_regrets
from lm.ablation.statistics import Comparison, Divergence, judge, normality_p, pocock_level, sign_flip_p
from lm.config.ablation import METRICS, interaction

FAMILIES = ("primary", "secondary", "interaction")  # each is corrected for its own number of comparisons
ENDED = ("done", "diverged")


@dataclass(slots=True, kw_only=True)
class Contrast:
    """A comparison under one budget, before it is judged together with its family."""

    interaction: str  # its name; empty for the difference of two arms
    arm: str  # of an interaction the first difference, in words
    baseline: str  # of an interaction the second one
    budget: str
    family: str
    differences: dict[int, float]  # by seed that all arms have finished
    lost_seeds: list[int]  # that lack a run
    ended: dict[str, int]  # arm -> how many of its runs finished or diverged
    diverged: dict[str, list[int]]  # arm -> the seeds on which it did, if any
    broken: dict[str, list[int]]  # arm -> the seeds on which it failed for a reason of its own, if any
    weights: dict[str, int]
    runs: str  # the same for contrasts of the same runs: under several budgets they are one comparison

    def divergence(self) -> Divergence | None:
        """None for an interaction, in which no two arms are compared."""
        if self.family == "interaction":
            return None
        counts = ((len(self.diverged.get(arm, ())), self.ended[arm]) for arm in (self.arm, self.baseline))
        return Divergence(*(number for pair in counts for number in pair))


def compare(record: AblationRecord, runs: pd.DataFrame, regrets: Mapping[str, Regret]) -> pd.DataFrame:
    """A row for each arm against its baseline under each budget, then for each interaction.

    Columns: `family`, `arm`, `baseline` (of an interaction its name and its formula), `budget`, `primary`, `metric`,
    `equivalence_margin`, the fields of `Comparison`, `p_sign_flip`, `p_normal`; `regret` and `baseline_regret`, the
    expected regrets of the tuned hyperparameters, and `mean_without_regret`; `seeds`, `differences`, `lost_seeds`,
    `n_planned`, `ended`, `diverged`, `broken`; and `sentence`, the verdict in words.
    """
    lower_is_better, unit = METRICS[record.metric]
    contrasts = [
        _contrast(record, runs, budget, sides, weights, name)
        for name, sides, weights in _comparisons(record)
        for budget in record.budgets
    ]
    contrasts.sort(key=lambda one: (one.family == "interaction", record.budgets.index(one.budget)))
    rows: dict[int, dict[str, Any]] = {}
    for family in FAMILIES:
        members = {i: one for i, one in enumerate(contrasts) if one.family == family}
        tunings = {one.runs: combine_regrets(one.weights, regrets) for one in members.values()}
        comparisons = judge(
            {one.runs: [*one.differences.values()] for one in members.values()},
            record.equivalence_margin,
            lower_is_better,
            {runs: tuning for runs, tuning in tunings.items() if tuning},
            {one.runs: counts for one in members.values() if (counts := one.divergence())},
            level_of(record),
        )
        for i, one in members.items():
            comparison = _apply_survivorship_rule(one, comparisons[one.runs])
            rows[i] = _row(record, one, comparison, regrets, lower_is_better, tunings[one.runs]) | {
                "metric": record.metric,
                "n_planned": len(record.seeds),
                "equivalence_margin": record.equivalence_margin,
                "sentence": verdict_sentence(one, comparison, unit, record.equivalence_margin),
            }
    return pd.DataFrame([rows[i] for i in sorted(rows)])


def level_of(record: AblationRecord) -> float:
    """The level of the tests, at each look if several are planned; 1 minus it is that of the intervals."""
    largest_family = len(record.budgets) * max(len(record.contrasts), len(record.interactions))
    return pocock_level(tuple(record.looks), largest_family)


def _comparisons(record: AblationRecord) -> list[tuple[str, tuple[str, str], dict[str, int]]]:
    """The name (empty but for an interaction), both sides in words, and the weights of the arms."""
    pairs = [("", (arm, other), {arm: 1, other: -1}) for arm, other in record.contrasts.items()]
    return [*pairs, *((name, *interaction(formula)) for name, formula in record.interactions.items())]


def _contrast(
    record: AblationRecord,
    runs: pd.DataFrame,
    budget: str,
    sides: tuple[str, str],
    weights: dict[str, int],
    name: str,
) -> Contrast:
    rows = {arm: runs[(runs.arm == arm) & (runs.budget == budget)] for arm in weights}
    scores = {arm: dict(zip(of.seed, of[record.metric], strict=True)) for arm, of in rows.items()}
    finished = {arm: {*of.seed[of.status == "done"]} for arm, of in rows.items()}
    paired = [seed for seed in record.seeds if all(seed in finished[arm] for arm in weights)]
    diverged = {arm: [*map(int, of.seed[of.status == "diverged"])] for arm, of in rows.items()}
    broken = {arm: [*map(int, of.seed[of.is_own_failure])] for arm, of in rows.items()}
    family = "interaction" if name else "primary" if sides[0] in record.primary else "secondary"
    return Contrast(
        interaction=name,
        arm=sides[0],
        baseline=sides[1],
        budget=budget,
        family=family,
        differences={seed: sum(weight * scores[arm][seed] for arm, weight in weights.items()) for seed in paired},
        lost_seeds=[seed for seed in record.seeds if seed not in paired],
        ended={arm: int(of.status.isin(ENDED).sum()) for arm, of in rows.items()},
        diverged={arm: seeds for arm, seeds in diverged.items() if seeds},
        broken={arm: seeds for arm, seeds in broken.items() if seeds},
        weights=weights,
        runs=" ".join(run_dir for of in rows.values() for run_dir in of.run_dir) or f"{sides} {budget}",
    )


def _apply_survivorship_rule(one: Contrast, comparison: Comparison) -> Comparison:
    """Against survivorship bias: an arm that diverged or failed can be called worse, not better or equivalent."""
    favoured = {
        "better": {arm for arm, weight in one.weights.items() if weight > 0},
        "worse": {arm for arm, weight in one.weights.items() if weight < 0},
        "equivalent": one.weights.keys(),
    }
    incomplete = one.broken.keys() if comparison.by_divergence else one.broken.keys() | one.diverged.keys()
    if favoured.get(comparison.verdict, set()) & incomplete:
        return replace(comparison, verdict="undecided", by_divergence=False)
    return comparison


def _row(
    record: AblationRecord,
    one: Contrast,
    comparison: Comparison,
    regrets: Mapping[str, Regret],
    lower_is_better: bool,
    tuning: TuningVariance | None,
) -> dict[str, Any]:
    differences = [*one.differences.values()]
    expected = {arm: regrets[arm].mean for arm in one.weights if arm in regrets}
    pair = [expected.get(arm) for arm in (one.arm, one.baseline)]
    corrected = None
    if tuning and comparison.mean_difference is not None:
        shift = sum(weight * expected[arm] for arm, weight in one.weights.items())
        corrected = comparison.mean_difference - (shift if lower_is_better else -shift)
    return {
        "family": one.family,
        "arm": one.interaction or one.arm,
        "budget": one.budget,
        "baseline": record.interactions[one.interaction] if one.interaction else one.baseline,
        "primary": one.family == "primary",
        **asdict(comparison),
        "p_sign_flip": sign_flip_p(differences),
        "p_normal": normality_p(differences),
        "regret": pair[0],
        "baseline_regret": pair[1],
        "mean_without_regret": corrected,
        "seeds": [*one.differences],
        "differences": differences,
        "lost_seeds": one.lost_seeds,
        "ended": one.ended,
        "diverged": one.diverged,
        "broken": one.broken,
        "is_tuning_counted": bool(tuning),
    }


# --- a verdict in words


def decimals(margin: float) -> int:
    """Decimals with which a difference is printed: two more than the equivalence margin has."""
    return max(0, 2 - math.floor(math.log10(margin)))


def percent(level: float) -> str:
    """A confidence level, to a tenth.

    >>> percent(0.95), percent(0.97888)
    ('95 %', '97.9 %')
    """
    return f"{100 * level:.3g} %"


def verdict_sentence(one: Contrast, comparison: Comparison, unit: str, margin: float) -> str:
    """A verdict in a sentence, with the seeds that it had to leave out for a reason."""
    sentence = comparison_sentence(one.arm, one.baseline, comparison, unit, margin)
    if not (one.diverged or one.broken):
        return sentence
    rest = ""
    if comparison.mean_difference is not None:
        which = f"{'all' if one.family == 'interaction' else 'both'} finished"
        seeds = f"{comparison.n_seeds} seed{'s' * (comparison.n_seeds > 1)} that {which}"
        rest = f"; on the {seeds} the difference is {comparison.mean_difference:+z.{decimals(margin)}f} {unit}"
    if comparison.by_divergence:
        return f"{one.arm} is {comparison.verdict} than {one.baseline}: {_missing(one, comparison, 'it')}{rest}."
    if comparison.verdict == "undecided" and rest:
        return f"{one.arm} compared with {one.baseline} is undecided: {_missing(one, comparison)}{rest}."
    return f"{sentence} {_missing(one, comparison)}."


def comparison_sentence(name: str, baseline: str, one: Comparison, unit: str, margin: float) -> str:
    """A verdict in words. Confidence intervals (CI) are not corrected for the number of comparisons.

    Differences are signed: arm minus baseline. Equivalence leaves 5 % for each side, so its CI is that of 90 %; where
    looks are planned, each leaves the level of a look.
    """
    digits, undecided = decimals(margin), f"{name} compared with {baseline} is undecided"
    if one.mean_difference is None:
        return f"{undecided}: no seed has finished in both."
    mean = f"{one.mean_difference:+z.{digits}f} {unit}"
    if one.ci_low is None or one.ci_high is None:
        return f"{undecided}: {mean} with one seed, which gives no confidence interval."

    def with_interval(level: float, low: float, high: float) -> str:
        return f"{mean} ({percent(level)} CI {low:+z.{digits}f} to {high:+z.{digits}f}, {one.n_seeds} seeds)"

    difference = with_interval(1 - one.alpha, one.ci_low, one.ci_high)
    if one.verdict in ("better", "worse"):
        return f"{name} is {one.verdict} than {baseline}: {difference}."
    if one.verdict == "equivalent":
        half = t_quantile(1 - one.alpha, one.df or 1) * math.sqrt((one.sd or 0.0) ** 2 / one.n_seeds + one.tuning_sd**2)
        difference = with_interval(1 - 2 * one.alpha, one.mean_difference - half, one.mean_difference + half)
        return f"{name} and {baseline} are equivalent: {difference}, within the equivalence margin of ±{margin:g}."
    if one.ci_low * one.ci_high > 0:
        difference += ", which excludes zero, but not after correction for the number of comparisons"
    return f"{undecided}: {difference}; {_seeds_advice(one)}."


def _seeds_advice(one: Comparison) -> str:
    low, high = one.seeds_needed_low, one.seeds_needed_high
    if low is None:
        return f"even {MAX_SEEDS} seeds would probably not decide"
    if high is None:
        return f"{low} new seeds could decide, but it may take more than {MAX_SEEDS} (80 % range)"
    return f"{low} to {high} new seeds (80 % range) would probably decide"


def _missing(one: Contrast, comparison: Comparison, subject: str | None = None) -> str:
    """How many runs diverged, and on which seeds one failed; `subject` is what the arm is called."""
    parts, names = [], {arm: arm for arm in one.weights} | ({one.arm: subject} if subject else {})
    if one.diverged:
        (name, k, n), *rest = [(names[arm], len(one.diverged.get(arm, ())), n) for arm, n in one.ended.items()]
        words = [f"{name} diverged on {k} of {n} seeds", *(f"{name} on {k} of {n}" for name, k, n in rest)]
        parts.append(", ".join(words) + _divergence_p(comparison))
    parts += [f"{names[arm]} failed on seed {', '.join(map(str, seeds))}" for arm, seeds in one.broken.items()]
    return " and ".join(parts)


def _divergence_p(comparison: Comparison) -> str:
    """The p of the divergences, in brackets; empty if they were too few to test."""
    p, adjusted = comparison.p_diverged, comparison.p_diverged_adjusted
    if p is None or adjusted is None:
        return ""
    return f" (Fisher's exact test, p = {adjusted:.2g}{', corrected for the number of tests' * (adjusted > p)})"
