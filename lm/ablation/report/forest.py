"""A forest plot: a row for each comparison, its interval on one scale with the others, grouped under headings."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.ablation.judge.statistics import Comparison
from lm.report.plots import legend, panels, short, window

VERDICTS = {  # colour and marker: the figure is to be read in black and white too
    "better": ("#0072B2", "^"),
    "worse": ("#D55E00", "v"),
    "equivalent": ("#000000", "s"),
    "undecided": ("#666666", "o"),
}
FAR = 5  # times the middle difference


@dataclass(slots=True, frozen=True)
class Line:
    name: str
    comparison: Comparison  # with a mean
    bold: bool = False


def label(found: Comparison) -> str:
    if found.mean is None:
        return "no pair of runs yet"
    if found.ci_low is None:
        return f"{found.mean:+.4f} (one seed)"
    return f"{found.mean:+.4f} [{found.ci_low:+.4f}, {found.ci_high:+.4f}]"


def draw_forest(groups: Sequence[tuple[str, Sequence[Line]]], margin: float, xlabel: str) -> Figure:
    """Name and numbers of a row stand above its interval, and the line at zero is drawn beside intervals only.

    Bold rows set the scale, or, where there are none, those that are not far off. `margin` is shaded around zero; 0 for
    nothing. A group whose heading is empty has none.
    """
    lines = [line for _, group in groups for line in group]
    main = [line for line in lines if line.bold] or near(lines)
    limits = window([*ends(main), 0, -margin, margin], ends(lines), margin)
    figure, (axes,) = panels(1, 1.1 + 0.46 * len(lines) + 0.4 * sum(bool(heading) for heading, _ in groups))
    y = 0.0
    for heading, group in groups:
        if heading:
            write(axes, 0, y, heading, style="italic")
            y += 0.8
        for line in group:
            write(axes, 0, y - 0.05, short(line.name), weight="bold" if line.bold else "normal")
            write(axes, 1, y - 0.05, label(line.comparison), ha="right", fontsize=10)
            axes.fill_betweenx([y + 0.2, y + 0.54], -margin, margin, color="#e4e4e4", lw=0)
            axes.plot([0, 0], [y + 0.2, y + 0.54], color="black", lw=1)
            draw(axes, line.comparison, y + 0.37, limits)
            y += 1
    axes.set(xlim=limits, ylim=(y - 0.3, -0.6), yticks=[], xlabel=xlabel)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    for verdict in dict.fromkeys(line.comparison.verdict for line in lines):
        axes.plot([], [], label=verdict, **mark(verdict))
    legend(figure, axes)
    return figure


def near(lines: Sequence[Line]) -> list[Line]:
    """Those whose differences are not many times as large as the middle one's."""
    sizes = [abs(line.comparison.mean or 0) for line in lines]
    return [line for line, size in zip(lines, sizes, strict=True) if size <= FAR * median(sizes)]


def ends(lines: Sequence[Line]) -> list[float]:
    found = [(line.comparison.mean, line.comparison.ci_low, line.comparison.ci_high) for line in lines]
    return [value for triple in found for value in triple if value is not None]


def mark(verdict: str) -> dict[str, Any]:
    color, marker = VERDICTS[verdict]
    face = "white" if verdict == "undecided" else color
    return {"marker": marker, "color": color, "markerfacecolor": face, "markersize": 8, "linestyle": "none"}


def write(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), va="center", **options)


def draw(axes: Axes, found: Comparison, y: float, limits: tuple[float, float]) -> None:
    color, _ = VERDICTS[found.verdict]
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
