"""Curves over training, mean and range over seeds; and the learning curves."""

from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.ablation.judge.study import Study
from lm.ablation.report.answer import BUDGET_NAMES, METRIC_NAMES
from lm.report.metrics import FILE, Points, after, points
from lm.report.page import code
from lm.report.plots import Look, drawing, legend, looks, panels, tokens_axis, window

SCORED = "val/tokens"  # how many tokens a point was scored on
NEAR_HALF = 0.1  # of the tokens: as far from half of them the validation may be that stands for it
Curve = dict[int, tuple[float, float, float]]  # tokens -> mean, least and most over the seeds


def curves_section(study: Study, pictures: dict[str, str]) -> list[str]:
    found = mean_curves(study)
    if not any(len(curve) > 1 for curve in found.values()):
        return no_curve(study)
    pictures["learning"] = learning(study, found)
    budget = study.record.budgets[0]
    at = f" (runs at equal {BUDGET_NAMES[budget]})" if len(study.record.budgets) > 1 else ""
    return [
        "## Learning curves",
        f"The {METRIC_NAMES[study.metric]}, during training{at}: means over seeds; the shaded area reaches from the "
        f"lowest to the highest seed. Below, each arm minus {study.record.baseline}, paired by seed. An arm far from "
        f"the others may lie outside the plot. {coverage(study)}",
        "![Learning curves of all arms](figures/learning.svg)",
    ]


def coverage(study: Study) -> str:
    """Which part of the validation text the points of the curves were scored on."""
    runs = {
        row.arm: [int(line[SCORED]) for line in study.lines(row, FILE) if line.get("val/loss")]
        for row in study.rows
        if row.result
    }
    arm, (first, *_, last) = next((arm, scored) for arm, scored in runs.items() if len(scored) > 1)
    whole = study.record.arms[arm].val_tokens - 1  # the first token is not scored
    if first == whole:
        return "Every point is a score of the whole validation text."
    estimates = f"Points are estimates on {first:,} of {whole:,} tokens of the validation text"
    if last == whole:
        return f"{estimates}, in evenly spaced windows; the last one is the score of the whole text, as in the tables."
    return f"{estimates}, also after the last step: curves do not end at the score of the whole text, as in the tables."


def no_curve(study: Study) -> list[str]:
    """Why there is none, if runs were too short to have one."""
    record = study.record
    arm = record.arms[record.baseline]
    steps, every = arm.steps[record.budgets[0]], arm.settings.get("validation.every") or 0
    if not any(row.result for row in study.rows) or 0 < 2 * every <= steps:
        return []
    short = f"runs of {steps:,} steps with {code(f'validation.every={every}')} are not validated twice during training"
    more = code(f"validation.every={max(1, steps // 10)}")
    return ["## Learning curves", f"There are no learning curves: {short}. Set {more} to record them."]


def mean_curves(study: Study, file: str = FILE, name: str | None = None, alike: bool = False) -> dict[str, Curve]:
    """Of each arm, over its finished runs under the first budget."""
    found = {arm: over_seeds(list(by_seed(study, arm, file, name, alike).values())) for arm in study.record.arms}
    return {arm: curve for arm, curve in found.items() if curve}


def by_seed(
    study: Study, arm: str, file: str = FILE, name: str | None = None, alike: bool = False
) -> dict[int, Points]:
    """A column of each run's CSV file, without what is no number; runs that have none are left out.

    By default that of the ablation's metric. `alike`: without the points that were scored on more of the text than the
    first one was.
    """
    name, found = name or f"val/{study.metric.removeprefix('val_')}", {}
    for seed, row in study.finished(arm, study.record.budgets[0]).items():
        lines = [line for line in study.lines(row, file) if line.get(name)]
        lines = [line for line in lines if not alike or line.get(SCORED) == lines[0].get(SCORED)]
        found[seed] = points(lines, name)
    return {seed: one for seed, one in found.items() if one}


def over_seeds(curves: list[Points]) -> Curve:
    """Where all of them have a value."""
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    columns = {tokens: [curve[tokens] for curve in curves] for tokens in shared}
    return {tokens: (fmean(values), min(values), max(values)) for tokens, values in columns.items()}


def draw_curve(axes: Axes, curve: Curve, look: Look, name: str) -> None:
    mean, least, most = zip(*curve.values(), strict=True)
    axes.plot(list(curve), mean, color=look.color, linestyle=look.linestyle, label=name)
    axes.fill_between(list(curve), least, most, color=look.color, alpha=0.15, lw=0)


@drawing
def learning(study: Study, curves: dict[str, Curve]) -> Figure:
    baseline, style = study.record.baseline, looks(list(study.record.arms))
    apart = differences(study)
    figure, axes = panels(1 + bool(apart), 2.6, 0.5, sharex=True)
    for arm, curve in curves.items():
        draw_curve(axes[0], curve, style[arm], arm)
    axes[0].set(ylabel=study.unit, ylim=window(late(study, curves), late(study, curves, every=True)))
    if apart:
        for arm, curve in apart.items():
            draw_curve(axes[1], curve, style[arm], arm)
        axes[1].axhline(0, color="black", lw=1)
        limits = window([0, *late(study, apart)], late(study, apart, every=True), study.record.equivalence_margin)
        axes[1].set(ylabel=f"minus {baseline}", ylim=limits)
    tokens_axis(axes[-1])
    legend(figure, axes[0])
    return figure


def differences(study: Study) -> dict[str, Curve]:
    """Each arm minus the baseline, where both have validated after as many tokens."""
    baseline = study.record.baseline
    found = {arm: over_seeds(gaps(study, arm, baseline)) for arm in study.record.arms if arm != baseline}
    return {arm: curve for arm, curve in found.items() if len(curve) > 1}


def gaps(study: Study, arm: str, other: str) -> list[Points]:
    """The difference of two arms during training, for each seed that both have finished."""
    ours, theirs = (by_seed(study, one) for one in (arm, other))
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return [{x: one[x] - two[x] for x in one if x in two} for one, two in pairs]


def halfway(study: Study, arm: str, other: str) -> list[tuple[float, float]]:
    """The difference of two arms after half of training and at its end, for each seed of which both are known.

    None where arms see unequal numbers of tokens: their curves end at other places.
    """
    record, budget = study.record.arms, study.record.budgets[0]
    ends = {record[one].steps[budget] * record[one].tokens_per_step for one in (arm, other)}
    found = []
    for gap in gaps(study, arm, other):
        end = max(gap, default=0)
        half = min(gap, key=lambda tokens: abs(2 * tokens - end), default=0)
        if ends == {end} and abs(2 * half - end) <= NEAR_HALF * end:
            found.append((gap[half], gap[end]))
    return found


def late(study: Study, curves: dict[str, Curve], every: bool = False) -> list[float]:
    """Values after the first third, when curves have come down; of the primary arms, or of every arm."""
    main = {study.record.baseline, *study.record.primary}
    chosen = [curve for arm, curve in curves.items() if arm in main and not every] or list(curves.values())
    return [value for curve in chosen for triple in after(curve, 3) for value in triple]
