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
    `n_planned`, `ended`, `diverged`, `broken`; and `sentence`, the verdict in words. Seeds and counts are by arm.
    """
    lower_is_better, _ = METRICS[record.metric]
    contrasts = [
        _contrast(record, runs, budget, sides, weights, name)
        for name, sides, weights in _comparisons(record)
        for budget in record.budgets
    ]
    contrasts.sort(key=lambda contrast: (contrast.family == "interaction", record.budgets.index(contrast.budget)))
    rows: dict[int, dict[str, Any]] = {}
    for family in FAMILIES:
        members = {i: contrast for i, contrast in enumerate(contrasts) if contrast.family == family}
        tunings = {contrast.runs: combine_regrets(contrast.weights, regrets) for contrast in members.values()}
        comparisons = judge(
            {contrast.runs: [*contrast.differences.values()] for contrast in members.values()},
            record.equivalence_margin,
            lower_is_better,
            {runs: tuning for runs, tuning in tunings.items() if tuning},
            {contrast.runs: counts for contrast in members.values() if (counts := contrast.divergence())},
            level_of(record),
        )
        for i, contrast in members.items():
            comparison = _apply_survivorship_rule(contrast, comparisons[contrast.runs])
            rows[i] = _row(record, contrast, comparison, regrets, tunings[contrast.runs])
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
    of_arm = {arm: runs[(runs.arm == arm) & (runs.budget == budget)] for arm in weights}
    scores = {arm: dict(zip(rows.seed, rows[record.metric], strict=True)) for arm, rows in of_arm.items()}
    finished = {arm: {*rows.seed[rows.status == "done"]} for arm, rows in of_arm.items()}
    paired = [seed for seed in record.seeds if all(seed in finished[arm] for arm in weights)]
    diverged = {arm: [*map(int, rows.seed[rows.status == "diverged"])] for arm, rows in of_arm.items()}
    broken = {arm: [*map(int, rows.seed[rows.is_own_failure])] for arm, rows in of_arm.items()}
    family = "interaction" if name else "primary" if sides[0] in record.primary else "secondary"
    return Contrast(
        interaction=name,
        arm=sides[0],
        baseline=sides[1],
        budget=budget,
        family=family,
        differences={seed: sum(weight * scores[arm][seed] for arm, weight in weights.items()) for seed in paired},
        lost_seeds=[seed for seed in record.seeds if seed not in paired],
        ended={arm: int(rows.status.isin(ENDED).sum()) for arm, rows in of_arm.items()},
        diverged={arm: seeds for arm, seeds in diverged.items() if seeds},
        broken={arm: seeds for arm, seeds in broken.items() if seeds},
        weights=weights,
        runs=" ".join(run_dir for rows in of_arm.values() for run_dir in rows.run_dir) or f"{sides} {budget}",
    )


def _apply_survivorship_rule(contrast: Contrast, comparison: Comparison) -> Comparison:
    """Against survivorship bias: an arm that diverged or failed can be called worse, not better or equivalent.

    What becomes undecided by this has no seeds needed: more of them would not mend it.
    """
    favoured = {
        "better": {arm for arm, weight in contrast.weights.items() if weight > 0},
        "worse": {arm for arm, weight in contrast.weights.items() if weight < 0},
        "equivalent": contrast.weights.keys(),
    }
    incomplete = {*contrast.broken} if comparison.by_divergence else {*contrast.broken, *contrast.diverged}
    if favoured.get(comparison.verdict, set()) & incomplete:
        return replace(comparison, verdict="undecided", by_divergence=False)
    return comparison


def _row(
    record: AblationRecord,
    contrast: Contrast,
    comparison: Comparison,
    regrets: Mapping[str, Regret],
    tuning: TuningVariance | None,
) -> dict[str, Any]:
    differences = [*contrast.differences.values()]
    expected = {arm: regrets[arm].mean for arm in contrast.weights if arm in regrets}
    mean_without_regret = None
    if tuning and comparison.mean_difference is not None:
        shift = sum(weight * expected[arm] for arm, weight in contrast.weights.items())
        mean_without_regret = comparison.mean_difference - (shift if METRICS[record.metric][0] else -shift)
    return {
        "family": contrast.family,
        "arm": contrast.interaction or contrast.arm,
        "baseline": record.interactions[contrast.interaction] if contrast.interaction else contrast.baseline,
        "budget": contrast.budget,
        "primary": contrast.family == "primary",
        "metric": record.metric,
        "equivalence_margin": record.equivalence_margin,
        **asdict(comparison),
        "p_sign_flip": sign_flip_p(differences),
        "p_normal": normality_p(differences),
        "regret": expected.get(contrast.arm),
        "baseline_regret": expected.get(contrast.baseline),
        "mean_without_regret": mean_without_regret,
        "is_tuning_counted": bool(tuning),
        "seeds": [*contrast.differences],
        "differences": differences,
        "lost_seeds": contrast.lost_seeds,
        "n_planned": len(record.seeds),
        "ended": contrast.ended,
        "diverged": contrast.diverged,
        "broken": contrast.broken,
        "sentence": verdict_sentence(contrast, comparison, METRICS[record.metric][1], record.equivalence_margin),
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


def verdict_sentence(contrast: Contrast, comparison: Comparison, unit: str, margin: float) -> str:
    """A verdict in a sentence, with the seeds that it had to leave out for a reason."""
    arm, baseline = contrast.arm, contrast.baseline
    sentence = comparison_sentence(arm, baseline, comparison, unit, margin)
    if not (contrast.diverged or contrast.broken):
        return sentence
    rest = ""
    if comparison.mean_difference is not None:
        which = f"{'all' if contrast.family == 'interaction' else 'both'} finished"
        seeds = f"{comparison.n_seeds} seed{'s' * (comparison.n_seeds > 1)} that {which}"
        rest = f"; on the {seeds} the difference is {comparison.mean_difference:+z.{decimals(margin)}f} {unit}"
    if comparison.by_divergence:
        return f"{arm} is {comparison.verdict} than {baseline}: {_missing(contrast, comparison, 'it')}{rest}."
    if comparison.verdict == "undecided" and rest:
        return f"{arm} compared with {baseline} is undecided: {_missing(contrast, comparison)}{rest}."
    return f"{sentence} {_missing(contrast, comparison)}."


def comparison_sentence(arm: str, baseline: str, comparison: Comparison, unit: str, margin: float) -> str:
    """A verdict in words. Confidence intervals (CI) are not corrected for the number of comparisons.

    Differences are signed: arm minus baseline. Equivalence leaves 5 % for each side, so its CI is that of 90 %; where
    looks are planned, each leaves the level of a look.
    """
    digits, undecided = decimals(margin), f"{arm} compared with {baseline} is undecided"
    if comparison.mean_difference is None:
        return f"{undecided}: no seed has finished in both."
    mean = f"{comparison.mean_difference:+z.{digits}f} {unit}"
    if comparison.ci_low is None or comparison.ci_high is None:
        return f"{undecided}: {mean} with one seed, which gives no confidence interval."

    def with_interval(level: float, low: float, high: float) -> str:
        return f"{mean} ({percent(level)} CI {low:+z.{digits}f} to {high:+z.{digits}f}, {comparison.n_seeds} seeds)"

    difference = with_interval(1 - comparison.alpha, comparison.ci_low, comparison.ci_high)
    if comparison.verdict in ("better", "worse"):
        return f"{arm} is {comparison.verdict} than {baseline}: {difference}."
    if comparison.verdict == "equivalent":
        variance = (comparison.sd or 0.0) ** 2 / comparison.n_seeds + comparison.tuning_sd**2
        half = t_quantile(1 - comparison.alpha, comparison.df or 1) * math.sqrt(variance)
        low, high = comparison.mean_difference - half, comparison.mean_difference + half
        difference = with_interval(1 - 2 * comparison.alpha, low, high)
        return f"{arm} and {baseline} are equivalent: {difference}, within the equivalence margin of ±{margin:g}."
    if comparison.ci_low * comparison.ci_high > 0:
        difference += ", which excludes zero, but not after correction for the number of comparisons"
    return f"{undecided}: {difference}; {_seeds_advice(comparison)}."


def _seeds_advice(comparison: Comparison) -> str:
    low, high = comparison.seeds_needed_low, comparison.seeds_needed_high
    if low is None:
        return f"even {MAX_SEEDS} seeds would probably not decide"
    if high is None:
        return f"{low} new seeds could decide, but it may take more than {MAX_SEEDS} (80 % range)"
    return f"{low} to {high} new seeds (80 % range) would probably decide"


def _missing(contrast: Contrast, comparison: Comparison, subject: str | None = None) -> str:
    """How many runs diverged, and on which seeds one failed; `subject` is what the arm is called."""
    parts, names = [], {arm: arm for arm in contrast.weights} | ({contrast.arm: subject} if subject else {})
    if contrast.diverged:
        counts = {names[arm]: (len(contrast.diverged.get(arm, ())), n) for arm, n in contrast.ended.items()}
        (name, (k, n)), *rest = counts.items()
        words = [f"{name} diverged on {k} of {n} seeds", *(f"{name} on {k} of {n}" for name, (k, n) in rest)]
        parts.append(", ".join(words) + _divergence_p(comparison))
    parts += [f"{names[arm]} failed on seed {', '.join(map(str, seeds))}" for arm, seeds in contrast.broken.items()]
    return " and ".join(parts)


def _divergence_p(comparison: Comparison) -> str:
    """The p of the divergences, in brackets; empty if they were too few to test."""
    p, adjusted = comparison.p_diverged, comparison.p_diverged_adjusted
    if p is None or adjusted is None:
        return ""
    return f" (Fisher's exact test, p = {adjusted:.2g}{', corrected for the number of tests' * (adjusted > p)})"
