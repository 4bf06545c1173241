"""Comparisons of arms: differences paired by seed, a verdict on each, and what is said of it.

A difference is a sum of the arms' metrics with weights: 1 for an arm and -1 for its baseline. An interaction, a
difference of two differences, has four arms.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lm.ablation.judge.divergence import Divergence
from lm.ablation.judge.power import Tuning
from lm.ablation.judge.sentence import decimals, sentence
from lm.ablation.judge.statistics import Comparison, judge


@dataclass(slots=True)
class Contrast:
    arm: str  # of an interaction the first difference, in words
    baseline: str  # of an interaction the second one
    budget: str
    primary: bool
    weights: dict[str, int]  # of each arm in a difference
    seeds: list[int]  # that all arms have finished
    differences: list[float]  # in the order of the seeds
    lost: list[int]  # seeds that lack a run
    ended: dict[str, int]  # arm -> how many of its runs came to an end, finished or diverged
    diverged: dict[str, list[int]]  # arm -> the seeds on which it did, if any
    broken: dict[str, list[int]]  # arm -> the seeds on which it failed for a reason of its own, if any
    runs: str  # the same for contrasts of the same runs: under several budgets they are one comparison
    tuning: Tuning | None  # None: the interval counts the seeds only
    interaction: str | None = None  # its name
    comparison: Comparison = field(init=False)

    @property
    def name(self) -> str:
        return self.interaction or f"{self.arm} minus {self.baseline}"

    @property
    def divergence(self) -> Divergence | None:
        """None for an interaction, in which no two arms are compared."""
        if self.interaction:
            return None
        counts = ((len(self.diverged.get(arm, ())), self.ended[arm]) for arm in (self.arm, self.baseline))
        return Divergence(*(number for pair in counts for number in pair))


def paired(
    weights: Mapping[str, int], scores: Mapping[str, Mapping[int, float]], seeds: Iterable[int]
) -> dict[int, float]:
    """By seed, the sum of the scores with these weights; a seed that one of them lacks is left out."""
    whole = [seed for seed in seeds if all(seed in scores[name] for name in weights)]
    return {seed: sum(weight * scores[name][seed] for name, weight in weights.items()) for seed in whole}


def decide(family: Sequence[Contrast], margin: float, lower_is_better: bool, alpha: float) -> None:
    """Set the comparison of each at a level; they are corrected for their number."""
    differences = {one.runs: one.differences for one in family}
    noise = {one.runs: one.tuning for one in family if one.tuning}
    divergences = {one.runs: one.divergence for one in family if one.divergence}
    found = judge(differences, margin, lower_is_better, noise, divergences, alpha)
    for one in family:
        one.comparison = without_praise_of_survivors(one, found[one.runs])


def without_praise_of_survivors(one: Contrast, found: Comparison) -> Comparison:
    """Against survivorship bias: an arm that diverged or failed can be called worse, not better or equivalent."""
    praised = {
        "better": {arm for arm, weight in one.weights.items() if weight > 0},
        "worse": {arm for arm, weight in one.weights.items() if weight < 0},
        "equivalent": one.weights.keys(),
    }
    survivors = one.broken.keys() if found.by_divergence else one.broken.keys() | one.diverged.keys()
    if praised.get(found.verdict, set()) & survivors:
        return replace(found, verdict="undecided", by_divergence=False)
    return found


def say(one: Contrast, unit: str, margin: float) -> str:
    """A verdict in a sentence, with the seeds that it had to leave out for a reason."""
    found = one.comparison
    said = sentence(one.arm, one.baseline, found, unit, margin)
    if not (one.diverged or one.broken):
        return said
    others = ""
    if found.mean is not None:
        n = f"{found.n} seed{'s' * (found.n > 1)} that {'all' if one.interaction else 'both'} finished"
        others = f"; on the {n} the difference is {found.mean:+z.{decimals(margin)}f} {unit}"
    if found.by_divergence:
        return f"{one.arm} is {found.verdict} than {one.baseline}: {lost(one, 'it')}{others}."
    if found.verdict == "undecided" and others:
        return f"{one.arm} compared with {one.baseline} is undecided: {lost(one)}{others}."
    return f"{said} {lost(one)}."


def lost(one: Contrast, subject: str | None = None) -> str:
    """How many runs diverged, and on which seeds one failed; `subject` is what the arm is called."""
    parts, names = [], {arm: arm for arm in one.weights} | ({one.arm: subject} if subject else {})
    if one.diverged:
        counts = [(names[arm], len(one.diverged.get(arm, ())), n) for arm, n in one.ended.items()]
        (name, k, n), *rest = counts
        words = [f"{name} diverged on {k} of {n} seeds", *(f"{name} on {k} of {n}" for name, k, n in rest)]
        parts.append(", ".join(words) + tested(one.comparison))
    parts += [f"{names[arm]} failed on seed {', '.join(map(str, seeds))}" for arm, seeds in one.broken.items()]
    return " and ".join(parts)


def tested(found: Comparison) -> str:
    """The p of the divergences, in brackets; empty if they were too few to test."""
    if found.p_diverged is None or found.p_diverged_adjusted is None:
        return ""
    corrected = ", corrected for the number of tests" * (found.p_diverged_adjusted > found.p_diverged)
    return f" (Fisher's exact test, p = {found.p_diverged_adjusted:.2g}{corrected})"
