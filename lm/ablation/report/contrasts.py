"""The comparisons: every arm minus its baseline, as a forest plot and as tables."""

from collections.abc import Callable, Iterator, Sequence

from matplotlib.figure import Figure

from lm.ablation.judge.power import ALPHA, POWER
from lm.ablation.judge.study import Contrast, Study
from lm.ablation.report.answer import BUDGET_NAMES
from lm.ablation.report.forest import Line, draw_forest, label
from lm.report.page import plain, table
from lm.report.plots import drawing


def contrasts_section(study: Study, contrasts: Sequence[Contrast], pictures: dict[str, str]) -> list[str]:
    if not any(one.seeds for one in contrasts):
        return []
    pictures["forest"] = forest(study, contrasts)
    said = [(f"{one.arm} minus {one.baseline} at equal {BUDGET_NAMES[one.budget]}", one) for one in contrasts]
    alt = plain("; ".join(f"{words}: {label(one.comparison)} {one.comparison.verdict}" for words, one in said))
    margin = f"{study.record.equivalence_margin:g}"
    once = " Runs that serve several budgets are drawn once." if len(study.record.budgets) > 1 else ""
    return [
        "## Comparisons",
        f"Each row is an arm minus its baseline, in {study.unit}; {direction(study)}. Lines are 95 % confidence "
        f"intervals (CI). The shaded band is the equivalence margin of ±{margin}.{once}",
        f"![Differences with their 95 % CI. {alt}](figures/forest.svg)",
        *by_budget(study, contrasts, RESULT, result),
        "### How to read this",
        READING.format(margin=margin, alpha=ALPHA, power=100 * POWER),
        "### Test statistics",
        *by_budget(study, contrasts, STATISTICS, statistics),
    ]


RESULT = ("arm", "difference", "95 % CI", "verdict", "seeds", "baseline")
STATISTICS = ("arm", "p", "p (Holm)", "p equivalence (Holm)", "minimum detectable effect", "per-seed wins")
READING = """\
- **Bold** arms are the primary comparisons: they answer the question.
- **Pairing**: with the same seed, an arm and its baseline see the data in the same order and share the initialisation \
of all parameters that both have.
- **95 % CI**: the t interval of the mean paired difference, not corrected for the number of comparisons. Where arms \
were tuned, its error and that of all tests counts how far the settings of both may be from their best.
- **Verdict**: equivalent if p equivalence (Holm) is at most {alpha:g}; otherwise better or worse if p (Holm) is at \
most {alpha:g}; otherwise undecided.
- **p**: two-sided paired t test. **Holm**: corrected for the number of comparisons, primary and others separately.
- **p equivalence**: two one-sided t tests (TOST) of a true difference within ±{margin}; the 90 % CI of an equivalence \
belongs to them.
- **Minimum detectable effect**: the true difference that the t test, uncorrected, finds with {power:.0f} % power at \
this number of seeds and this standard deviation.
- **Per-seed wins**: the seeds with which the arm is better than its baseline."""


def direction(study: Study) -> str:
    return f"{'left' if study.lower_is_better else 'right'} is better"


def by_budget(
    study: Study, contrasts: Sequence[Contrast], head: Sequence[str], row: Callable[[Contrast], list[str]]
) -> Iterator[str]:
    """A table for each budget: a column less, so that it fits a telephone."""
    for budget in study.record.budgets:
        if len(study.record.budgets) > 1:
            yield f"**At equal {BUDGET_NAMES[budget]}**"
        yield table(head, [[named(one), *row(one)] for one in contrasts if one.budget == budget])


def named(one: Contrast) -> str:
    return f"**{plain(one.arm)}**" if one.primary else plain(one.arm)


def result(one: Contrast) -> list[str]:
    found = one.comparison
    ends = "-" if found.ci_low is None else f"{found.ci_low:+.4f}\N{NO-BREAK SPACE}to {found.ci_high:+.4f}"
    return [number(found.mean, "+.4f"), ends, found.verdict, str(found.n), plain(one.baseline)]


def statistics(one: Contrast) -> list[str]:
    found = one.comparison
    ps = (found.p_different, found.p_different_adjusted, found.p_equivalent_adjusted)
    least = number(found.minimum_detectable, ".4f")
    return [*(number(p, ".3f") for p in ps), least, f"{found.wins} of {found.n}"]


def number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return "<0.001" if form == ".3f" and value < 0.001 else format(value, form)


@drawing
def forest(study: Study, contrasts: Sequence[Contrast]) -> Figure:
    many, groups = len(study.record.budgets) > 1, dict[str, list[Line]]()
    drawn = {one.runs: one for one in reversed(contrasts)}  # the same runs at the first budget only
    for one in (one for one in contrasts if one.seeds and drawn[one.runs] is one):
        name = one.arm if one.baseline == study.record.baseline else f"{one.arm} - {one.baseline}"
        heading = f"At equal {BUDGET_NAMES[one.budget]}" if many else ""
        groups.setdefault(heading, []).append(Line(name, one.comparison, one.primary))
    return draw_forest(groups, study.record.equivalence_margin, f"difference, {study.unit} ({direction(study)})")
