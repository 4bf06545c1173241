"""The files for programs: results.csv, a row for each run, curves.csv and report.json, the report in numbers."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from lm.ablation.judge.statistics import interval
from lm.ablation.judge.study import Contrast, Row, Study, spread
from lm.ablation.restore import RESULT

WHO = ("arm", "seed", "budgets", "purpose", "status", "error")
COLUMNS = (*WHO, *RESULT, "source_hash", "torch", "resumed_from", "run_dir")
POINT = ("step", "tokens", "val/loss", "val/bpb", "val/top1")  # of metrics.csv
RECORDED = (
    "command",
    "machine",
    "threads",
    "workers",
    "python",
    "versions",
    "seeds",
    "metric",
    "equivalence_margin",
    "baseline",
)


def results_csv(study: Study) -> str:
    """Every run, reported or trial, finished or not, and what is asked for no more; what it does not have is empty."""
    tuned = tuned_values(study)
    hyperparameters = list(dict.fromkeys(setting for values in tuned.values() for setting in values))
    kinds = ((study.rows, "reported"), (study.trials, "trial"), (study.unused(), "unused"))
    lines = [line(study, row, purpose) | tuned.get(row.run_dir, {}) for rows, purpose in kinds for row in rows]
    return csv_text([*COLUMNS, *hyperparameters], lines)


def curves_csv(study: Study) -> str:
    """What each run but the trials scored during its training."""
    rows = [
        {"run_dir": row.run_dir} | {key: point[key] for key in POINT}
        for row in (*study.rows, *study.unused())
        for point in study.lines(row, "metrics.csv")
        if point.get("val/loss")
    ]
    return csv_text(["run_dir", *POINT], rows)


def csv_text(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """What a row does not have is empty."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def line(study: Study, row: Row, purpose: str) -> dict[str, Any]:
    result, arm = row.result, None if purpose == "unused" else study.record["arms"][row.arm]
    found = {"arm": row.arm, "seed": row.seed, "budgets": " ".join(row.budgets), "purpose": purpose}
    found |= {"status": row.status, "error": row.error, "run_dir": row.run_dir}
    found |= {"source_hash": arm["identity"]["source_hash"]} if arm else {}
    if result:
        found |= {key: result.get(key) for key in RESULT}
        found |= {"torch": result["versions"]["torch"], "resumed_from": " ".join(map(str, result["resumed_from"]))}
    return found


def tuned_values(study: Study) -> dict[str, dict[str, float]]:
    """The values that tuning has set, by run directory."""
    found = {row.run_dir: study.record["arms"][row.arm]["tuned"] for row in study.rows}
    for search in study.record.get("searches", {}).values():
        found |= {run_dir: trial["values"] for trial in search["trials"] for run_dir in trial["run_dirs"]}
    return found


def report_json(study: Study, contrasts: Sequence[Contrast], verdict: list[str]) -> str:
    record = study.record
    found = {
        "question": record["question"],
        "verdict": verdict,
        "contrasts": [contrast(study, one) for one in contrasts],
        "arms": [arm_mean(study, name, budget) for budget in record["budgets"] for name in record["arms"]],
        "cost": {name: cost(study, name) for name in record["arms"]},
        "cells": study.counts() | {"reasons": [reason(row) for row in study.rows if row.error]},
        "tuning": record.get("searches", {}) if record["tune"]["trials"] else {},
        "hashes": {name: arm["identity"] for name, arm in record["arms"].items()},
    }
    found |= {key: record[key] for key in RECORDED}
    return json.dumps(without_nan(found), indent=1, allow_nan=False) + "\n"


def contrast(study: Study, one: Contrast) -> dict[str, Any]:
    found = one.comparison
    return {
        "arm": one.arm,
        "baseline": one.baseline,
        "budget": one.budget,
        "primary": one.primary,
        "n_seeds": found.n,
        "seeds": one.seeds,
        "lost_seeds": one.lost,
        "differences": one.differences,
        "mean_difference": found.mean,
        "sd": found.sd,
        "ci_low": found.ci_low,
        "ci_high": found.ci_high,
        "p": found.p_different,
        "p_adjusted": found.p_different_adjusted,
        "p_equivalent": found.p_equivalent,
        "p_equivalent_adjusted": found.p_equivalent_adjusted,
        "minimum_detectable": found.minimum_detectable,
        "wins": found.wins,
        "verdict": found.verdict,
        "seeds_needed": found.seeds_needed,
        "diverged": one.diverged,
        "sentence": study.say(one),
    }


def arm_mean(study: Study, name: str, budget: str) -> dict[str, Any]:
    values = list(study.scores(name, budget).values())
    mean, sd = spread(values) if values else (None, None)
    low, high = interval(values) or (None, None)
    return {"arm": name, "budget": budget, "n": len(values), "mean": mean, "sd": sd, "ci_low": low, "ci_high": high}


def cost(study: Study, name: str) -> dict[str, float]:
    """Seconds of computing, in finished runs."""
    kinds = {"reported": study.rows, "trials": study.trials}
    spent = {
        kind: [row.result["seconds"] for row in rows if row.arm == name and row.result] for kind, rows in kinds.items()
    }
    return {kind: sum(seconds) for kind, seconds in spent.items()}


def reason(row: Row) -> dict[str, Any]:
    return {"arm": row.arm, "seed": row.seed, "status": row.status, "error": row.error, "run_dir": row.run_dir}


def without_nan(value: Any) -> Any:
    """JSON has no word for what is no number."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
