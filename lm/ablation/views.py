"""Views of an ablation's frames that its report, figures, warnings and tables share."""

from collections.abc import Iterable
from functools import lru_cache

import pandas as pd

from lm.ablation.contrasts import percent
from lm.ablation.record import AblationRecord
from lm.ablation.results import Results
from lm.config.ablation import BUDGET_NAMES, METRICS

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


# --- comparisons


@lru_cache(maxsize=2)  # of results that are asked for many times and never changed
def comparisons(results: Results) -> pd.DataFrame:
    """The contrasts, those of the same runs once, with further columns for a reader.

    `budgets`: what is held equal, in words ("tokens and FLOPs"); `at_equal`: the same after a name, empty where there
    is one budget; `name`: both arms, or the name of an interaction; `is_asked`: it answers the question, as the primary
    comparisons do (all, where none is primary), and interactions; `statement`: the verdict in words.
    """
    contrasts, several = results.contrasts, len(results.record.budgets) > 1
    served = [distinct_budgets(results, contrast["ended"]) for _, contrast in contrasts.iterrows()]
    budgets = [names.get(budget) for names, budget in zip(served, contrasts["budget"], strict=True)]
    shown = contrasts.assign(budgets=budgets)[pd.notna(budgets)]
    is_interaction, is_primary = shown["family"] == "interaction", shown["family"] == "primary"
    return shown.assign(
        at_equal=" at equal " + shown["budgets"] if several else "",
        name=shown["arm"].where(is_interaction, shown["arm"] + " - " + shown["baseline"]),
        is_asked=is_interaction | is_primary | (not is_primary.any()),
        statement="At equal " + shown["budgets"] + ", " + shown["sentence"] if several else shown["sentence"],
    )


def asked(results: Results) -> pd.DataFrame:
    """The comparisons that answer the question, and interactions."""
    return comparisons(results)[comparisons(results)["is_asked"]]


def distinct_budgets(results: Results, arms: Iterable[str]) -> dict[str, str]:
    """Budgets under which arms do not have the runs of an earlier one, with the names of all that their runs serve."""
    runs = results.reported()
    runs = runs[runs["arm"].isin([*arms])]
    budgets: dict[frozenset[str], list[str]] = {}
    for budget in results.record.budgets:
        run_dirs = frozenset(runs["run_dir"][runs["budget"] == budget])
        budgets.setdefault(run_dirs or frozenset([budget]), []).append(budget)
    return {same[0]: " and ".join(BUDGET_NAMES[budget] for budget in same) for same in budgets.values()}


def main_arms(results: Results) -> set[str]:
    """The baseline and the primary arms (all, where none is primary), which set the scale of a figure."""
    return {results.record.baseline, *(results.record.primary or results.record.arms)}


def hyperparameters(results: Results) -> list[str]:
    """The tuned hyperparameters of all arms."""
    return [*dict.fromkeys(key for arm in results.record.arms for key in results.hyperparameters(arm))]


def stopped_early(results: Results) -> str:
    """What was not run because a planned look had decided; empty if nothing was."""
    n, looks = len(results.record.seeds), results.record.looks
    if not looks or n >= looks[-1]:
        return ""
    n_saved = len(distinct(results.reported())) * (looks[-1] - n) // n
    return f"decided with {n} of {looks[-1]} seeds: {n_saved} runs were not made"


# --- runs


def distinct(runs: pd.DataFrame) -> pd.DataFrame:
    """Each run once, whatever budgets it serves."""
    return runs.drop_duplicates("run_dir")


@lru_cache(maxsize=2)
def done(results: Results) -> pd.DataFrame:
    """The finished reported runs, a row for each budget."""
    runs = results.reported()
    return runs[runs["status"] == "done"]


def done_of(results: Results, arm: str, budget: str) -> pd.DataFrame:
    """The finished reported runs of an arm under a budget, indexed by seed."""
    runs = done(results)
    return runs[(runs["arm"] == arm) & (runs["budget"] == budget)].set_index("seed")


def pairs(results: Results, arm: str, baseline: str, budget: str) -> pd.DataFrame:
    """A row for each seed that both have finished, with the columns of both, such as seconds_arm, seconds_baseline."""
    first, second = (done_of(results, name, budget) for name in (arm, baseline))
    return first.merge(second, left_index=True, right_index=True, suffixes=("_arm", "_baseline"))


def rows_alone(results: Results) -> pd.DataFrame:
    """Finished reported runs of which results.csv is all that is left."""
    runs = distinct(done(results))
    return runs[~runs["has_folder"].astype(bool)]


# --- curves


@lru_cache(maxsize=2)
def curves_shown(results: Results) -> pd.DataFrame:
    """The validations of the finished reported runs under the first budget; `metric` is that of the ablation.

    Where a run keeps its best model (checkpoint.best), `metric` is that of the best model so far, and ends at the score
    of the run: its arm is compared by that model.
    """
    curves, metric = results.curves, results.record.metric
    shown = curves["run_dir"].isin(done(results)["run_dir"]) & (curves["purpose"] == "reported")
    shown &= curves["budget"] == results.record.budgets[0]
    curves = curves[shown].assign(metric=lambda frame: frame[f"val/{metric.removeprefix('val_')}"])
    scores = distinct(done(results)).set_index("run_dir")[metric].astype(float)
    for run_dir, run in curves[curves["arm"].isin(best_arms(results.record))].groupby("run_dir"):
        is_best = run["val/loss"] <= run["val/loss"].cummin()
        curves.loc[run.index, "metric"] = run["metric"].where(is_best).ffill()
        curves.loc[run.index[-1], "metric"] = scores[run_dir]
    return curves


def best_arms(record: AblationRecord) -> list[str]:
    """Arms that are scored by their best model, not by their last."""
    return [name for name, arm in record.arms.items() if arm.settings.get("checkpoint.best")]


def curve_table(curves: pd.DataFrame, arm: str) -> pd.DataFrame:
    """A curve of the metric for each seed of an arm: tokens by seeds."""
    chosen = curves[(curves["arm"] == arm) & curves["metric"].notna()].drop_duplicates(["tokens", "seed"], keep="last")
    return chosen.pivot(index="tokens", columns="seed", values="metric").astype(float)


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Mean, lowest and highest value over the seeds, where all of them have one."""
    table, statistics = table.dropna(), ["mean", "min", "max"]
    return pd.DataFrame(columns=statistics) if table.empty else table.agg(statistics, axis=1)


def gap_table(curves: pd.DataFrame, arm: str, baseline: str) -> pd.DataFrame:
    """The difference of two arms during training: tokens by seeds that both have finished."""
    first, second = (curve_table(curves, name) for name in (arm, baseline))
    return (first - second).reindex(columns=first.columns.intersection(second.columns))
