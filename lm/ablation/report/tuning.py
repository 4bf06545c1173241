"""The hyperparameter search of each arm: what was tried, what was best, and whether the range was wide enough."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.ablation.judge.study import Study
from lm.ablation.record import SearchRecord, TrialRecord
from lm.ablation.report.answer import METRIC_NAMES
from lm.report.page import plain, table
from lm.report.plots import Look, drawing, legend, log_axis, looks, panels, window

Searches = dict[str, SearchRecord]  # by arm
HEAD = ("arm", "hyperparameter", "best", "position", "search range", "first", "trials", "without result")


def tuning_section(study: Study, pictures: dict[str, str]) -> list[str]:
    known = study.searches
    searches = {arm: known[arm] for arm in study.record.arms if arm in known and known[arm].hyperparameters}
    if not searches:
        return []
    pictures["tuning"] = tuning(study, searches)
    seeds = study.record.tune.seeds
    return [
        "## Tuning",
        f"The {METRIC_NAMES[study.metric]}, of every search trial, over each tuned hyperparameter; "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}. Several trials can share a value, because they "
        "differ in another hyperparameter: lines join the best trial at each value. A ring marks the best trial of an "
        "arm, a cross at the edge a trial that diverged, a hollow triangle a trial outside the plot.",
        "![Every search trial over each tuned hyperparameter](figures/tuning.svg)",
        tuning_table(study, searches),
    ]


def tuning_table(study: Study, searches: Searches) -> str:
    rows = []
    for arm, search in searches.items():
        trials, best = search.trials, best_trial(study, search)
        failed = str(len(trials) - len(scores(search)))
        for setting in search.hyperparameters:
            values = [trial.values[setting] for trial in trials]
            where = {True: "inside", False: "**at the edge**", None: "**not varied**"}[search.inside[setting]]
            chosen = study.record.arms[arm].tuned or (best.values if best else {})
            found = f"{chosen[setting]:g}" if setting in chosen else "-"
            tried = f"{min(values):g} to {max(values):g}"
            rows.append([plain(arm), plain(setting), found, where, tried, f"{values[0]:g}", str(len(trials)), failed])
    return table(HEAD, rows)


def scores(search: SearchRecord) -> list[float]:
    return [trial.score for trial in search.trials if trial.score is not None]


def best_trial(study: Study, search: SearchRecord) -> TrialRecord | None:
    best = (min if study.lower_is_better else max)(scores(search), default=None)
    return next((trial for trial in search.trials if trial.score is not None and trial.score == best), None)


@drawing
def tuning(study: Study, searches: Searches) -> Figure:
    """A panel for each hyperparameter. The plot reaches as far up as helps to see where the best value lies."""
    hyperparameters = list(dict.fromkeys(setting for search in searches.values() for setting in search.hyperparameters))
    main = {study.record.baseline, *study.record.primary} & searches.keys() or searches.keys()
    losses = {arm: scores(search) for arm, search in searches.items()}
    asked = sorted((loss for arm in main for loss in losses[arm]), reverse=not study.lower_is_better)
    everything = [loss for one in losses.values() for loss in one] or [0.0]
    limits = window(asked[: -(-3 * len(asked) // 4)] or everything, everything, 5 * study.record.equivalence_margin)
    figure, axes = panels(len(hyperparameters), 2.3, 0.6)
    style = looks(list(study.record.arms))
    for one, setting in zip(axes, hyperparameters, strict=True):
        one.set(title=setting, ylabel=study.unit, ylim=limits, xscale="log")
        log_axis(one.xaxis)
        for arm, search in searches.items():
            if setting in search.hyperparameters:
                draw_search(one, study, search, setting, style[arm], arm)
    legend(figure, max(axes, key=lambda one: len(one.get_legend_handles_labels()[1])))
    return figure


def draw_search(axes: Axes, study: Study, search: SearchRecord, setting: str, look: Look, arm: str) -> None:
    (low, high), color = axes.get_ylim(), look.color
    edge, better = (high, min) if study.lower_is_better else (low, max)  # the edge of what is worse
    envelope: dict[float, float] = {}
    for trial in sorted(search.trials, key=lambda trial: trial.values[setting]):
        value, loss = trial.values[setting], trial.score
        if loss is None:
            axes.plot(value, edge, "x", color=color, ms=7, mew=2, clip_on=False)
            continue
        envelope[value] = better(loss, envelope.get(value, loss))
        if low <= loss <= high:
            axes.plot(value, loss, look.marker, color=color, ms=4)
        else:
            end, triangle = (high, "^") if loss > high else (low, "v")
            axes.plot(value, end, triangle, color=color, mfc="white", clip_on=False)
    axes.plot(list(envelope), list(envelope.values()), color=color, linestyle=look.linestyle)
    axes.plot([], [], color=color, linestyle=look.linestyle, marker=look.marker, label=arm)
    best = best_trial(study, search)
    if best and best.score is not None and low <= best.score <= high:
        axes.plot(best.values[setting], best.score, "o", ms=12, mfc="none", color=color, mew=1.5)
