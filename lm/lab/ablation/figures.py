"""The figures of an ablation's report. Colour, dashes and marker of an arm are the same in all of them."""

import math
from dataclasses import asdict
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.lab.ablation.judge import Contrast, alpha_of, interval
from lm.lab.ablation.question import LEARNING_RATE, Question
from lm.lab.ablation.results import Results
from lm.lab.report.figures import (
    INK,
    LINE,
    PAPER,
    SOFT,
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


def forest(results: Results) -> Figure | None:
    """Draw a line for each comparison, primary ones in bold: interval, marker of its verdict, and each seed as a dot.

    Primary comparisons set the scale, or those that are not far off where all are primary.
    """
    question, styles = results.question, line_styles(list(results.record.arms))
    contrasts = [contrast for contrast in results.comparisons if contrast.mean_difference is not None]
    if not contrasts:
        return None
    margin = question.equivalence_margin or 0.0
    far = FAR * median(abs(contrast.mean_difference or 0.0) for contrast in contrasts)
    main = [contrast for contrast in contrasts if contrast.primary]
    if len(main) in (0, len(contrasts)):
        main = [contrast for contrast in contrasts if abs(contrast.mean_difference or 0.0) <= far]
    limits = axis_limits([*_ends(*main), 0, -margin, margin], _ends(*contrasts), margin, reach=0.5)
    figure, (axes,) = panels(1, 1.1 + ROW * len(contrasts))
    side = "left" if results.metric.sign > 0 else "right"
    label = f"difference, {results.metric.unit} ({side} is better)"
    axes.set(xlim=limits, ylim=(len(contrasts) - 0.4, -0.6), xlabel=label)
    names = [contrast.name.removesuffix(f" - {question.baseline}") for contrast in contrasts]
    axes.set_yticks(range(len(contrasts)), [*map(shorten, names)])
    axes.locator_params("x", nbins=6)
    axes.tick_params("y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.axvspan(-margin, margin, color=LINE, lw=0)
    axes.axvline(0, color=INK, lw=1)
    for y, (contrast, tick) in enumerate(zip(contrasts, axes.get_yticklabels(), strict=True)):
        tick.set_fontweight("bold" if contrast.primary else "normal")
        color = styles[contrast.arm].color if contrast.arm in styles else INK  # a weighted sum is no arm
        _draw_row(axes, contrast, color, y, limits)
    for verdict in dict.fromkeys(contrast.verdict for contrast in contrasts):
        axes.plot([], [], label=verdict, **_verdict_marker(verdict, INK))
    axes.plot([], [], ".", color=SOFT, markersize=5, label="a seed")
    legend(figure, axes)
    return figure


def _ends(*contrasts: Contrast) -> list[float]:
    ends = ((contrast.mean_difference, contrast.ci_low, contrast.ci_high) for contrast in contrasts)
    return [value for values in ends for value in values if value is not None]


def _main_arms(question: Question) -> set[str]:
    """Return the baseline and the primary arms, which set the scale of a figure."""
    return {question.baseline, *question.primary_arms()}


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
    """Draw the validations of all arms, and below, where there are pairs, their differences from the baseline.

    Where each pair has a text of its own, the upper panel is of one seed, the first of the baseline: the losses of
    different texts have no mean. What comes in the first quarter of training may lie above the panels.
    """
    question, styles = results.question, line_styles(list(results.record.arms))
    main, margin = _main_arms(question), question.equivalence_margin or 0.0
    by_seed = {arm: results.curve_table(arm) for arm in results.record.arms}
    base = by_seed[question.baseline]
    seeds = [*base.columns[:1]] if question.folds else question.seeds  # an arm may have lost some
    tables = {arm: table.filter(seeds).dropna() for arm, table in by_seed.items()}  # where all have a point
    gaps = {
        arm: (table - base).dropna(axis=1, how="all").dropna() for arm, table in by_seed.items() if table is not base
    }
    shown = [{arm: table for arm, table in group.items() if len(table) > 1 and table.size} for group in (tables, gaps)]
    shown = [group for group in shown if group]
    if not shown:
        return None
    start = max(table.index.max() for table in shown[0].values()) / 4
    figure, axes = panels(len(shown), 2.6, 0.5, sharex=True)
    for panel, group, least in zip(axes, shown, (0.0, margin), strict=False):
        late = {arm: [*table[table.index >= start].mean(axis=1)] for arm, table in group.items()}
        core = [value for arm in main & late.keys() for value in late[arm]]
        every = [value for values in late.values() for value in values]
        panel.set(ylabel=results.metric.unit, ylim=axis_limits(core, every, least, reach=0.5))
        for arm, table in group.items():
            color, dashes = styles[arm].color, styles[arm].linestyle
            panel.plot(table.index, table.mean(axis=1), color=color, linestyle=dashes, label=arm)
            if arm in main:
                panel.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=color, alpha=0.15, lw=0)
    if len(shown) > 1:
        axes[1].axhline(0, color=INK, lw=1)
        axes[1].axhspan(-margin, margin, color=LINE, lw=0)
        limits = axes[1].get_ylim()
        ylim = min(limits[0], -1.2 * margin), max(limits[1], 1.2 * margin)
        axes[1].set(ylabel=f"minus {shorten(question.baseline)}", ylim=ylim)
    axes[-1].set_xlim(0, None)
    tokens_axis(axes[-1])
    legend(figure, axes[0])
    return figure


def ladder(results: Results) -> Figure | None:
    """Draw each tuned arm over the factors of its setting, with an interval at each, and a tick at the best factor."""
    styles, question = line_styles(list(results.record.arms)), results.question
    tables = {arm: table for arm in results.ladders if len(table := results.ladder_differences(arm))}
    if not tables:
        return None
    figure, (axes,) = panels(1, 2.6, 0.6)
    axes.axhline(0, color=INK, lw=1)
    for arm, table in tables.items():
        style, best = styles[arm], results.ladders[arm].best
        axes.plot(table.columns, table.mean(), label=arm, **asdict(style))
        for factor, differences in table.items():
            axes.plot([factor] * 2, interval([*differences], alpha_of(question)) or [math.nan] * 2, color=style.color)
        if best is not None:
            axes.axvline(best, ymax=0.05, color=style.color, lw=2.5)
    setting = "learning rates" if question.tune == LEARNING_RATE else str(question.tune)
    axes.set(xscale="log", xlabel=f"{setting}, as a multiple of the configuration's")
    axes.set_ylabel(f"minus {shorten(question.baseline)}")
    log_axis(axes.xaxis)
    legend(figure, axes)
    return figure
