"""What a report is made from: the folder of an ablation as its record and frames."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.looks import saved
from lm.ablation.judge.regret import read
from lm.ablation.judge.shape import sign_flip_p
from lm.ablation.judge.study import Row, Study, read_study
from lm.ablation.judge.surface import Array, fit, powers, quadratic
from lm.ablation.outcomes import RESULT
from lm.ablation.record import AblationRecord
from lm.ablation.run_files import RunFiles
from lm.config.ablation import METRICS

WHO = ("ablation", "arm", "budget", "seed", "run_dir")
WHERE = ("host", "executor")
EXTRA = ("torch", "source_hash", "resumed_from", *WHERE)
INTEGERS = ("seed", "trial", "search", "n_seeds", "n_planned", "wins", "seeds_needed_low", "seeds_needed_high")
POINT = ("step", "tokens", "val/loss", "val/bpb", "val/top1", "val/tokens")  # of metrics.csv
STATISTICS = {"n": "n_seeds", "mean": "mean_difference", "p_different": "p", "p_different_adjusted": "p_adjusted"}


@dataclass(slots=True)
class FittedCurve:
    """The loss of an arm along one hyperparameter, the others at the values that tuning has chosen."""

    values: Array  # of the hyperparameter
    mean: Array  # of the metric
    sd: Array


@dataclass(eq=False)
class Results:
    """An ablation's folder. A run that serves two budgets is two rows of `runs`.

    runs: the columns of lm.results.runs, and purpose (reported, or unused: no longer asked for), source_hash,
        resumed_from (steps, separated by spaces), host, executor, and the values of the tuned hyperparameters.
    trials: those of lm.results.trials and the same further ones, and search (0, 1, 2: the number of the restart).
    contrasts: those of lm.results.contrasts, with interactions, and family (primary, secondary, interaction), regret,
        baseline_regret, mean_without_regret, n_planned. The arm of an interaction is its name, the baseline its
        formula.
    """

    folder: Path
    record: AblationRecord
    runs: pd.DataFrame
    trials: pd.DataFrame
    contrasts: pd.DataFrame
    surfaces: dict[tuple[str, str], FittedCurve]  # by arm and hyperparameter, where there are enough trials
    ended_seeds: list[list[int]] = field(default_factory=list)  # the sets of seeds with which an earlier call ended
    saved: str = ""  # what a planned look has saved
    study: Study | None = None

    def curves(self) -> pd.DataFrame:
        """A row for each validation of a run: the columns of lm.results.curves, and purpose."""
        assert self.study
        points = [
            {key: row[key] for key in (*WHO, "purpose")} | {key: line.get(key) for key in POINT}
            for row in self.runs.to_dict("records")
            for line in self.study.outcomes.lines(row["run_dir"], "metrics.csv")
            if line.get("val/loss")
        ]
        frame = pd.DataFrame(points, columns=[*WHO, "purpose", *POINT])
        numbers = frame[[*POINT]].apply(pd.to_numeric, errors="coerce").replace([math.inf, -math.inf], math.nan)
        frame[[*POINT]] = numbers
        for key in ("step", "tokens", "val/tokens"):
            frame[key] = frame[key].astype("Int64")
        return frame

    def diagnostics(self, run_dir: str) -> pd.DataFrame:
        """The rows of diagnostics.csv; empty if the run has none."""
        assert self.study
        return pd.DataFrame(self.study.outcomes.lines(run_dir, "diagnostics.csv")).apply(pd.to_numeric, errors="coerce")

    def samples(self, run_dir: str) -> list[dict[str, str]]:
        """Prompts and greedy continuations; none where only the row of a run is left."""
        assert self.study
        return list(self.study.outcomes.of(run_dir).result.get("samples", []))

    def steps_made(self, run_dir: str) -> int:
        """How far an unfinished run is."""
        return RunFiles(self.folder / run_dir).steps()


def read_results(folder: Path) -> Results:
    """Raises BadInput if the folder holds no ablation."""
    study = read_study(folder)
    record = study.record
    runs = [*_run_rows(study, study.rows, "reported"), *_run_rows(study, study.unused(), "unused")]
    kept = {one.run_dir: study.outcomes.rows.get(one.run_dir) for one in study.rows if not one.result}
    for run in study.rows:  # the only copy of a result that no longer counts
        outcome = kept.get(run.run_dir)
        if outcome and outcome.row and outcome.row["status"] == "done":
            unused = Row(run.arm, run.seed, [], run.run_dir, 0, "done", "", outcome.result, outcome.row)
            runs += _run_rows(study, [unused], "unused")
    contrasts = [contrast_row(study, one) for one in (*study.contrasts(), *study.interactions())]
    return Results(
        folder=folder,
        record=record,
        runs=_frame(runs, (*WHO, "purpose", "status", "error", *RESULT, *EXTRA)),
        trials=_frame(_trial_rows(study), ("arm", "trial", "search", "seed", "run_dir", "score", "status", *RESULT)),
        contrasts=_frame(contrasts, ()),
        surfaces=_surfaces(record),
        ended_seeds=[one.seeds for one in record.verdicts_seen],
        saved=saved(study),
        study=study,
    )


def _run_rows(study: Study, rows: Iterable[Row], purpose: str) -> list[dict[str, Any]]:
    return [_run_row(study, row, budget, purpose) for row in rows for budget in row.budgets or [""]]


def _run_row(study: Study, row: Row, budget: str, purpose: str) -> dict[str, Any]:
    about = {"ablation": study.outcomes.folder.name, "arm": row.arm, "budget": budget, "seed": row.seed}
    about |= {"run_dir": row.run_dir, "purpose": purpose, "status": row.status, "error": row.error}
    return _result_columns(study, row, purpose) | about


def _result_columns(study: Study, row: Row, purpose: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if row.row:
        known = {*RESULT, "seed", "arm", "purpose", "budgets", "status", "error", "run_dir"}
        columns |= {key: value or None for key, value in row.row.items() if key not in known}
        for key in columns.keys() & {key for arm in study.searches.values() for key in arm.hyperparameters}:
            columns[key] = float(columns[key]) if columns[key] else None
    elif row.result:
        columns |= study.outcomes.where(row.run_dir)
        columns |= {"torch": row.result["versions"]["torch"]}
        columns |= {"resumed_from": " ".join(map(str, row.result["resumed_from"])) or None}
    if not row.row and purpose != "unused":
        columns["source_hash"] = study.record.arms[row.arm].identity["source_hash"]
    if purpose == "reported":
        columns |= study.record.arms[row.arm].tuned
    return columns | {key: row.result.get(key) for key in RESULT}


def _trial_rows(study: Study) -> list[dict[str, Any]]:
    rows, made = [], iter(study.trials)
    for arm, search in study.record.searches.items():
        for i, trial in enumerate(search.trials):
            for _ in search.seeds:
                row = next(made)
                about = {"ablation": study.outcomes.folder.name, "arm": arm, "trial": i, "search": 0}
                about |= {"seed": row.seed, "run_dir": row.run_dir, "score": trial.score}
                about |= {"status": row.status, "error": row.error}
                rows.append(_result_columns(study, row, "trial") | trial.values | about)
    return rows


def contrast_row(study: Study, one: Contrast) -> dict[str, Any]:
    """A comparison or an interaction as a row of lm.results.contrasts."""
    record, regrets = study.record, study.regrets
    arm, baseline = (
        (one.interaction, record.interactions[one.interaction]) if one.interaction else (one.arm, one.baseline)
    )
    row: dict[str, Any] = {"ablation": study.outcomes.folder.name, "arm": arm, "baseline": baseline}
    row |= {"budget": one.budget, "primary": one.primary, "metric": record.metric}
    row |= {"family": "interaction" if one.interaction else "primary" if one.primary else "secondary"}
    row |= {"equivalence_margin": record.equivalence_margin, "n_planned": len(record.seeds)}
    row |= {STATISTICS.get(key, key): value for key, value in asdict(one.comparison).items()}
    row |= {"p_sign_flip": sign_flip_p(one.differences), "sentence": study.say(one)}
    row |= dict.fromkeys(("regret", "baseline_regret", "mean_without_regret"))
    if not one.interaction and {one.arm, one.baseline} <= regrets.keys() and record.arms[one.arm].tuned:
        row |= {"regret": regrets[one.arm].mean, "baseline_regret": regrets[one.baseline].mean}
        if one.comparison.mean is not None:
            excess = row["regret"] - row["baseline_regret"]
            row["mean_without_regret"] = one.comparison.mean - (excess if study.lower_is_better else -excess)
    return row


def _surfaces(record: AblationRecord) -> dict[tuple[str, str], FittedCurve]:
    trials, at = read(record)
    fitted = {arm: one for arm, one in trials.items() if one.enough() and one.x.shape[1]}
    residuals = [quadratic(one.near())[1:] for one in fitted.values()]
    squares, df = (sum(column) for column in zip(*residuals, strict=True)) if residuals else (0.0, 0)
    noise, curves = math.sqrt(squares / df) if df else None, {}
    sign = 1 if METRICS[record.metric][0] else -1
    for arm, one in fitted.items():
        search, surface, near = record.searches[arm], fit(one, noise), one.near()
        start = search.trials[0].values
        for j, key in enumerate(search.hyperparameters):
            grid = np.linspace(surface.low[j] - 0.25, surface.high[j] + 0.25, 60)
            points = np.tile(at[arm], (len(grid), 1))
            points[:, j] = grid
            terms = powers(points, 3)
            mean, sd = terms @ surface.mean + near.y.min(), np.sqrt(((terms @ surface.root) ** 2).sum(1))
            curves[arm, key] = FittedCurve(start[key] * record.tune.factor**grid, sign * mean, sd)
    return curves


def _frame(rows: list[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=[*dict.fromkeys([*columns, *(key for row in rows for key in row)])])
    kinds: Mapping[str, Any] = {**RESULT, **dict.fromkeys(INTEGERS, int)}
    for key in frame:
        if kinds.get(key) is int:
            frame[key] = frame[key].astype("Int64")
    return frame
