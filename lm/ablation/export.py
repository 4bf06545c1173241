"""The files of a report for programs: results.csv, curves.csv and report.json."""

from typing import Any

import pandas as pd

from lm.ablation import views
from lm.ablation.judge.shape import normality_p
from lm.ablation.judge.statistics import interval
from lm.ablation.outcomes import RESULT, WHO
from lm.ablation.report_input import POINT, Results
from lm.ablation.warnings import Warning

SCHEMA_VERSION = 1  # of report.json
ROW = (*WHO, *RESULT, "source_hash", "torch", "resumed_from", "run_dir")
WHERE = ("host", "executor")  # columns of results.csv where they are known
FILES = ("report.html", "report.md", "report.json", "results.csv", "curves.csv")
RECORDED = (
    *("command", "machine", "threads", "workers", "python", "versions"),
    *("seeds", "metric", "equivalence_margin", "baseline"),
)


def results_frame(results: Results) -> pd.DataFrame:
    """A row for each run; what a run does not have is empty. `purpose` says which rows belong together:

    reported: what the verdicts rest on; trial: of the tuning; unused: made for other settings, code or seeds than are
    asked for now, kept so that nothing is lost.
    """
    tuned = {key: None for search in results.record.searches.values() for key in search.hyperparameters}
    runs = results.runs
    order = runs["run_dir"].drop_duplicates()
    budgets = runs.groupby("run_dir")["budget"].agg(" ".join)
    reported = runs[runs["purpose"] == "reported"].drop_duplicates("run_dir")
    unused = runs[runs["purpose"] == "unused"].drop_duplicates("run_dir")
    reported = reported.assign(budgets=reported["run_dir"].map(budgets)) if len(order) else reported
    trials = results.trials.assign(purpose="trial", budgets=None)
    frames = [frame for frame in (reported, trials, unused.assign(budgets=None)) if len(frame)]
    frame = pd.concat(frames, ignore_index=True)
    where = [key for key in WHERE if key in frame and frame[key].notna().any()]
    return frame.reindex(columns=[*ROW, *(key for key in tuned if key in frame), *where])


def curves_csv(results: Results) -> str:
    """What each run but the trials scored during its training."""
    curves = views.all_curves(results).drop_duplicates(["run_dir", "step"])
    return str(curves[["run_dir", *POINT]].to_csv(index=False, lineterminator="\n"))


def report_json(results: Results, warnings: list[Warning]) -> dict[str, Any]:
    """The report in numbers; what is not known is null."""
    record, contrasts = results.record, results.contrasts
    interactions = contrasts["family"] == "interaction"
    reported = views.reported(results)
    with_error = reported[reported["error"].fillna("") != ""]
    content = {
        "schema_version": SCHEMA_VERSION,
        "question": record.question,
        "verdict": views.sentences(results),
        "contrasts": [_contrast_json(results, row) for _, row in contrasts[~interactions].iterrows()],
        "interactions": [
            {"name": row["arm"], "formula": row["baseline"]} | _contrast_json(results, row)
            for _, row in contrasts[interactions].iterrows()
        ],
        "warnings": [warning._asdict() for warning in warnings],
        "arms": [_mean_json(results, name, budget) for budget in record.budgets for name in record.arms],
        "cost": {name: _cost_json(results, name) for name in record.arms},
        "runs": views.run_counts(results)
        | {"rows": len(views.rows_alone(results))}
        | {"reasons": with_error[["arm", "seed", "status", "error", "run_dir"]].to_dict("records")},
        "tuning": {name: _search_json(results, name) for name in results.trials["arm"].unique()},
        "hashes": {name: arm.identity for name, arm in record.arms.items()},
        "paths": {name: str(results.folder / name) for name in FILES},
    }
    return dict(_plain(content | {key: getattr(record, key) for key in RECORDED}))


def _contrast_json(results: Results, contrast: pd.Series) -> dict[str, Any]:
    values = views.differences(results, contrast)
    budget, arms = contrast["budget"], views.weights(contrast)
    seeds = {
        status: {arm: views.seeds_with(results, arm, budget, status) for arm in arms}
        for status in ("diverged", "failed")
    }
    return contrast.drop("ablation").to_dict() | {
        "seeds": values.index.tolist(),
        "lost_seeds": [seed for seed in results.record.seeds if seed not in values.index],
        "differences": values.tolist(),
        "ended": {arm: views.n_ended(results, arm, budget) for arm in arms},
        **{status: {arm: of for arm, of in by_arm.items() if of} for status, by_arm in seeds.items()},
        "p_normal": normality_p(values.tolist()),
    }


def _mean_json(results: Results, name: str, budget: str) -> dict[str, Any]:
    values = views.finished(results, name, budget)[results.record.metric].astype(float)
    low, high = interval([*values]) or (None, None)
    statistics = {"n": len(values), "mean": values.mean(), "sd": values.std(), "ci_low": low, "ci_high": high}
    return {"arm": name, "budget": budget} | statistics


def _cost_json(results: Results, name: str) -> dict[str, float]:
    """Seconds of computing, in finished runs."""
    reported = views.reported(results)
    kinds = {"reported": reported, "trials": results.trials}
    return {kind: float(runs[runs["arm"] == name]["seconds"].sum()) for kind, runs in kinds.items()}


def _search_json(results: Results, name: str) -> dict[str, Any]:
    search, trials = results.record.searches[name], results.trials[results.trials["arm"] == name]
    columns = ["trial", "search", "seed", "run_dir", *search.hyperparameters, "score", "status"]
    chosen = {"chosen": results.record.arms[name].tuned, "inside": search.inside}
    return {"hyperparameters": search.hyperparameters, **chosen, "trials": trials[columns].to_dict("records")}


def _plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, no types of numpy and pandas."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return (
        None if value is pd.NA or value is None or value != value or value in (float("inf"), -float("inf")) else value
    )
