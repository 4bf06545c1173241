"""The files of a report for programs: results.csv, curves.csv and report.json."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lm.ablation import views
from lm.ablation.record import BASE, REPORTED, TRIAL, UNUSED
from lm.ablation.results import POINT, SCORES, Results
from lm.ablation.statistics import interval
from lm.ablation.warnings import Weakness, report_warnings

SCHEMA_VERSION = 1  # of report.json
PURPOSES = (REPORTED, TRIAL, BASE, UNUSED)
WHO = ("arm", "purpose", "seed", "budgets", "status", "error")
ROW = (*WHO, *SCORES, "source_hash", "torch", "resumed_from", "run_dir")
WHERE = ("failure", "host", "executor")  # columns of results.csv where they are known
FILES = ("report.html", "report.md", "report.json", "results.csv", "curves.csv")
RECORDED = ("command", "machine", "threads", "workers", "python", "versions")


def results_frame(results: Results) -> pd.DataFrame:
    """A row for each run; what a run does not have is empty. `purpose` says which rows belong together:

    reported: what the verdicts rest on; trial: of the tuning; base: what others start from; unused: made for other
    settings, code or seeds than are asked for now, kept so that nothing is lost.
    """
    runs = results.runs.assign(budgets=results.runs.groupby("run_dir")["budget"].transform(" ".join))
    frame = pd.concat([runs[runs["purpose"] == purpose].drop_duplicates("run_dir") for purpose in PURPOSES])
    where = [key for key in WHERE if key in frame and frame[key].notna().any()]
    return frame.reindex(columns=[*ROW, *(key for key in views.hyperparameters(results) if key in frame), *where])


def curves_csv(results: Results) -> str:
    """What each run but the trials scored during its training."""
    curves = results.curves.drop_duplicates(["run_dir", "step"])
    return str(curves[["run_dir", *POINT]].to_csv(index=False, lineterminator="\n"))


def verdict_json(results: Results, warnings: Sequence[Weakness]) -> dict[str, Any]:
    """What the values alone say."""
    record, contrasts = results.record, results.contrasts
    interactions = contrasts["family"] == "interaction"
    reported = views.distinct(results.reported())
    with_error = reported[reported["error"].fillna("") != ""]
    return {
        "schema_version": SCHEMA_VERSION,
        "question": record.question,
        "verdict": [*views.asked(results)["statement"]],
        "contrasts": contrasts[~interactions].to_dict("records"),
        "interactions": [
            {"name": row["arm"], "formula": row["baseline"]} | row for row in contrasts[interactions].to_dict("records")
        ],
        "warnings": [{"summary": weakness.summary, "detail": weakness.detail} for weakness in warnings],
        "arms": [_mean_json(results, name, budget) for budget in record.budgets for name in record.arms],
        "runs": results.counts()
        | {"reasons": with_error[["arm", "seed", "status", "error", "run_dir"]].to_dict("records")},
        **{key: getattr(record, key) or None for key in ("seeds", "metric", "equivalence_margin", "baseline")},
    }


def report_json(results: Results) -> dict[str, Any]:
    """The report in numbers; what is not known is null."""
    record = results.record
    made = {"reported": views.distinct(results.reported()), "trials": results.trials}
    content = verdict_json(results, report_warnings(results))
    content["runs"]["rows"] = len(views.rows_alone(results))
    content |= {
        "cost": {
            name: {kind: float(runs["seconds"][runs["arm"] == name].sum()) for kind, runs in made.items()}
            for name in record.arms
        },
        "tuning": {name: _search_json(results, name) for name in results.trials["arm"].unique()},
        "hashes": {name: arm.identity for name, arm in record.arms.items()},
        "paths": {name: str(results.folder / name) for name in FILES},
    }
    return dict(plain(content | {key: getattr(record, key) for key in RECORDED}))


def _mean_json(results: Results, name: str, budget: str) -> dict[str, Any]:
    values = views.done_of(results, name, budget)[results.record.metric].astype(float)
    low, high = interval([*values]) or (None, None)
    statistics = {"n": len(values), "mean": values.mean(), "sd": values.std(), "ci_low": low, "ci_high": high}
    return {"arm": name, "budget": budget} | statistics


def _search_json(results: Results, name: str) -> dict[str, Any]:
    trials, hyperparameters = results.trials[results.trials["arm"] == name], results.hyperparameters(name)
    columns = ["trial", "search", "seed", "run_dir", *hyperparameters, "score", "status"]
    inside = results.tuned_arms[name].is_interior() if name in results.tuned_arms else {}
    chosen = {"chosen": results.record.arms[name].tuned, "inside": inside}
    return {"hyperparameters": hyperparameters, **chosen, "trials": trials[columns].to_dict("records")}


def plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, no types of numpy and pandas."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if value is pd.NA or value is None or value != value or value in (math.inf, -math.inf) else value
