"""Views of an ablation's frames that its report, figures, warnings and tables share."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pandas as pd

from lm.ablation.contrasts import percent
from lm.ablation.results import Results
from lm.config.ablation import BUDGET_NAMES, METRICS, interaction
from lm.system.terminal import duration

METRIC_NAMES = {
    "val_loss": "validation loss, nats per token",
    "val_bpb": "validation loss, bits per byte",
    "val_top1": "next-token accuracy on the validation text",
}


def lower_is_better(results: Results) -> bool:
    return METRICS[results.record.metric][0]


def unit(results: Results) -> str:
    return METRICS[results.record.metric][1]


def ci(contrasts: pd.DataFrame) -> str:
    """What the intervals are called: with their level, which planned looks change."""
    levels = {percent(1 - alpha) for alpha in contrasts["alpha"]}
    return f"{levels.pop()} CI" if len(levels) == 1 else "CI"


def asked(contrasts: pd.DataFrame) -> pd.DataFrame:
    """The comparisons that answer the question, and the interactions: of the first, all where none is primary."""
    family = contrasts["family"]
    first = "primary" if (family == "primary").any() else "secondary"
    return contrasts[family.isin([first, "interaction"])]


def weights(contrast: pd.Series) -> dict[str, int]:
    """The weight of each arm in a difference. An arm that an interaction subtracts from itself has none."""
    if contrast["family"] != "interaction":
        return {contrast["arm"]: 1, contrast["baseline"]: -1}
    return {arm: weight for arm, weight in interaction(contrast["baseline"])[1].items() if weight}


def name_of(contrast: pd.Series) -> str:
    return contrast["arm"] if contrast["family"] == "interaction" else f"{contrast['arm']} - {contrast['baseline']}"


def finished(results: Results, arm: str, budget: str) -> pd.DataFrame:
    """The finished reported runs of an arm under a budget, indexed by seed."""
    groups = _finished_by_arm(results)
    return groups[arm, budget] if (arm, budget) in groups else results.runs[:0].set_index("seed")


@lru_cache(maxsize=2)  # of results that are asked for many times and never changed
def _finished_by_arm(results: Results) -> dict[tuple[str, str], pd.DataFrame]:
    runs = results.runs[(results.runs["purpose"] == "reported") & (results.runs["status"] == "done")]
    return {key: group.set_index("seed") for key, group in runs.groupby(["arm", "budget"])}


@lru_cache(maxsize=2)
def _seeds_by_status(results: Results) -> dict[tuple[str, str, str], list[int]]:
    runs = results.runs[results.runs["purpose"] == "reported"]
    return {key: group.tolist() for key, group in runs.groupby(["arm", "budget", "status"])["seed"]}


def seeds_with(results: Results, arm: str, budget: str, status: str) -> list[int]:
    """The seeds at which the reported run of an arm under a budget has a status."""
    return _seeds_by_status(results).get((arm, budget, status), [])


def n_ended(results: Results, arm: str, budget: str) -> int:
    """How many runs of an arm came to an end, finished or diverged."""
    return len(seeds_with(results, arm, budget, "done")) + len(seeds_with(results, arm, budget, "diverged"))


@lru_cache(maxsize=2)
def curves_shown(results: Results) -> pd.DataFrame:
    """The validations of the finished reported runs under the first budget; `metric` is that of the ablation."""
    curves, budget, metric = results.curves, results.record.budgets[0], results.record.metric
    run_dirs = {run_dir for arm in results.record.arms for run_dir in finished(results, arm, budget)["run_dir"]}
    shown = (curves["budget"] == budget) & curves["run_dir"].isin(run_dirs) & (curves["purpose"] == "reported")
    return curves[shown].assign(metric=lambda frame: frame[f"val/{metric.removeprefix('val_')}"])


def differences(results: Results, contrast: pd.Series, column: str | None = None) -> pd.Series:
    """By seed, the sum of the arms' scores with their weights, where all arms have one."""
    column = column or results.record.metric
    parts = [
        weight * finished(results, arm, contrast["budget"])[column].astype(float)
        for arm, weight in weights(contrast).items()
    ]
    return pd.concat(parts, axis=1, join="inner").sum(axis=1).reindex(_in_order(results, parts))


def _in_order(results: Results, parts: Sequence[pd.Series]) -> list[int]:
    return [seed for seed in results.record.seeds if all(seed in part.index for part in parts)]


def merged(results: Results, contrasts: pd.DataFrame) -> pd.DataFrame:
    """Comparisons of the same runs once, with a column `budgets`: the names of those that the runs serve."""
    reported = results.runs[results.runs["purpose"] == "reported"]
    run_dirs = reported.groupby(["arm", "budget"])["run_dir"].agg(frozenset).to_dict()

    def key(contrast: pd.Series) -> tuple[Any, ...]:
        runs = {arm: run_dirs.get((arm, contrast["budget"]), contrast["budget"]) for arm in weights(contrast)}
        return contrast["arm"], contrast["baseline"], frozenset(runs.items())

    keys = [key(contrast) for _, contrast in contrasts.iterrows()]
    budgets: dict[Any, list[str]] = {}
    for of, budget in zip(keys, contrasts["budget"], strict=True):
        budgets.setdefault(of, []).append(BUDGET_NAMES[budget])
    first = ~pd.Series(keys, index=contrasts.index, dtype=object).duplicated()
    return contrasts[first].assign(budgets=list(budgets.values()))


def at_equal(results: Results, contrast: pd.Series) -> str:
    """ " at equal tokens", where there are several budgets."""
    return f" at equal {BUDGET_NAMES[contrast['budget']]}" if len(results.record.budgets) > 1 else ""


def sentences(results: Results) -> list[str]:
    """The verdicts in words, those of the same runs once."""
    many, lines = len(results.record.budgets) > 1, []
    for _, contrast in merged(results, asked(results.contrasts)).iterrows():
        words = contrast["sentence"]
        lines.append(f"At equal {' and '.join(contrast['budgets'])}, {words}" if many else words)
    return lines


def stopped_early(results: Results) -> str:
    """What was not run because a planned look had decided; empty if nothing was."""
    n, looks = len(results.record.seeds), results.record.looks
    if not looks or n >= looks[-1]:
        return ""
    runs = results.runs[results.runs["purpose"] == "reported"].drop_duplicates("run_dir")
    n_saved = len(runs) * (looks[-1] - n) // n
    time = duration(n_saved * runs["seconds"].astype(float).mean() / results.record.workers)
    return f"decided with {n} of {looks[-1]} seeds: {n_saved} runs, about {time}, were not made"


@lru_cache(maxsize=2)
def reported(results: Results) -> pd.DataFrame:
    """The reported runs, each once, whatever budgets it serves."""
    return results.runs[results.runs["purpose"] == "reported"].drop_duplicates("run_dir")


def run_counts(results: Results) -> dict[str, int]:
    """How many reported runs have each status."""
    status = reported(results)["status"]
    return {name: int((status == name).sum()) for name in ("done", "failed", "diverged", "missing")}


def done(results: Results) -> pd.DataFrame:
    """The finished ones of the reported runs, each once."""
    return reported(results)[reported(results)["status"] == "done"]


def rows_alone(results: Results) -> pd.DataFrame:
    """Finished reported runs of which results.csv is all that is left."""
    runs = done(results)
    return runs[pd.Series([not (results.folder / run_dir).exists() for run_dir in runs["run_dir"]], runs.index, bool)]


def curve_table(curves: pd.DataFrame, arm: str, column: str = "metric") -> pd.DataFrame:
    """A curve for each seed of an arm: tokens by seeds."""
    chosen = curves[(curves["arm"] == arm) & curves[column].notna()].drop_duplicates(["tokens", "seed"], keep="last")
    return chosen.pivot(index="tokens", columns="seed", values=column).astype(float)


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Mean, lowest and highest value over the seeds, where all of them have one."""
    table, statistics = table.dropna(), ["mean", "min", "max"]
    return pd.DataFrame(columns=statistics) if table.empty else table.agg(statistics, axis=1)


def gap_table(curves: pd.DataFrame, arm: str, baseline: str) -> pd.DataFrame:
    """The difference of two arms during training: tokens by seeds that both have finished."""
    first, second = (curve_table(curves, name) for name in (arm, baseline))
    return (first - second).reindex(columns=first.columns.intersection(second.columns))
