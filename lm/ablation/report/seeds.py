"""Every run as a dot: a line for each seed across the arms."""

import math

from matplotlib.figure import Figure

from lm.ablation.judge.study import Study
from lm.ablation.report.answer import BUDGET_NAMES, METRIC_NAMES
from lm.report.plots import MARKERS, beyond, drawing, legend, panels, short, window

LABELS = 24  # in the legend; of more seeds every second, third ... is named


def seeds_section(study: Study, pictures: dict[str, str]) -> list[str]:
    if not any(row.result for row in study.rows):
        return []
    pictures["seeds"] = seeds(study)
    return [
        "## Results per seed",
        f"Final {METRIC_NAMES[study.metric]}, of every run. A line joins the runs with one seed: where lines are "
        "parallel, the seeds agree about the arms. An arrow with numbers stands for runs outside the plot.",
        "![A line for each seed across the arms](figures/seeds.svg)",
    ]


@drawing
def seeds(study: Study) -> Figure:
    """Arms in the order of the question; a panel for each budget."""
    arms, budgets = list(study.record.arms), study.record.budgets
    scores = {(arm, budget): study.scores(arm, budget) for arm in arms for budget in budgets}
    found = {seed for one in scores.values() for seed in one}
    numbers = [seed for seed in study.record.seeds if seed in found]
    everything = [value for one in scores.values() for value in one.values()]
    main = {study.record.baseline, *(study.record.primary or arms)}
    core = [value for (arm, _), one in scores.items() if arm in main for value in one.values()]
    limits = window(core or everything, everything, study.record.equivalence_margin)
    crowded, named = sum(map(len, arms)) > 38, -(-len(numbers) // LABELS)
    figure, axes = panels(len(budgets), 2.4, 0.5 + 0.5 * crowded, sharex=True)
    for one, budget in zip(axes, budgets, strict=True):
        one.set(ylabel=study.unit, ylim=limits, xlim=(-0.5, len(arms) - 0.5))
        for i, seed in enumerate(numbers):
            values = [scores[arm, budget].get(seed, math.nan) for arm in arms]
            shown = [value if limits[0] <= value <= limits[1] else math.nan for value in values]
            color = f"{0.65 * i / max(1, len(numbers) - 1):.2f}"  # from black to grey
            name = None if i % named else f"seed {seed}"
            one.plot(range(len(arms)), shown, marker=MARKERS[i % len(MARKERS)], color=color, lw=1, label=name)
        for x, arm in enumerate(arms):
            beyond(one, x, list(scores[arm, budget].values()))
        if len(budgets) > 1:
            one.set_title(f"At equal {BUDGET_NAMES[budget]}")
        one.set_xticks(range(len(arms)), map(short, arms))
        one.tick_params(axis="x", rotation=35 * crowded)
        for text in one.get_xticklabels() if crowded else ():
            text.set(ha="right", rotation_mode="anchor")
        one.grid(visible=False, axis="x")
    legend(figure, axes[0])
    return figure
