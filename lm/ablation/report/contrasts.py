"""The contrasts: every arm minus the arm it is compared with, as a forest plot and as a table."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.ablation.report.answer import BUDGETS
from lm.ablation.report.page import plain, table
from lm.ablation.report.plots import drawing, legend, panels, short, window
from lm.ablation.statistics import ALPHA, POWER
from lm.ablation.study import Contrast, Study

VERDICTS = {  # colour and marker: the figure is to be read in black and white too
    "better": ("#0072B2", "^"),
    "worse": ("#D55E00", "v"),
    "equivalent": ("#000000", "s"),
    "undecided": ("#666666", "o"),
}


def contrasts_section(study: Study, contrasts: Sequence[Contrast], pictures: dict[str, str]) -> list[str]:
    if not any(one.seeds for one in contrasts):
        return []
    pictures["forest"] = forest(study, contrasts)
    lines = [f"{one.arm} against {one.baseline} at equal {BUDGETS[one.budget]}: {label(one)}" for one in contrasts]
    alt = plain(f"Difference of each contrast with its interval. {'; '.join(lines)}")
    matters = f"{study.record['matters']:g}"
    return [
        "## The contrasts",
        f"Each arm minus the arm it is compared with, in {study.unit}; {direction(study)}. Lines: 95 % intervals. "
        f"Shaded: differences smaller than the {matters} that matters.",
        f"![{alt}](figures/forest.svg)",
        contrasts_table(study, contrasts),
        "Bold: the primary contrasts. Arms are paired by seed: the same order of the data, the same start where they "
        "share parameters. Intervals are t intervals of the mean paired difference, each by itself: they are not "
        "widened for the number of contrasts. p: paired t test, two-sided. p (Holm): corrected for the number of "
        "primary contrasts; secondary ones are corrected among themselves. p equivalent (Holm): two one-sided t tests "
        f"against ±{matters}, corrected likewise. A verdict needs a corrected p of {ALPHA:g} or less. Detectable: the "
        f"true difference that as many seeds with this spread find with a probability of {100 * POWER:.0f} %, "
        "uncorrected. Seeds won: those on which the arm is better.",
    ]


def direction(study: Study) -> str:
    return f"{'left' if study.lower_is_better else 'right'} is better"


def label(one: Contrast) -> str:
    found = one.comparison
    if found.mean is None:
        return "no pair of runs yet"
    if found.ci_low is None:
        return f"{found.mean:+.4f} (one seed) {found.verdict}"
    return f"{found.mean:+.4f} [{found.ci_low:+.4f}, {found.ci_high:+.4f}] {found.verdict}"


def contrasts_table(study: Study, contrasts: Sequence[Contrast]) -> str:
    many = len(study.record["budgets"]) > 1
    head = ["arm", "against", *["at equal"] * many, "seeds", "difference", "95 % interval", "verdict", "seeds won"]
    head += ["p", "p (Holm)", "p equivalent (Holm)", "detectable"]
    rows = []
    for one in contrasts:
        found, name = one.comparison, plain(one.arm)
        rows.append(
            [
                f"**{name}**" if one.primary else name,
                plain(one.baseline),
                *[BUDGETS[one.budget]] * many,
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
    """A row for each contrast: its name and numbers above its interval, so that both have the whole width."""
    matters, many = study.record["matters"], len(study.record["budgets"]) > 1
    drawn = [one for one in contrasts if one.seeds]
    main = [one for one in drawn if one.primary] or drawn
    limits = window([*ends(main), 0, -matters, matters], ends(drawn), matters)
    budgets = list(dict.fromkeys(one.budget for one in drawn))
    figure, (axes,) = panels(1, 1.1 + 0.46 * len(drawn) + 0.4 * len(budgets) * many)
    axes.axvspan(-matters, matters, color="#ececec", lw=0)
    axes.axvline(0, color="black", lw=1)
    y = 0.0
    for budget in budgets:
        if many:
            write(axes, 0, y, f"At equal {BUDGETS[budget]}", style="italic")
            y += 0.8
        for one in (one for one in drawn if one.budget == budget):
            name = one.arm if one.baseline == study.record["baseline"] else f"{one.arm} - {one.baseline}"
            write(axes, 0, y - 0.05, short(name), weight="bold" if one.primary else "normal")
            write(axes, 1, y - 0.05, label(one), ha="right", fontsize=10)
            draw_contrast(axes, one, y + 0.37, limits)
            y += 1
    axes.set(xlim=limits, ylim=(y - 0.3, -0.6), yticks=[], xlabel=f"difference, {study.unit} ({direction(study)})")
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    for verdict in dict.fromkeys(one.comparison.verdict for one in drawn):
        axes.plot([], [], label=verdict, **mark(verdict))
    legend(figure, axes)
    return figure


def ends(contrasts: Sequence[Contrast]) -> list[float]:
    found = [(one.comparison.mean, one.comparison.ci_low, one.comparison.ci_high) for one in contrasts]
    return [value for triple in found for value in triple if value is not None]


def mark(verdict: str) -> dict[str, Any]:
    color, marker = VERDICTS[verdict]
    face = "white" if verdict == "undecided" else color
    return {"marker": marker, "color": color, "markerfacecolor": face, "markersize": 8, "linestyle": "none"}


def write(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """On a light ground: the line at zero would strike it through."""
    ground = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), va="center", bbox=ground, **options)


def draw_contrast(axes: Axes, one: Contrast, y: float, limits: tuple[float, float]) -> None:
    found, (color, _) = one.comparison, VERDICTS[one.comparison.verdict]
    assert found.mean is not None
    left = found.mean if found.ci_low is None else found.ci_low
    right = found.mean if found.ci_high is None else found.ci_high
    if left <= limits[1] and right >= limits[0]:
        axes.plot([max(left, limits[0]), min(right, limits[1])], [y, y], color=color, lw=2)
    for outside, edge, arrow in ((left < limits[0], limits[0], "<"), (right > limits[1], limits[1], ">")):
        if outside:  # it goes on there; the numbers tell how far
            axes.plot([edge], [y], arrow, color=color, clip_on=False)
    if limits[0] <= found.mean <= limits[1]:
        axes.plot([found.mean], [y], **mark(found.verdict))
