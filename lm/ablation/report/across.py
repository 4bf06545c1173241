"""Comparisons across ablations: each in bits per byte, and how far it is from that of the first ablation."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, variance

from lm.ablation.judge.contrasts import Contrast, paired
from lm.ablation.judge.power import Tuning, critical, welch
from lm.ablation.judge.statistics import Comparison, difference_p, holm, interval
from lm.ablation.judge.study import Study
from lm.ablation.report.answer import BUDGET_NAMES, primary


@dataclass(slots=True)
class Shown:
    """A comparison of one ablation, in the unit of its report and in bits per byte."""

    folder: Path
    study: Study
    contrast: Contrast
    bits: Comparison
    differences: dict[int, float]  # in bits per byte, by seed
    tuning: Tuning | None  # in bits per byte

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for the same comparison in every ablation."""
        return self.contrast.arm, self.contrast.baseline, self.contrast.budget

    def heading(self, name: Callable[[str], str] = str) -> str:
        """`name`: how an arm is called."""
        arm, baseline, budget = self.key
        return f"{name(arm)} - {name(baseline)}, at equal {BUDGET_NAMES[budget]}"


def shown(folder: Path, study: Study) -> list[Shown]:
    """The comparisons of losses that have a pair of runs; one whose runs serve two budgets once."""
    found: dict[str, Shown] = {}
    for one in primary(study.contrasts()):
        if not (one.seeds and study.lower_is_better) or one.runs in found:
            continue
        ours, theirs = (study.scores(arm, one.budget, "val_bpb") for arm in (one.arm, one.baseline))
        differences = paired(one.weights, {one.arm: ours, one.baseline: theirs}, one.seeds)
        bits = list(differences.values())
        tuning = one.tuning
        if tuning:  # bits per byte for one of the metric are the same for all arms of one tokenizer
            rate = fmean(ours.values()) / fmean(study.scores(one.arm, one.budget).values())
            tuning = replace(tuning, variance=tuning.variance * rate**2)
        low, high = interval(bits, tuning=tuning) or (None, None)
        same = replace(one.comparison, mean=fmean(bits), ci_low=low, ci_high=high)
        found[one.runs] = Shown(folder, study, one, same, differences, tuning)
    return list(found.values())


@dataclass(slots=True)
class Apart:
    """A comparison minus the same one of the first ablation, in bits per byte."""

    mean: float
    by_seed: bool
    low: float | None = None  # of the 95 % interval, not corrected
    high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None  # for the number of such differences in the overview


def all_apart(groups: Iterable[list[Shown]]) -> dict[tuple[Path, str], Apart]:
    """By folder and runs, how far each comparison is from the first of its group."""
    found = {(one.folder, one.contrast.runs): apart(one, first) for first, *others in groups for one in others}
    tested = [one for one in found.values() if one.p is not None]
    for one, p in zip(tested, holm([one.p or 0.0 for one in tested]), strict=True):
        one.p_adjusted = p
    return found


def apart(one: Shown, first: Shown) -> Apart:
    """Paired by seed where more than half of the seeds of both are the same, else by Welch (1947).

    Runs of a seed share what they can also between ablations, which makes their differences dependent. Pairs that
    happen to share nothing cost degrees of freedom, and no more. The noise of tuning is added.
    """
    both = paired({"one": 1, "first": -1}, {"one": one.differences, "first": first.differences}, first.differences)
    by_seed = 2 * len(both) > max(len(one.differences), len(first.differences))
    samples = [[*both.values()]] if by_seed else [[*of.differences.values()] for of in (one, first)]
    mean = fmean(samples[0]) - sum(map(fmean, samples[1:]))
    if min(map(len, samples)) < 2:
        return Apart(mean, by_seed)
    parts = [(variance(values) / len(values), len(values) - 1) for values in samples]
    parts += [(of.tuning.variance, of.tuning.df) for of in (one, first) if of.tuning]
    if not any(part for part, _ in parts):
        return Apart(mean, by_seed, mean, mean, float(mean == 0))
    total, df = welch(*parts)
    half = critical(0.975, df) * math.sqrt(total)
    return Apart(mean, by_seed, mean - half, mean + half, difference_p(mean, math.sqrt(total), 1, df))
