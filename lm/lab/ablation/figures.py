"""The figures of an ablation's report. Colour, dashes and marker of an arm are the same in all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from lm.lab.ablation.contrasts import Contrast
from lm.lab.ablation.record import AblationRecord
from lm.lab.ablation.results import Results, curve_table, gap_table, over_seeds
from lm.lab.report.figures import (
    INK,
    LINE,
    NAME,
    PAPER,
    SOFT,
    LineStyle,
    axis_limits,
    legend,
    line_styles,
    log_axis,
    panels,
    shorten,
    tokens_axis,
)

VERDICT_MARKERS = {"better": "^", "worse": "v", "equivalent": "s", "undecided": "o"}
ROW = 0.4  # inches, of a line of the forest
FAR = 5  # times the middle difference
Row = tuple[str, str, Contrast]  # label and colour of a comparison


def forest(results: Results) -> Figure | None:
    """Every comparison of different runs once, the primary ones in bold."""
    record, styles = results.record, line_styles(list(results.record.arms))
    groups = dict[str, list[Row]]()
    for contrast in (contrast for contrast in results.comparisons if contrast.mean_difference is not None):
        label = contrast.name.removesuffix(f" - {record.baseline}")
        is_sum = contrast.family == "interaction"
        color, heading = (INK, "Interactions") if is_sum else (styles[contrast.arm].color, "")
        groups.setdefault(heading, []).append((label, color, contrast))
    side = "left" if results.lower_is_better else "right"
    return draw_forest(groups, record.equivalence_margin, f"difference, {results.unit} ({side} is better)")


def draw_forest(groups: Mapping[str, Sequence[Row]], margin: float, xlabel: str) -> Figure | None:
    """A line for each comparison: its interval, the mean as the marker of its verdict, and each seed as a dot below.

    `groups`: by their headings, which may be empty. Bold ones set the scale, or, where there are none, those that are
    not far off. `margin` is 0 for no band.
    """
    contrasts = [contrast for rows in groups.values() for *_, contrast in rows]
    if not contrasts:
        return None
    far = FAR * median(abs(contrast.mean_difference or 0.0) for contrast in contrasts)
    near = [contrast for contrast in contrasts if abs(contrast.mean_difference or 0.0) <= far]
    main = [contrast for contrast in contrasts if contrast.primary] or near
    limits = axis_limits([*_ends(*main), 0, -margin, margin], _ends(*contrasts), margin, reach=0.5)
    lines: list[tuple[str, str, Contrast | None]] = []  # comparisons, and the headings between them
    for heading, rows in groups.items():
        lines += [(heading, INK, None)] * bool(heading) + [*rows]
    figure, (axes,) = panels(1, 1.1 + ROW * len(lines))
    axes.set(xlim=limits, ylim=(len(lines) - 0.4, -0.6), xlabel=xlabel)
    axes.set_yticks(range(len(lines)), ["" if contrast is None else shorten(label) for label, _, contrast in lines])
    axes.locator_params("x", nbins=6)
    axes.tick_params("y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.axvspan(-margin, margin, color=LINE, lw=0)
    axes.axvline(0, color=INK, lw=1)
    across = blended_transform_factory(figure.transFigure, axes.transData)
    for y, ((label, color, contrast), tick) in enumerate(zip(lines, axes.get_yticklabels(), strict=True)):
        if contrast is None:
            text = axes.text(0.01, y, shorten(label, 2 * NAME), transform=across, va="center", style="italic")
            text.set_in_layout(False)
        else:
            tick.set_fontweight("bold" if contrast.primary else "normal")
            _draw_row(axes, contrast, color, y, limits)
    for verdict in dict.fromkeys(contrast.verdict for contrast in contrasts):
        axes.plot([], [], label=verdict, **_verdict_marker(verdict, INK))
    axes.plot([], [], ".", color=SOFT, markersize=5, label="a seed")
    legend(figure, axes)
    return figure


def _ends(*contrasts: Contrast) -> list[float]:
    ends = ((contrast.mean_difference, contrast.ci_low, contrast.ci_high) for contrast in contrasts)
    return [value for values in ends for value in values if value is not None]


def _main_arms(record: AblationRecord) -> set[str]:
    """The baseline and the primary arms (all, where none is primary), which set the scale of a figure."""
    return {record.baseline, *(record.primary or record.arms)}


def _finite(frame: pd.DataFrame) -> list[float]:
    values = frame.to_numpy(float).ravel()
    return [*values[np.isfinite(values)]]


def _verdict_marker(verdict: str, color: str) -> dict[str, Any]:
    face = PAPER if verdict == "undecided" else color
    marker = VERDICT_MARKERS[verdict]
    return {"marker": marker, "color": color, "markerfacecolor": face, "markersize": 8, "linestyle": "none"}


def _draw_row(axes: Axes, contrast: Contrast, color: str, y: int, limits: tuple[float, float]) -> None:
    low, high = min(_ends(contrast)), max(_ends(contrast))
    axes.plot([low, high], [y, y], color=color, lw=2)
    axes.plot([contrast.mean_difference or 0.0], [y], **_verdict_marker(contrast.verdict, color))
    axes.plot(contrast.differences, [y + 0.3] * len(contrast.differences), ".", color=SOFT, markersize=5)
    for outside, edge, arrow in ((low < limits[0], limits[0], "<"), (high > limits[1], limits[1], ">")):
        if outside:  # it goes on there; the table tells how far
            axes.plot([edge], [y], arrow, color=color, clip_on=False)


def learning(results: Results) -> Figure | None:
    """The validations of all arms, and below, where there are pairs, their differences from the baseline.

    What comes in the first quarter of training may lie above the panels.
    """
    record, styles, curves = results.record, line_styles(list(results.record.arms)), results.curves_shown
    main, margin = _main_arms(record), record.equivalence_margin
    tables = {arm: over_seeds(curve_table(curves, arm)) for arm in record.arms}
    tables = {arm: table for arm, table in tables.items() if len(table) > 1}
    if not tables:
        return None
    others = [arm for arm in tables if arm != record.baseline]
    gaps = {arm: over_seeds(gap_table(curves, arm, record.baseline)) for arm in others}
    gaps = {arm: table for arm, table in gaps.items() if len(table) > 1}
    shown = [tables, gaps] if gaps else [tables]
    start = max(table.index.max() for table in tables.values()) / 4
    figure, axes = panels(len(shown), 2.6, 0.5, sharex=True)
    for panel, group, least in zip(axes, shown, (0.0, margin), strict=False):
        late = {arm: _finite(table[table.index >= start]) for arm, table in group.items()}
        core = [value for arm in main & late.keys() for value in late[arm]]
        every = [value for values in late.values() for value in values]
        panel.set(ylabel=results.unit, ylim=axis_limits(core, every, least, reach=0.5))
        for arm, table in group.items():
            color, dashes = styles[arm].color, styles[arm].linestyle
            panel.plot(table.index, table["mean"], color=color, linestyle=dashes, label=arm)
            if arm in main:
                panel.fill_between(table.index, table["min"], table["max"], color=color, alpha=0.15, lw=0)
    if gaps:
        axes[1].axhline(0, color=INK, lw=1)
        axes[1].axhspan(-margin, margin, color=LINE, lw=0)
        limits = axes[1].get_ylim()
        ylim = min(limits[0], -1.2 * margin), max(limits[1], 1.2 * margin)
        axes[1].set(ylabel=f"minus {shorten(record.baseline)}", ylim=ylim)
    axes[-1].set_xlim(0, None)
    tokens_axis(axes[-1])
    legend(figure, axes[0])
    return figure


def tuning(results: Results) -> Figure | None:
    """The trials over each hyperparameter. The plot reaches as far up as helps to see where the best value lies."""
    record, trials, keys = results.record, results.trials, results.hyperparameters()
    if not keys:
        return None
    arms = [arm for arm in record.arms if arm in {*trials["arm"]}]
    main = _main_arms(record)
    scores = trials["score"].astype(float).sort_values(ascending=results.lower_is_better).dropna()
    best_first = scores[trials["arm"][scores.index].isin(main)]
    limits = axis_limits(best_first[: math.ceil(0.75 * len(best_first))], scores, 5 * record.equivalence_margin)
    figure, axes = panels(len(keys), 2.5, 0.6)
    styles = line_styles(list(record.arms))
    for panel, key in zip(axes, keys, strict=True):
        panel.set(title=key, ylabel=results.unit, ylim=limits, xscale="log")
        log_axis(panel.xaxis)
        for arm in arms:
            if key in results.hyperparameters(arm):
                _draw_search(panel, results, arm, key, styles[arm])
    for arm in arms:
        axes[0].plot([], [], label=arm, **asdict(styles[arm]))
    legend(figure, axes[0])
    return figure


def _draw_search(axes: Axes, results: Results, arm: str, key: str, style: LineStyle) -> None:
    (low, high), color = axes.get_ylim(), style.color
    of_arm = results.trials[results.trials["arm"] == arm].drop_duplicates("trial")
    values, scores = of_arm[key].to_numpy(float), of_arm["score"].to_numpy(float)
    lost, worse = np.isnan(scores), high if results.lower_is_better else low
    shown = np.clip(np.where(lost, worse, scores), low, high)
    outside = ~lost & (shown != scores)
    for chosen, marker, options in (
        (~lost & ~outside, style.marker, {"ms": 4}),
        (lost, "x", {"ms": 7, "mew": 2}),  # diverged, or failed
        (outside, "^" if worse == high else "v", {"mfc": PAPER}),
    ):
        if chosen.any():  # an empty line would make room for itself
            axes.plot(values[chosen], shown[chosen], marker, color=color, ls="none", clip_on=False, **options)
    if (chosen := results.record.arms[arm].tuned.get(key)) is not None:
        axes.axvline(chosen, ymax=0.05, color=color, lw=2.5)
