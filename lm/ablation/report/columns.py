"""The tables of the comparisons, column by column."""

from collections.abc import Callable, Iterator, Sequence

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.shape import sign_flip_p
from lm.ablation.judge.study import Study
from lm.ablation.report.answer import BUDGET_NAMES
from lm.report.page import code, plain, table

Columns = dict[str, Callable[[Contrast], str]]  # head -> the text of a cell


def by_budget(study: Study, contrasts: Sequence[Contrast], columns: Columns) -> Iterator[str]:
    """A table for each budget: a column less, so that it fits a telephone."""
    for budget in study.record.budgets:
        if len(study.record.budgets) > 1:
            yield f"**At equal {BUDGET_NAMES[budget]}**"
        rows = [[cell(one) for cell in columns.values()] for one in contrasts if one.budget == budget]
        yield table([head.replace("95 % CI", study.ci) for head in columns], rows)


RESULTS: Columns = {
    "arm": lambda one: named(one),
    "difference": lambda one: number(one.comparison.mean, "+.4f"),
    "95 % CI": lambda one: ends(one),
    "verdict": lambda one: one.comparison.verdict,
    "seeds": lambda one: str(one.comparison.n),
    "baseline": lambda one: plain(one.baseline),
}
DIVERGENCE: Columns = {
    "arm": lambda one: named(one),
    "diverged": lambda one: diverged(one, one.arm),
    "baseline": lambda one: plain(one.baseline),
    "baseline diverged": lambda one: diverged(one, one.baseline),
    "p": lambda one: number(one.comparison.p_diverged, ".3f"),
    "p (Holm)": lambda one: number(one.comparison.p_diverged_adjusted, ".3f"),
}


def of_interactions(study: Study) -> Columns:
    shared = {head: cell for head, cell in RESULTS.items() if head not in ("arm", "baseline")}
    formulas = study.record.interactions
    return {"interaction": named, **shared, "formula": lambda one: code(formulas[str(one.interaction)])}


def statistics(contrasts: Sequence[Contrast]) -> Columns:
    found: Columns = {
        "arm": named,
        "p": lambda one: number(one.comparison.p_different, ".3f"),
        "p (Holm)": lambda one: number(one.comparison.p_different_adjusted, ".3f"),
        "p equivalence (Holm)": lambda one: number(one.comparison.p_equivalent_adjusted, ".3f"),
    }
    if any(sign_flip_p(one.differences) is not None for one in contrasts):
        found["p (sign-flip)"] = lambda one: number(sign_flip_p(one.differences), ".3f")
    return found | {
        "minimum detectable effect": lambda one: number(one.comparison.minimum_detectable, ".4f"),
        "per-seed wins": lambda one: f"{one.comparison.wins} of {one.comparison.n}",
    }


def named(one: Contrast) -> str:
    name = plain(one.interaction or one.arm)
    return f"**{name}**" if one.primary else name


def ends(one: Contrast) -> str:
    found = one.comparison
    return "-" if found.ci_low is None else f"{found.ci_low:+.4f}\N{NO-BREAK SPACE}to {found.ci_high:+.4f}"


def diverged(one: Contrast, arm: str) -> str:
    return f"{len(one.diverged.get(arm, ()))} of {one.ended[arm]}"


def number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return "<0.001" if form == ".3f" and value < 0.001 else format(value, form)
