"""The comparisons over the value of one setting, for a question that asks when, how much or how many."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.study import Study
from lm.ablation.report.answer import BUDGET_NAMES
from lm.report.page import code, plain
from lm.report.plots import drawing, panels

Series = dict[str, list[tuple[float, Contrast]]]  # baseline -> comparisons by their arm's value


def setting_section(study: Study, contrasts: Sequence[Contrast], pictures: dict[str, str]) -> list[str]:
    key = study.record.plot_over
    if key is None or not any(series(study, contrasts, budget) for budget in study.record.budgets):
        return []
    pictures["setting"] = setting(study, contrasts)
    return [
        f"## Comparisons over {plain(key)}",
        f"Each arm minus its baseline over the arm's {code(key)}: mean and {study.ci}; "
        f"{'below' if study.lower_is_better else 'above'} zero is better. A hollow mark is the baseline. The shaded "
        f"band is the equivalence margin of ±{study.record.equivalence_margin:g}.",
        f"![Comparisons over {plain(key)}](figures/setting.svg)",
    ]


def series(study: Study, contrasts: Sequence[Contrast], budget: str) -> Series:
    """A series for each baseline; comparisons of two arms with the same value are a series of their own."""
    key, found = str(study.record.plot_over), dict[str, list[tuple[float, Contrast]]]()
    for one in contrasts:
        value, other = (study.record.arms[arm].settings.get(key) for arm in (one.arm, one.baseline))
        if one.budget == budget and one.seeds and isinstance(value, int | float):
            name = f"minus the arm of the same {key}" if value == other else f"minus {one.baseline}"
            found.setdefault(name, []).append((float(value), one))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


@drawing
def setting(study: Study, contrasts: Sequence[Contrast]) -> Figure:
    """A panel for each series under each budget: arms with the same value may differ far less than the others."""
    many = len(study.record.budgets) > 1
    drawn = [
        (f"{name}, at equal {BUDGET_NAMES[budget]}" if many else name, points)
        for budget in study.record.budgets
        for name, points in series(study, contrasts, budget).items()
    ]
    values = sorted({value for _, points in drawn for value, _ in points})
    figure, axes = panels(len(drawn), 2.2, 0.2, sharex=True)
    for one, (title, points) in zip(axes, drawn, strict=True):
        one.set(ylabel=study.unit, title=title)
        draw_series(one, study, points)
        if 0 < 8 * values[0] < values[-1]:
            one.set_xscale("log")
            one.xaxis.set_minor_locator(NullLocator())
            one.set_xticks(values, [f"{value:g}" for value in values])
    axes[-1].set_xlabel(str(study.record.plot_over))
    return figure


def draw_series(axes: Axes, study: Study, points: list[tuple[float, Contrast]]) -> None:
    margin, key, color = study.record.equivalence_margin, str(study.record.plot_over), "#0072B2"
    axes.axhspan(-margin, margin, color="#ececec", lw=0)
    axes.axhline(0, color="black", lw=1)
    known = [(value, one.comparison) for value, one in points]
    owns = [study.record.arms[other].settings.get(key) for other in dict.fromkeys(one.baseline for _, one in points)]
    zeros = [(own, 0.0) for own in owns if isinstance(own, int | float) and own not in dict(known)]
    means = [(value, one.mean) for value, one in known if one.mean is not None]
    axes.plot(*zip(*sorted(means + zeros), strict=True), "o-", color=color)
    for own, zero in zeros:
        axes.plot([own], [zero], "o", color=color, mfc="white")
    for value, one in known:
        if one.ci_low is not None and one.ci_high is not None:
            axes.vlines(value, one.ci_low, one.ci_high, color=color)
