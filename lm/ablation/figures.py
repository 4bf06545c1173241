"""The figures of an ablation's report. Colour, dashes and marker of an arm are the same in all of them."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.ablation import views
from lm.ablation.contrasts import digits_of
from lm.ablation.response_surface import Array
from lm.ablation.results import Results
from lm.ablation.tuning import profiles
from lm.report.figures import (
    INK,
    LINE,
    MARKERS,
    NAME,
    PAPER,
    SOFT,
    LineStyle,
    as_svg,
    axis_limits,
    legend,
    line_styles,
    log_axis,
    mark_outside,
    panels,
    shorten,
    tokens_axis,
)
from lm.report.pages import signed

VERDICT_MARKERS = {"better": "^", "worse": "v", "equivalent": "s", "undecided": "o"}
N_NAMED = 30  # seeds that a legend has room for
FAR = 5  # times the middle difference
Curve = tuple[Array, Array, Array]  # values, expected losses, standard deviations


@as_svg
def forest(results: Results) -> Figure | None:
    """Every comparison of different runs once, the primary ones in bold."""
    record, comparisons = results.record, views.comparisons(results)
    shown = comparisons[comparisons["mean_difference"].notna()]
    styles, side = line_styles(list(record.arms)), "left" if views.lower_is_better(results) else "right"
    is_interaction = shown["family"] == "interaction"
    heading = "At equal " + shown["budgets"] if len(record.budgets) > 1 else shown["at_equal"]
    return draw_forest(
        shown.assign(
            label=shown["name"].str.removesuffix(f" - {record.baseline}"),
            heading=heading.where(~is_interaction, "Interactions" + shown["at_equal"]),
            color=[styles[arm].color if arm in styles else INK for arm in shown["arm"].where(~is_interaction, "")],
        ),
        record.equivalence_margin,
        f"difference, {views.unit(results)} ({side} is better)",
    )


def draw_forest(rows: pd.DataFrame, margin: float, xlabel: str) -> Figure | None:
    """Name and numbers of a row stand above its interval, each seed as a dot below; zero and the margin behind.

    `rows` are contrasts with a `label`, a `color`, and a `heading` of the group that they belong to, or an empty one.
    Bold rows set the scale, or, where there are none, those that are not far off. `margin` is 0 for no band.
    """
    if rows.empty:
        return None
    size = rows["mean_difference"].abs()
    main = rows[rows["primary"]] if rows["primary"].any() else rows[size <= FAR * size.median()]
    core, every = (_finite(frame[["mean_difference", "ci_low", "ci_high"]]) for frame in (main, rows))
    limits = axis_limits([*core, 0, -margin, margin], every, margin, reach=0.5)
    groups = dict([*rows.groupby("heading", sort=False)])
    figure, (axes,) = panels(1, 1.1 + 0.52 * len(rows) + 0.4 * sum(map(bool, groups)))
    y = 0.0
    for heading, group in groups.items():
        if heading:
            _write(axes, 0, y, shorten(heading, 2 * NAME), style="italic")
            y += 0.7
        for row in group.itertuples():
            _write(axes, 0, y - 0.05, shorten(row.label), weight="bold" if row.primary else "normal")
            _write(axes, 1, y - 0.05, _numbers(row), ha="right", fontsize=10)
            axes.fill_betweenx([y + 0.18, y + 0.62], -margin, margin, color=LINE, lw=0)
            axes.plot([0, 0], [y + 0.18, y + 0.62], color=INK, lw=1)
            _draw_row(axes, row, y + 0.34, limits)
            y += 1
    axes.set(xlim=limits, ylim=(y - 0.25, -0.6), yticks=[], xlabel=xlabel)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    for verdict in rows["verdict"].unique():
        axes.plot([], [], label=verdict, **_verdict_marker(verdict, INK))
    axes.plot([], [], ".", color=SOFT, markersize=5, label="a seed")
    legend(figure, axes)
    return figure


def _finite(frame: pd.DataFrame) -> list[float]:
    values = frame.to_numpy(float).ravel()
    return [*values[np.isfinite(values)]]


def _numbers(row: Any) -> str:
    mean, *ends = (signed(value, digits_of(row._asdict())) for value in (row.mean_difference, row.ci_low, row.ci_high))
    return f"{mean} (one seed)" if pd.isna(row.ci_low) else f"{mean} [{', '.join(ends)}]"


def _verdict_marker(verdict: str, color: str) -> dict[str, Any]:
    face = PAPER if verdict == "undecided" else color
    marker = VERDICT_MARKERS[verdict]
    return {"marker": marker, "color": color, "markerfacecolor": face, "markersize": 8, "linestyle": "none"}


def _write(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), va="center", **options)


def _draw_row(axes: Axes, row: Any, y: float, limits: tuple[float, float]) -> None:
    low, high = limits
    mean = row.mean_difference
    ci_low, ci_high = (mean, mean) if pd.isna(row.ci_low) else (row.ci_low, row.ci_high)
    if ci_low <= high and ci_high >= low:
        axes.plot([max(ci_low, low), min(ci_high, high)], [y, y], color=row.color, lw=2)
    for outside, edge, arrow in ((ci_low < low, low, "<"), (ci_high > high, high, ">")):
        if outside:  # it goes on there; the numbers tell how far
            axes.plot([edge], [y], arrow, color=row.color, clip_on=False)
    if low <= mean <= high:
        axes.plot([mean], [y], **_verdict_marker(row.verdict, row.color))
    seeds = [value for value in row.differences if low <= value <= high]
    if seeds:  # an empty line would make room for itself
        axes.plot(seeds, [y + 0.2] * len(seeds), ".", color=SOFT, markersize=5, clip_on=False)


@as_svg
def seeds(results: Results) -> Figure | None:
    """Arms in the order of the question, a line for each seed; a panel for each budget that has runs of its own."""
    record, arms = results.record, list(results.record.arms)
    done = views.done(results)
    if done.empty:
        return None
    budgets = views.distinct_budgets(results, arms)
    scores = done.pivot(index="seed", columns=["budget", "arm"], values=record.metric).astype(float)
    scores = scores.reindex([seed for seed in record.seeds if seed in scores.index])
    scores = scores.reindex(columns=pd.MultiIndex.from_product([budgets, arms]))
    is_main = scores.columns.get_level_values(1).isin(views.main_arms(results))
    limits = axis_limits(_finite(scores.loc[:, is_main]), _finite(scores), record.equivalence_margin, reach=0.5)
    figure, axes = panels(len(budgets), 2.4, 0.9, sharex=True)
    style: dict[str, Any] = {"color": SOFT, "lw": 0.8, "ms": 5.5, "mfc": "none", "mec": INK}
    for panel, budget in zip(axes, budgets, strict=True):
        panel.set(ylabel=views.unit(results).removeprefix("in "), ylim=limits, xlim=(-0.5, len(arms) - 0.5))
        inside = scores[budget].where(scores[budget].ge(limits[0]) & scores[budget].le(limits[1]))
        for i, (seed, line) in enumerate(inside.iterrows()):
            panel.plot(range(len(arms)), line, marker=MARKERS[i % len(MARKERS)], label=f"seed {seed}", **style)
        for x, arm in enumerate(arms):
            mark_outside(panel, x, [*scores[budget, arm]])
        if len(record.budgets) > 1:
            panel.set_title(f"At equal {budgets[budget]}")
        panel.set_xticks(range(len(arms)), map(shorten, arms), rotation=20, ha="right")
        panel.grid(visible=False, axis="x")
    if len(scores) <= N_NAMED:
        legend(figure, axes[0])
    return figure


@as_svg
def learning(results: Results) -> Figure | None:
    """The whole of training, its last half, where arms differ least, and the differences from the baseline."""
    record, styles, curves = results.record, line_styles(list(results.record.arms)), views.curves_shown(results)
    main = views.main_arms(results)
    tables = {arm: views.over_seeds(views.curve_table(curves, arm)) for arm in record.arms}
    tables = {arm: table for arm, table in tables.items() if len(table)}
    if max(map(len, tables.values()), default=0) < 2:
        return None
    others = [arm for arm in tables if arm != record.baseline]
    gaps = {arm: views.over_seeds(views.gap_table(curves, arm, record.baseline)) for arm in others}
    gaps = {arm: table for arm, table in gaps.items() if len(table) > 1}
    figure, axes = panels(2 + bool(gaps), 2.2, 0.5)
    for arm, table in tables.items():
        _draw_curve(axes[0], table, styles[arm], arm, band=False)
        _draw_curve(axes[1], table, styles[arm], arm, band=arm in main)
    end = max(table.index.max() for table in tables.values())
    late = {arm: table[table.index >= end / 2] for arm, table in tables.items()}
    axes[0].set(ylabel=views.unit(results), title="All of training", xlim=(0, None))
    axes[1].set(ylabel=views.unit(results), title="The last half", ylim=_limits(late, main), xlim=(end / 2, end * 1.01))
    if gaps:
        for arm, table in gaps.items():
            _draw_curve(axes[2], table, styles[arm], arm, band=arm in main)
        axes[2].axhline(0, color=INK, lw=1)
        margin = record.equivalence_margin
        axes[2].axhspan(-margin, margin, color=LINE, lw=0)
        tails = {arm: table[table.index >= end / 4] for arm, table in gaps.items()}
        limits = _limits(tails, main, margin)
        limits = min(limits[0], -1.2 * margin), max(limits[1], 1.2 * margin)
        axes[2].set(ylabel=f"minus {shorten(record.baseline)}", title="Difference", ylim=limits, xlim=(0, None))
    for panel in axes:
        tokens_axis(panel)
        panel.set_xlabel("training tokens" if panel is axes[-1] else "")
    legend(figure, axes[0])
    return figure


def _limits(tables: dict[str, pd.DataFrame], main: Iterable[str], least: float = 0.0) -> tuple[float, float]:
    core = [value for arm in main if arm in tables for value in _finite(tables[arm])]
    return axis_limits(core, [value for table in tables.values() for value in _finite(table)], least, reach=0.5)


def _draw_curve(axes: Axes, table: pd.DataFrame, style: LineStyle, name: str, band: bool = True) -> None:
    axes.plot(table.index, table["mean"], color=style.color, linestyle=style.linestyle, label=name)
    if band:
        axes.fill_between(table.index, table["min"], table["max"], color=style.color, alpha=0.15, lw=0)


@as_svg
def tuning(results: Results) -> Figure | None:
    """The trials over each hyperparameter, with the fitted curve of each arm and its band of one standard deviation.

    The plot reaches as far up as helps to see where the best value lies.
    """
    record, trials, keys = results.record, results.trials, views.hyperparameters(results)
    if not keys:
        return None
    arms = [arm for arm in record.arms if arm in {*trials["arm"]}]
    main = views.main_arms(results)
    scores = trials["score"].astype(float).sort_values(ascending=views.lower_is_better(results)).dropna()
    best_first = scores[trials["arm"][scores.index].isin(main)]
    limits = axis_limits(best_first[: math.ceil(0.75 * len(best_first))], scores, 5 * record.equivalence_margin)
    figure, axes = panels(len(keys), 2.5, 0.6)
    styles, curves = line_styles(list(record.arms)), profiles(results.tuned_arms, record.tune.factor)
    for panel, key in zip(axes, keys, strict=True):
        panel.set(title=key, ylabel=views.unit(results), ylim=limits, xscale="log")
        log_axis(panel.xaxis)
        for arm in arms:
            if key in results.hyperparameters(arm):
                curve = curves.get(arm, {}).get(key)
                _draw_search(panel, results, arm, key, styles[arm], curve, band=arm in main)
    for arm in arms:
        axes[0].plot([], [], label=arm, **asdict(styles[arm]))
    legend(figure, axes[0])
    return figure


def _draw_search(
    axes: Axes, results: Results, arm: str, key: str, style: LineStyle, curve: Curve | None, band: bool
) -> None:
    (low, high), color = axes.get_ylim(), style.color
    of_arm = results.trials[results.trials["arm"] == arm].drop_duplicates("trial")
    values, scores = of_arm[key].to_numpy(float), of_arm["score"].to_numpy(float)
    worse = high if views.lower_is_better(results) else low
    lost, above, below = np.isnan(scores), scores > high, scores < low
    inside = ~(lost | above | below)
    axes.plot(values[inside], scores[inside], style.marker, color=color, ms=4, ls="none")
    for chosen, edge, marker, options in (
        (lost, worse, "x", {"ms": 7, "mew": 2}),  # diverged, or failed
        (above, high, "^", {"mfc": PAPER}),
        (below, low, "v", {"mfc": PAPER}),
    ):
        if chosen.any():
            axes.plot(values[chosen], [edge] * chosen.sum(), marker, color=color, ls="none", clip_on=False, **options)
    if curve:
        x, loss, sd = curve  # lower is better in a search
        mean = loss if views.lower_is_better(results) else -loss
        axes.plot(x, mean, color=color, linestyle=style.linestyle)
        if band:
            axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.15, lw=0)
    if (chosen := results.record.arms[arm].tuned.get(key)) is not None:
        axes.axvline(chosen, ymax=0.05, color=color, lw=2.5)
