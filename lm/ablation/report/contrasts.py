"""The contrasts: every arm minus the arm it is compared with, as a forest plot and as a table."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lm.ablation.judge.statistics import ALPHA, POWER
from lm.ablation.judge.study import Contrast, Study
from lm.ablation.report.answer import BUDGET_NAMES
from lm.ablation.report.forest import Line, draw_forest, label
from lm.ablation.report.page import plain, table
from lm.ablation.report.plots import drawing


def contrasts_section(study: Study, contrasts: Sequence[Contrast], pictures: dict[str, str]) -> list[str]:
    if not any(one.seeds for one in contrasts):
        return []
    pictures["forest"] = forest(study, contrasts)
    said = [(f"{one.arm} against {one.baseline} at equal {BUDGET_NAMES[one.budget]}", one) for one in contrasts]
    lines = [f"{words}: {label(one.comparison)}" for words, one in said]
    alt = plain(f"Difference of each contrast with its interval. {'; '.join(lines)}")
    margin = f"{study.record.equivalence_margin:g}"
    once = " Runs that serve several budgets are drawn under the first." if len(study.record.budgets) > 1 else ""
    return [
        "## The contrasts",
        f"Each arm minus the arm it is compared with, in {study.unit}; {direction(study)}. Lines: 95 % intervals. "
        f"Shaded: differences smaller than the {margin} that matters.{once}",
        f"![{alt}](figures/forest.svg)",
        contrasts_table(study, contrasts),
        "Bold: the primary contrasts. Arms are paired by seed: the same order of the data, the same start where they "
        "share parameters. Intervals are t intervals of the mean paired difference, each by itself: they are not "
        "widened for the number of contrasts. p: paired t test, two-sided. p (Holm): corrected for the number of "
        "primary contrasts; secondary ones are corrected among themselves. p equivalent (Holm): two one-sided t tests "
        f"against ±{margin}, corrected likewise. A verdict needs a corrected p of {ALPHA:g} or less. Detectable: the "
        f"true difference that as many seeds with this spread find with a probability of {100 * POWER:.0f} %, "
        "uncorrected. Seeds won: those on which the arm is better.",
    ]


def direction(study: Study) -> str:
    return f"{'left' if study.lower_is_better else 'right'} is better"


def contrasts_table(study: Study, contrasts: Sequence[Contrast]) -> str:
    many = len(study.record.budgets) > 1
    head = ["arm", "against", *["at equal"] * many, "seeds", "difference", "95 % interval", "verdict", "seeds won"]
    head += ["p", "p (Holm)", "p equivalent (Holm)", "detectable"]
    rows = []
    for one in contrasts:
        found, name = one.comparison, plain(one.arm)
        rows.append(
            [
                f"**{name}**" if one.primary else name,
                plain(one.baseline),
                *[BUDGET_NAMES[one.budget]] * many,
                str(found.n),
                number(found.mean, "+.4f"),
                "-" if found.ci_low is None else f"{found.ci_low:+.4f} to {found.ci_high:+.4f}",
                found.verdict,
                f"{found.wins} of {found.n}",
                number(found.p_different, ".3f"),
                number(found.p_different_adjusted, ".3f"),
                number(found.p_equivalent_adjusted, ".3f"),
                number(found.minimum_detectable, ".4f"),
            ]
        )
    return table(head, rows)


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
