"""The files for programs: results.csv, a row for each run, curves.csv and report.json, the report in numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.shape import normality_p, sign_flip_p
from lm.ablation.judge.statistics import interval
from lm.ablation.judge.study import Row, Study, spread
from lm.ablation.outcomes import RESULT, WHO
from lm.report.metrics import FILE, Lines
from lm.system.files import csv_text

COLUMNS = (*WHO, *RESULT, "source_hash", "torch", "resumed_from", "run_dir")
POINT = ("step", "tokens", "val/loss", "val/bpb", "val/top1", "val/tokens")  # of metrics.csv
STATISTICS = {"n": "n_seeds", "mean": "mean_difference", "p_different": "p", "p_different_adjusted": "p_adjusted"}
RECORDED = (
    *("command", "machine", "threads", "workers", "python", "versions"),
    *("seeds", "metric", "equivalence_margin", "baseline"),
)


def results_csv(study: Study) -> str:
    return csv_text(COLUMNS, results(study))


def results(study: Study) -> list[dict[str, Any]]:
    """A row for each run; what a run does not have is empty. `purpose` says which rows belong together:

    reported: what the verdicts rest on; trial: of the tuning; unused: made for other settings, code or seeds than are
    asked for now, kept so that nothing is lost. A table by arm wants one of them; lm.results gives them apart.
    """
    tuned = tuned_values(study)
    kinds = ((study.rows, "reported"), (study.trials, "trial"), (study.unused(), "unused"))
    return [line(study, row, purpose) | tuned.get(row.run_dir, {}) for rows, purpose in kinds for row in rows]


def curves_csv(study: Study) -> str:
    """What each run but the trials scored during its training."""
    rows = (*study.rows, *study.unused())
    points = [{"run_dir": row.run_dir} | point for row in rows for point in scored(study, row)]
    return csv_text(["run_dir", *POINT], points)


def scored(study: Study, row: Row) -> Lines:
    lines = (line for line in study.lines(row, FILE) if line.get("val/loss"))
    return [{key: line[key] for key in POINT} for line in lines]


def line(study: Study, row: Row, purpose: str) -> dict[str, Any]:
    kept = study.outcomes.rows.get(row.run_dir)
    if kept and kept.row and kept.row["status"] == "done" and not row.result:  # the only copy of what does not count
        return {**kept.row, "purpose": "unused"}
    result, found = row.result, dict[str, Any](row.row or {})  # a row stays as it was written
    found |= {"arm": row.arm, "seed": row.seed, "budgets": " ".join(row.budgets), "purpose": purpose}
    found |= {"status": row.status, "error": row.error, "run_dir": row.run_dir}
    if row.kind:
        found["kind"] = row.kind
    if row.row:
        return found
    if purpose != "unused":
        found["source_hash"] = study.record.arms[row.arm].identity["source_hash"]
    if result:
        found |= {key: result.get(key) for key in RESULT} | study.outcomes.where(row.run_dir)
        found |= {"torch": result["versions"]["torch"], "resumed_from": " ".join(map(str, result["resumed_from"]))}
    return found


def tuned_values(study: Study) -> dict[str, dict[str, float]]:
    """The values that tuning has set, by run directory."""
    found = {row.run_dir: study.record.arms[row.arm].tuned for row in study.rows}
    for search in study.record.searches.values():
        found |= {run_dir: trial.values for trial in search.trials for run_dir in trial.run_dirs}
    return found


def report_json(study: Study, contrasts: Sequence[Contrast], verdict: list[str], seen: list[dict[str, Any]]) -> str:
    record = study.record
    found = {
        "question": record.question,
        "verdict": verdict,
        "contrasts": [contrast(study, one) for one in contrasts],
        "interactions": [
            {"name": one.interaction, "formula": record.interactions[str(one.interaction)]} | contrast(study, one)
            for one in study.interactions()
        ],
        "arms": [arm_mean(study, name, budget) for budget in record.budgets for name in record.arms],
        "cost": {name: cost(study, name) for name in record.arms},
        "cells": {
            **study.counts(),
            "rows": study.rows_alone(),
            "reasons": [reason(row) for row in study.rows if row.error],
        },
        "tuning": {name: asdict(search) for name, search in study.searches.items()},
        "verdicts_seen": seen,
        "hashes": {name: arm.identity for name, arm in record.arms.items()},
    }
    found |= {key: getattr(record, key) for key in RECORDED}
    finite = json.loads(json.dumps(found), parse_constant=lambda _: None)  # JSON has no word for what is no number
    return json.dumps(finite, indent=1) + "\n"


def contrast(study: Study, one: Contrast) -> dict[str, Any]:
    about = {"arm": one.arm, "baseline": one.baseline, "budget": one.budget, "primary": one.primary}
    about |= {"seeds": one.seeds, "lost_seeds": one.lost, "differences": one.differences}
    about |= {"ended": one.ended, "diverged": one.diverged, "broken": one.broken}
    about |= {"p_sign_flip": sign_flip_p(one.differences), "p_normal": normality_p(one.differences)}
    found = {STATISTICS.get(key, key): value for key, value in asdict(one.comparison).items()}
    return about | found | {"sentence": study.say(one)}


def arm_mean(study: Study, name: str, budget: str) -> dict[str, Any]:
    values = list(study.scores(name, budget).values())
    mean, sd = spread(values) if values else (None, None)
    low, high = interval(values) or (None, None)
    return {"arm": name, "budget": budget, "n": len(values), "mean": mean, "sd": sd, "ci_low": low, "ci_high": high}


def cost(study: Study, name: str) -> dict[str, float]:
    """Seconds of computing, in finished runs."""
    kinds = {"reported": study.rows, "trials": study.trials}
    mine = {kind: [row.result for row in rows if row.arm == name and row.result] for kind, rows in kinds.items()}
    return {kind: sum(one["seconds"] for one in results) for kind, results in mine.items()}


def reason(row: Row) -> dict[str, Any]:
    return {"arm": row.arm, "seed": row.seed, "status": row.status, "error": row.error, "run_dir": row.run_dir}
