"""Warnings about the verdicts: a search that was too short, a difference that may not matter or not last."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.power import ALPHA
from lm.ablation.judge.sentence import decimals
from lm.ablation.judge.shape import normality_p
from lm.ablation.judge.statistics import holm, interval
from lm.ablation.judge.study import Study
from lm.ablation.record import Caution
from lm.ablation.report.answer import BUDGET_NAMES
from lm.ablation.report.curves import halfway, mean_curves
from lm.ablation.report.tuning import best_trial

EDGES = {  # what a search says of a hyperparameter -> the warning
    False: ("The best value lies at the edge of the search range", "A better value may lie beyond it."),
    None: ("Some hyperparameters were not varied", "There were too few search trials for all of them."),
}


def untuned(study: Study) -> Iterator[Caution]:
    for arm, trials in study.record.untuned.items():
        named = ", ".join(f"{trial}.log" for trial in trials)
        yield Caution(f"{arm} could not be tuned.", f"A trial failed ({named}). Call ablate again to repeat it.")


def edges(study: Study) -> Iterator[Caution]:
    for lies, (head, meaning) in EDGES.items():
        searches = study.searches.items()
        outer = {arm: [key for key, where in one.inside.items() if where is lies] for arm, one in searches}
        if named := "; ".join(f"{arm} ({', '.join(keys)})" for arm, keys in outer.items() if keys):
            yield Caution(f"{head}: {named}.", meaning)


def few_trials(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """Tuned arms whose regret is not known."""
    pairs = [one for one in asked if not one.tuning and one.weights.keys() <= study.searches.keys()]
    if named := ", ".join(f"{one.name}{at(study, one)}" for one in pairs if one.seeds):
        yield Caution(
            f"The noise of tuning is not counted: {named}.",
            "For k hyperparameters this needs 2k + 1 trials that did not diverge. The interval counts the seeds only.",
        )


def unlike_trials(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """A difference above the margin, where that of the best trials is below it, and smaller by a margin or more."""
    margin, digits = study.record.equivalence_margin, decimals(study.record.equivalence_margin)
    for one, lead in decided(asked, study.record.budgets[0]):
        best = [best_trial(study, study.searches[arm]) for arm in (one.arm, one.baseline) if arm in study.searches]
        if len(values := [trial.score for trial in best if trial and trial.score is not None]) < 2:
            continue
        apart = values[0] - values[1]
        shown = math.copysign(1, lead) * apart
        if abs(lead) >= margin > shown and abs(lead) - shown >= margin:
            yield Caution(
                f"The search trials do not show the difference between {one.arm} and {one.baseline}{at(study, one)}.",
                f"It is {apart:+.{digits}f} between their best trials. Hyperparameters that suit a seed by chance can "
                "cause this: tune on more seeds (ablation.tune.seeds).",
            )


def small(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """A difference that is shown can still be smaller than the margin."""
    margin = study.record.equivalence_margin
    for one, _ in decided(asked):
        if min(abs(one.comparison.ci_low or 0), abs(one.comparison.ci_high or 0)) < margin:
            names = f"between {one.arm} and {one.baseline}{at(study, one)}"
            meaning = f"The {study.ci} reaches into the equivalence margin of ±{margin:g}."
            yield Caution(f"The difference {names} may be too small to matter.", meaning)


def shape(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """Differences that are skewed or spiked, after correction for their number (Holm)."""
    runs = {one.runs: one for one in reversed(asked)}  # under several budgets the same runs are one
    ps = holm([normality_p(one.differences) for one in runs.values()])
    odd = [one for one, p in zip(runs.values(), ps, strict=True) if p <= ALPHA]
    if named := ", ".join(f"{one.name}{at(study, one)}" for one in reversed(odd)):
        yield Caution(
            f"Differences are skewed or have outliers: {named}.",
            "The t test takes them for normal; of such differences it finds one where there is none in about 10 of 100 "
            "cases, not 5. Look at the results per seed.",
        )


def fading(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """A difference that shrinks in the second half of training so fast that as much again leaves less than the margin.

    A hint: halfway a run is not what a run of half the steps ends as, for its learning rate is still high.
    """
    margin, digits = study.record.equivalence_margin, decimals(study.record.equivalence_margin)
    for one, lead in decided(asked, study.record.budgets[0]):
        if not (pairs := halfway(study, one.arm, one.baseline)):
            continue
        before, now = map(fmean, zip(*pairs, strict=True))
        low, high = interval([end - half for half, end in pairs]) or (0, 0)
        shrinks = low > 0 if lead < 0 else high < 0
        if shrinks and margin <= abs(lead) < margin + abs(now - before):
            yield Caution(
                f"The difference between {one.arm} and {one.baseline} shrinks during training{at(study, one)}.",
                f"It was {before:+.{digits}f} halfway through training and {now:+.{digits}f} at the end. Longer "
                "training may change the verdict: repeat the ablation with twice the steps.",
            )


def rising(study: Study) -> Iterator[Caution]:
    """Arms that overfit, as models do that see a small text in many epochs. Estimates are compared with estimates."""
    curves = mean_curves(study, alike=True) if study.lower_is_better else {}
    rises = {arm: curve[max(curve)][0] - min(mean for mean, _, _ in curve.values()) for arm, curve in curves.items()}
    margin = study.record.equivalence_margin
    if named := ", ".join(f"{arm} (by {rise:.2g})" for arm, rise in rises.items() if rise > margin):
        yield Caution(f"The validation loss rises before the end: {named}.", "The ablation compares overfitted models.")


def decided(asked: Sequence[Contrast], budget: str | None = None) -> Iterator[tuple[Contrast, float]]:
    """Comparisons with a difference that was shown, of one budget or of all, and that difference."""
    for one in asked:
        found = one.comparison
        if found.verdict in ("better", "worse") and not found.by_divergence and budget in (None, one.budget):
            yield one, found.mean or 0.0


def at(study: Study, one: Contrast) -> str:
    return f" at equal {BUDGET_NAMES[one.budget]}" if len(study.record.budgets) > 1 else ""
