"""The comparisons: every arm minus its baseline, as a forest plot and as tables."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.power import POWER
from lm.ablation.judge.sentence import percent
from lm.ablation.judge.study import Study
from lm.ablation.report.answer import BUDGET_NAMES
from lm.ablation.report.columns import DIVERGENCE, RESULTS, by_budget, of_interactions, statistics
from lm.ablation.report.forest import Line, draw_forest, label
from lm.report.page import plain
from lm.report.plots import drawing


def contrasts_section(study: Study, contrasts: Sequence[Contrast], pictures: dict[str, str]) -> list[str]:
    interactions = study.interactions()
    everything = [*contrasts, *interactions]
    if not any(one.seeds or one.diverged for one in contrasts):
        return []
    margin = f"{study.record.equivalence_margin:g}"
    return [
        "## Comparisons",
        *figure(study, everything, pictures),
        *by_budget(study, contrasts, RESULTS),
        *divergence_table(study, contrasts),
        *interactions_table(study, interactions),
        "### How to read this",
        READING.format(margin=margin, power=100 * POWER, **levels(study)),
        "### Test statistics",
        *by_budget(study, everything, statistics(everything)),
    ]


def figure(study: Study, contrasts: Sequence[Contrast], pictures: dict[str, str]) -> list[str]:
    if not any(one.seeds for one in contrasts):
        return []
    pictures["forest"] = forest(study, contrasts)
    said = [(f"{one.name} at equal {BUDGET_NAMES[one.budget]}", one) for one in contrasts]
    alt = plain("; ".join(f"{words}: {label(one.comparison)} {one.comparison.verdict}" for words, one in said))
    once = " Runs that serve several budgets are drawn once." if len(study.record.budgets) > 1 else ""
    return [
        f"Each row is an arm minus its baseline, in {study.unit}; {direction(study)}. Lines are confidence "
        f"intervals, {study.ci}. The shaded band is the equivalence margin of "
        f"±{study.record.equivalence_margin:g}.{once}",
        f"![Differences with their {study.ci}. {alt}](figures/forest.svg)",
    ]


def divergence_table(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    if not any(one.diverged for one in contrasts):
        return []
    return [
        "### Divergence",
        "How many of the runs that came to an end diverged, and p of Fisher's exact test that both arms diverge "
        "equally often, corrected by Holm's method together with the tests of the differences. If that is at most "
        f"{study.alpha:.3g}, the arm that diverges more often is worse, whatever its other seeds say. No test is made "
        "of so few that it could not be significant.",
        *by_budget(study, [one for one in contrasts if one.diverged], DIVERGENCE),
    ]


def interactions_table(study: Study, interactions: Sequence[Contrast]) -> list[str]:
    if not interactions:
        return []
    return [
        "### Interactions",
        "An interaction is a difference of two differences, seed by seed: better or worse means that the first "
        "difference favours its arm more, or less, than the second does. Interactions are corrected as a family.",
        *by_budget(study, interactions, of_interactions(study)),
    ]


READING = """\
- **Bold** arms are the primary comparisons: they answer the question.
- **Pairing**: with the same seed, an arm and its baseline see the data in the same order and share the initialisation \
of all parameters that both have.
- **{ci}**: the t interval of the mean paired difference, not corrected for the number of comparisons. Where arms \
were tuned, its error and that of all tests counts how far the settings of both may be from their best.{looks}
- **Verdict**: equivalent if p equivalence (Holm) is at most {alpha}; otherwise better or worse if p (Holm) is at \
most {alpha}; otherwise undecided.
- **p**: two-sided paired t test. **Holm**: corrected for the number of comparisons, primary and others separately.
- **p equivalence**: two one-sided t tests (TOST) of a true difference within ±{margin}; the {inner} CI of an \
equivalence belongs to them.
- **Minimum detectable effect**: the true difference that the t test finds with {power:.0f} % power at this number of \
seeds and this standard deviation, at a level of {alpha} divided by the number of comparisons.
- **p (sign-flip)**: the share of all patterns of signs of the differences that give a mean as far from zero. It needs \
no normal distribution, is not corrected, and does not count the noise of tuning.
- **Per-seed wins**: the seeds with which the arm is better than its baseline."""


def levels(study: Study) -> dict[str, str]:
    """The level of the tests in words; that of each look is chosen so that all looks together keep 5 %."""
    number = ", ".join(map(str, study.record.looks))
    said = (
        f" It is a repeated interval (Jennison and Turnbull, 1989): it holds at all planned looks at once (with "
        f"{number} seeds), as the level of {study.alpha:.3g} at each look does (Pocock, 1977, for t tests)."
    )
    inner = percent(1 - 2 * study.alpha)
    return {"alpha": f"{study.alpha:.3g}", "ci": study.ci, "inner": inner, "looks": said * bool(number)}


def direction(study: Study) -> str:
    return f"{'left' if study.lower_is_better else 'right'} is better"


@drawing
def forest(study: Study, contrasts: Sequence[Contrast]) -> Figure:
    many, groups = len(study.record.budgets) > 1, dict[str, list[Line]]()
    drawn = {one.runs: one for one in reversed(contrasts)}  # the same runs at the first budget only
    for one in (one for one in contrasts if one.seeds and drawn[one.runs] is one):
        name = one.arm if one.baseline == study.record.baseline else f"{one.arm} - {one.baseline}"
        heading = f"At equal {BUDGET_NAMES[one.budget]}" if many else ""
        if one.interaction:
            name, heading = one.interaction, f"Interactions{heading.replace('At', ' at')}"
        groups.setdefault(heading, []).append(Line(name, one.comparison, one.primary))
    return draw_forest(
        [*groups.items()], study.record.equivalence_margin, f"difference, {study.unit} ({direction(study)})"
    )
