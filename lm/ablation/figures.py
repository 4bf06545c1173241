"""The figures of an ablation's report. Colour, dashes and marker of an arm are the same in all of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lm.ablation import views
from lm.ablation.contrasts import decimals
from lm.ablation.results import Results
from lm.ablation.statistics import interval
from lm.config.ablation import BUDGET_NAMES
from lm.report.figures import (
    INK,
    LINE,
    MARKERS,
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

VERDICT_MARKERS = {"better": "^", "worse": "v", "equivalent": "s", "undecided": "o"}
FAR = 5  # times the middle difference
BANDS = tuple(f"band{i}" for i in range(1, 6))
SIDES = {
    "embedding_grad": "gradient norm through the input embeddings",
    "head_grad": "gradient norm through the LM head",
    "cosine": "cosine similarity of the two gradients",
}


@dataclass(slots=True)
class ForestRow:
    name: str
    mean: float
    ci_low: float  # equal to the mean with one seed
    ci_high: float
    verdict: str
    digits: int
    color: str = INK
    bold: bool = False
    seeds: Sequence[float] = field(default_factory=list)  # the difference at each seed

    @property
    def label(self) -> str:
        mean = f"{self.mean:+z.{self.digits}f}"
        if self.ci_low == self.ci_high == self.mean:
            return f"{mean} (one seed)" if len(self.seeds) < 2 else mean
        return f"{mean} [{self.ci_low:+z.{self.digits}f}, {self.ci_high:+z.{self.digits}f}]"


@as_svg
def forest(results: Results) -> Figure:
    """Every comparison of different runs once, the primary ones in bold."""
    record, styles = results.record, line_styles(list(results.record.arms))
    groups: dict[str, list[ForestRow]] = {}
    contrasts = views.merged(results, results.contrasts)
    for _, contrast in contrasts[contrasts["mean_difference"].notna()].iterrows():
        heading = f"At equal {' and '.join(contrast['budgets'])}" if len(record.budgets) > 1 else ""
        name, color = contrast["arm"], INK
        if contrast["family"] == "interaction":
            heading = f"Interactions{heading.replace('At', ' at')}"
        else:
            color = styles[contrast["arm"]].color
            name += f" - {contrast['baseline']}" * (contrast["baseline"] != record.baseline)
        groups.setdefault(heading, []).append(forest_row(name, contrast, views.differences(results, contrast), color))
    side = "left" if views.lower_is_better(results) else "right"
    return draw_forest(groups, record.equivalence_margin, f"difference, {views.unit(results)} ({side} is better)")


def forest_row(name: str, contrast: pd.Series, seeds: Iterable[float], color: str = INK) -> ForestRow:
    mean = float(contrast["mean_difference"])
    low, high = (mean if pd.isna(contrast[end]) else float(contrast[end]) for end in ("ci_low", "ci_high"))
    digits, bold = decimals(contrast["equivalence_margin"]), contrast["family"] == "primary"
    return ForestRow(name, mean, low, high, contrast["verdict"], digits, color, bold, [*seeds])


def draw_forest(groups: dict[str, list[ForestRow]], margin: float, xlabel: str) -> Figure:
    """Name and numbers of a row stand above its interval, each seed as a dot below; zero and the margin behind.

    Bold rows set the scale, or, where there are none, those that are not far off. `margin` is 0 for no band. A group
    whose heading is empty has none.
    """
    rows = [row for group in groups.values() for row in group]
    middle = median([abs(row.mean) for row in rows])
    main = [row for row in rows if row.bold] or [row for row in rows if abs(row.mean) <= FAR * middle]
    limits = axis_limits([*_ends(main), 0, -margin, margin], _ends(rows), margin, reach=0.5)
    figure, (axes,) = panels(1, 1.1 + 0.52 * len(rows) + 0.4 * sum(map(bool, groups)))
    y = 0.0
    for heading, group in groups.items():
        if heading:
            _write(axes, 0, y, heading, style="italic")
            y += 0.7
        for row in group:
            _write(axes, 0, y - 0.05, shorten(row.name), weight="bold" if row.bold else "normal")
            _write(axes, 1, y - 0.05, row.label, ha="right", fontsize=10)
            axes.fill_betweenx([y + 0.18, y + 0.62], -margin, margin, color=LINE, lw=0)
            axes.plot([0, 0], [y + 0.18, y + 0.62], color=INK, lw=1)
            _draw_row(axes, row, y + 0.34, limits)
            y += 1
    axes.set(xlim=limits, ylim=(y - 0.25, -0.6), yticks=[], xlabel=xlabel)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    for verdict in dict.fromkeys(row.verdict for row in rows):
        axes.plot([], [], label=verdict, **_verdict_marker(verdict, INK))
    if any(row.seeds for row in rows):
        axes.plot([], [], ".", color=SOFT, markersize=5, label="a seed")
    legend(figure, axes)
    return figure


def _ends(rows: Sequence[ForestRow]) -> list[float]:
    return [value for row in rows for value in (row.mean, row.ci_low, row.ci_high)]


def _verdict_marker(verdict: str, color: str) -> dict[str, Any]:
    face = PAPER if verdict == "undecided" else color
    marker = VERDICT_MARKERS[verdict]
    return {"marker": marker, "color": color, "markerfacecolor": face, "markersize": 8, "linestyle": "none"}


def _write(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), va="center", **options)


def _draw_row(axes: Axes, row: ForestRow, y: float, limits: tuple[float, float]) -> None:
    low, high = limits
    if row.ci_low <= high and row.ci_high >= low:
        axes.plot([max(row.ci_low, low), min(row.ci_high, high)], [y, y], color=row.color, lw=2)
    for outside, edge, arrow in ((row.ci_low < low, low, "<"), (row.ci_high > high, high, ">")):
        if outside:  # it goes on there; the numbers tell how far
            axes.plot([edge], [y], arrow, color=row.color, clip_on=False)
    if low <= row.mean <= high:
        axes.plot([row.mean], [y], **_verdict_marker(row.verdict, row.color))
    seeds = [value for value in row.seeds if low <= value <= high]
    if seeds:
        axes.plot(seeds, [y + 0.2] * len(seeds), ".", color=SOFT, markersize=5, clip_on=False)


@as_svg
def seeds(results: Results) -> Figure:
    """Arms in the order of the question, a line for each seed; a panel for each budget that has runs of its own."""
    record, arms = results.record, list(results.record.arms)
    budgets = distinct_budgets(results)
    scores = {
        (arm, budget): views.finished(results, arm, budget)[record.metric].astype(float)
        for arm in arms
        for budget in budgets
    }
    values = [value for column in scores.values() for value in column]
    main = {record.baseline, *(record.primary or arms)}
    core = [value for (arm, _), column in scores.items() if arm in main for value in column]
    limits = axis_limits(core or values, values, record.equivalence_margin, reach=0.5)
    crowded = sum(map(len, arms)) > 38
    figure, axes = panels(len(budgets), 2.4, 0.5 + 0.5 * crowded, sharex=True)
    shown = [seed for seed in record.seeds if any(seed in column.index for column in scores.values())]
    for panel, budget in zip(axes, budgets, strict=True):
        panel.set(ylabel=views.unit(results), ylim=limits, xlim=(-0.5, len(arms) - 0.5))
        for i, seed in enumerate(shown):
            line = [scores[arm, budget].get(seed, math.nan) for arm in arms]
            inside = [value if limits[0] <= value <= limits[1] else math.nan for value in line]
            label = f"seed {seed}" if i % math.ceil(len(shown) / 24) == 0 else None
            options: dict[str, Any] = {
                "color": SOFT,
                "lw": 0.8,
                "markersize": 5.5,
                "markerfacecolor": "none",
                "markeredgecolor": INK,
            }
            panel.plot(range(len(arms)), inside, marker=MARKERS[i % len(MARKERS)], label=label, **options)
        for x, arm in enumerate(arms):
            mark_outside(panel, x, [*scores[arm, budget]])
        if len(record.budgets) > 1:
            panel.set_title(f"At equal {budgets[budget]}")
        panel.set_xticks(range(len(arms)), map(shorten, arms))
        panel.tick_params(axis="x", rotation=35 * crowded)
        for text in panel.get_xticklabels() if crowded else ():
            text.set(ha="right", rotation_mode="anchor")
        panel.grid(visible=False, axis="x")
    legend(figure, axes[0])
    return figure


def distinct_budgets(results: Results) -> dict[str, str]:
    """Budgets whose runs are not those of an earlier one, with the names of all that the runs serve."""
    reported = results.runs[results.runs["purpose"] == "reported"]
    names: dict[frozenset[str], list[str]] = {}
    for budget in results.record.budgets:
        names.setdefault(frozenset(reported[reported["budget"] == budget]["run_dir"]), []).append(budget)
    return {group[0]: " and ".join(BUDGET_NAMES[budget] for budget in group) for group in names.values()}


@as_svg
def learning(results: Results, curves: pd.DataFrame) -> Figure:
    """The whole of training, its last half, where arms differ least, and the differences from the baseline."""
    record, styles = results.record, line_styles(list(results.record.arms))
    main = {record.baseline, *(record.primary or record.arms)}
    tables = {arm: views.over_seeds(views.curve_table(curves, arm)) for arm in record.arms}
    tables = {arm: table for arm, table in tables.items() if len(table)}
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
    core = [value for arm in main if arm in tables for value in tables[arm].to_numpy().flat]
    values = [value for table in tables.values() for value in table.to_numpy().flat]
    return axis_limits(core, values, least, reach=0.5)


def _draw_curve(axes: Axes, table: pd.DataFrame, style: LineStyle, name: str, band: bool = True) -> None:
    axes.plot(table.index, table["mean"], color=style.color, linestyle=style.linestyle, label=name)
    if band:
        axes.fill_between(table.index, table["min"], table["max"], color=style.color, alpha=0.15, lw=0)


@as_svg
def tuning(results: Results) -> Figure:
    """The trials over each hyperparameter, with the fitted curve of each arm and its band of one standard deviation.

    The plot reaches as far up as helps to see where the best value lies.
    """
    record, trials = results.record, results.trials
    keys = list(dict.fromkeys(key for arm in record.arms for key in results.hyperparameters(arm)))
    arms = [arm for arm in record.arms if arm in {*trials["arm"]}]
    main = {record.baseline, *record.primary} & {*arms} or {*arms}
    scores = trials["score"].astype(float).dropna()
    best_first = trials[trials["arm"].isin(main)]["score"].astype(float).dropna()
    best_first = best_first.sort_values(ascending=views.lower_is_better(results))
    core = best_first[: math.ceil(0.75 * len(best_first))]
    limits = axis_limits(core if len(core) else scores, scores, 5 * record.equivalence_margin)
    figure, axes = panels(len(keys), 2.5, 0.6)
    styles = line_styles(list(record.arms))
    for panel, key in zip(axes, keys, strict=True):
        panel.set(title=key, ylabel=views.unit(results), ylim=limits, xscale="log")
        log_axis(panel.xaxis)
        for arm in arms:
            if key in results.hyperparameters(arm):
                _draw_search(panel, results, arm, key, styles[arm], band=arm in main)
    for arm in arms:
        axes[0].plot([], [], label=arm, **_options(styles[arm]))
    legend(figure, axes[0])
    return figure


def _options(style: LineStyle) -> dict[str, Any]:
    return {"color": style.color, "linestyle": style.linestyle, "marker": style.marker}


def _draw_search(axes: Axes, results: Results, arm: str, key: str, style: LineStyle, band: bool) -> None:
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
    if curve := results.profiles.get(arm, {}).get(key):
        axes.plot(curve.values, curve.mean, color=color, linestyle=style.linestyle)
        if band:
            axes.fill_between(curve.values, curve.mean - curve.sd, curve.mean + curve.sd, color=color, alpha=0.15, lw=0)
    if (chosen := results.record.arms[arm].tuned.get(key)) is not None:
        axes.axvline(chosen, ymax=0.05, color=color, lw=2.5)


@as_svg
def over_setting(results: Results) -> Figure:
    """A panel for each series under each budget: arms with the same value may differ far less than the others."""
    drawn = setting_series(results)
    values = sorted({value for points in drawn.values() for value, _ in points})
    figure, axes = panels(len(drawn), 2.2, 0.2, sharex=True)
    for panel, (title, points) in zip(axes, drawn.items(), strict=True):
        panel.set(ylabel=views.unit(results), title=title)
        _draw_series(panel, results, points)
        if 0 < 8 * values[0] < values[-1]:
            panel.set_xscale("log")
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xticks(values, [f"{value:g}" for value in values])
    axes[-1].set_xlabel(str(results.record.plot_over))
    return figure


def setting_series(results: Results) -> dict[str, list[tuple[float, pd.Series]]]:
    """By title: a series for each baseline; comparisons of two arms with the same value are a series of their own."""
    key, record = results.record.plot_over, results.record
    series: dict[str, list[tuple[float, pd.Series]]] = {}
    contrasts = views.merged(results, results.contrasts[results.contrasts["family"] != "interaction"])
    for _, contrast in contrasts[contrasts["mean_difference"].notna()].iterrows() if key else ():
        value, other = (record.arms[contrast[side]].settings.get(str(key)) for side in ("arm", "baseline"))
        if isinstance(value, int | float):
            title = f"minus the arm of the same {key}" if value == other else f"minus {contrast['baseline']}"
            title += f", at equal {' and '.join(contrast['budgets'])}" * (len(record.budgets) > 1)
            series.setdefault(title, []).append((float(value), contrast))
    return {title: sorted(points, key=lambda point: point[0]) for title, points in series.items()}


def _draw_series(axes: Axes, results: Results, points: list[tuple[float, pd.Series]]) -> None:
    record, color = results.record, "#0072B2"
    axes.axhspan(-record.equivalence_margin, record.equivalence_margin, color=LINE, lw=0)
    axes.axhline(0, color=INK, lw=1)
    baselines = dict.fromkeys(contrast["baseline"] for _, contrast in points)
    own = [record.arms[baseline].settings.get(str(record.plot_over)) for baseline in baselines]
    zeros = [(value, 0.0) for value in own if isinstance(value, int | float) and value not in dict(points)]
    means = [(value, float(contrast["mean_difference"])) for value, contrast in points]
    axes.plot(*zip(*sorted(means + zeros), strict=True), "o-", color=color)
    for value, zero in zeros:
        axes.plot([value], [zero], "o", color=color, mfc=PAPER)
    for value, contrast in points:
        if pd.notna(contrast["ci_low"]):
            axes.vlines(value, contrast["ci_low"], contrast["ci_high"], color=color)


def band_differences(diagnostics: pd.DataFrame, arm: str, baseline: str) -> pd.DataFrame:
    """A row for each band of frequency, with mean and 95 % interval of the paired differences; empty if one lacks."""
    rows = []
    for band in BANDS:
        sides = [views.curve_table(diagnostics, name, f"loss/{band}") for name in (arm, baseline)]
        if any(side.empty for side in sides):
            return pd.DataFrame()
        values = [*(sides[0].ffill().iloc[-1] - sides[1].ffill().iloc[-1]).dropna()]
        if not values:
            return pd.DataFrame()
        low, high = interval(values) or (values[0], values[0])
        rows.append({"band": band, "mean": sum(values) / len(values), "low": low, "high": high})
    return pd.DataFrame(rows)


@as_svg
def bands(results: Results, tables: dict[str, pd.DataFrame]) -> Figure:
    """The difference in loss by the frequency of the target; `tables` are the `band_differences` of each arm."""
    styles, margin = line_styles(list(results.record.arms)), results.record.equivalence_margin
    ends = {arm: [*table[["mean", "low", "high"]].to_numpy().flat] for arm, table in tables.items()}
    main = [value for arm in ends if arm in results.record.primary for value in ends[arm]]
    every = [value for values in ends.values() for value in values]
    figure, (axes,) = panels(1, 2.8, 0.3)
    axes.axhline(0, color=INK, lw=1)
    axes.set(ylabel="nats per token", ylim=axis_limits([0, *(main or every)], every, margin))
    for i, (arm, table) in enumerate(tables.items()):
        x = [band + 0.6 * ((i + 0.5) / len(tables) - 0.5) for band in range(len(BANDS))]
        axes.vlines(x, table["low"], table["high"], color=styles[arm].color)
        axes.plot(x, table["mean"], styles[arm].marker, color=styles[arm].color, label=arm)
        for at, value in zip(x, table["mean"], strict=True):
            mark_outside(axes, at, [value], color=styles[arm].color)
    axes.set_xticks(range(len(BANDS)), ["band1\nfrequent", *BANDS[1:-1], "band5\nrare"])
    axes.grid(visible=False, axis="x")
    legend(figure, axes)
    return figure


@as_svg
def gradients(results: Results, diagnostics: pd.DataFrame) -> Figure:
    styles = line_styles(list(results.record.arms))
    figure, axes = panels(len(SIDES), 1.9, 0.4, sharex=True)
    for panel, (column, title) in zip(axes, SIDES.items(), strict=True):
        tables = {arm: views.over_seeds(views.curve_table(diagnostics, arm, column)) for arm in results.record.arms}
        means: list[float] = []
        for arm, table in tables.items():
            if len(table):
                _draw_curve(panel, table, styles[arm], arm)
                means += [*table["mean"]]
        if column != "cosine" and means and max(means) > 5 * min(means) > 0:
            panel.set_yscale("log")
            log_axis(panel.yaxis)
        panel.set_title(title)
    tokens_axis(axes[-1])
    legend(figure, axes[0])
    return figure
