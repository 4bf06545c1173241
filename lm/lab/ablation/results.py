"""The one reader of an ablation's folder: its record, and its runs and trials as pandas frames.

A run that has a folder is what its result.json says. Under version control a study keeps its rows and not its models:
a run without a folder is read from results.csv, and its curve from curves.csv. Nothing is written here.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from lm.errors import reading
from lm.lab.ablation.contrasts import ENDED, FAMILIES, Contrast, compare_arms, level_of, percent
from lm.lab.ablation.frozen import is_frozen, read_frozen
from lm.lab.ablation.record import (
    FOLDERS,
    REPORTED,
    TRIAL,
    UNUSED,
    AblationRecord,
    Failure,
    Outcome,
    RunFiles,
    arm_and_seed,
    design_of,
    read_record,
)
from lm.lab.ablation.response_surface import Regret
from lm.lab.ablation.settings import METRICS
from lm.lab.ablation.tuning import TunedArm, failed_searches, regrets
from lm.system.files import json_sha256, read_csv, read_json
from lm.system.terminal import to_override_value
from lm.training.run_directory import METRICS as METRICS_FILE
from lm.training.run_directory import read_rows

RESULT: dict[str, type] = {  # of a run's result.json, as columns of results.csv
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1"), float),
    **dict.fromkeys(("n_params", "flops_per_token", "steps", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_second"), float),
    **dict.fromkeys(("config_hash", "data_hash", "tokenizer_hash"), str),
    "threads": int,
    **dict.fromkeys(("device", "cpu", "precision", "python", "torch", "resumed_from"), str),
}
COLUMNS: dict[str, type | None] = {  # of a run; None: as the values are
    "arm": str,
    "seed": int,
    "run_dir": str,
    "status": str,
    "error": str,
    **RESULT,
    **dict.fromkeys(("is_own_failure", "has_folder"), bool),
    **dict.fromkeys(("failure", "source_hash", "host", "executor"), str),
    **dict.fromkeys(("purpose", "budget"), str),
    **dict.fromkeys(("planned_steps", "trial", "search"), int),
    "score": float,  # of a trial
}
SCORES = {key: kind for key, kind in RESULT.items() if key not in ("torch", "resumed_from")}
POINT = ("step", "tokens", "val/loss", "val/bpb", "val/top1", "val/tokens")  # columns of curves.csv, from metrics.csv
DTYPES: dict[type, str] = {int: "Int64", float: "float64", bool: "boolean"}


class RunReader:
    """What became of the runs of an ablation. Raises UserError if results.csv is not what a report has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with reading(folder / "results.csv"):
            path = folder / "results.csv"
            self.rows = {row["run_dir"]: row for row in (read_csv(path) if path.exists() else ())}

    def outcome(self, run_dir: str) -> Outcome:
        """By the run's folder, else by its row: done, diverged, failed, or missing (not run yet, or running)."""
        outcome = RunFiles(self.folder / run_dir).read()
        if outcome.status != "missing" or (self.folder / run_dir).exists() or run_dir not in self.rows:
            return outcome
        row = self.rows[run_dir]
        with reading(self.folder / "results.csv"):
            done = row["status"] == "done"
            result = {key: kind(row[key]) for key, kind in RESULT.items()} if done else {}
            return Outcome(row["status"], row["error"], result, row, row.get("failure", ""))

    def describe(self, run_dir: str) -> dict[str, Any]:
        """The columns of a run's row in a frame."""
        outcome = self.outcome(run_dir)
        result = dict(outcome.result)
        if result and outcome.row is None:
            with reading(self.folder / run_dir / "result.json"):
                result["resumed_from"] = " ".join(map(str, result["resumed_from"]))
                result["torch"] = result["versions"]["torch"]
        place = outcome.row or RunFiles(self.folder / run_dir).place()
        return {
            **{key: result.get(key) for key in RESULT},
            "run_dir": run_dir,
            "status": outcome.status,
            "error": outcome.error,
            "failure": outcome.kind if outcome.status == "failed" else None,
            "is_own_failure": outcome.status == "failed" and outcome.kind != Failure.KILLED,
            "has_folder": outcome.row is None,
            **{key: place.get(key) or None for key in ("source_hash", "host", "executor")},
        }

    def finished(self) -> list[str]:
        """Every run of an arm, also of a trial, that has finished or diverged, by its folder or its row."""
        places = {path.parent for kind in ("cells", "trials") for path in self.folder.glob(f"{kind}/*/result.json")}
        places |= {path.with_suffix("") for kind in ("cells", "trials") for path in self.folder.glob(f"{kind}/*.json")}
        run_dirs = {"/".join(path.parts[-2:]) for path in places} | {*self.rows}
        return sorted(run_dir for run_dir in run_dirs if self.outcome(run_dir).status in ENDED)

    @cached_property
    def curves(self) -> dict[str, list[dict[str, str]]]:
        """The rows of curves.csv by run."""
        curves: dict[str, list[dict[str, str]]] = {}
        with reading(self.folder / "curves.csv"):
            path = self.folder / "curves.csv"
            for row in read_csv(path) if path.exists() else ():
                curves.setdefault(row["run_dir"], []).append(row)
        return curves

    def lines(self, run_dir: str) -> list[dict[str, str]]:
        """The whole rows of the metrics.csv of a run, those of curves.csv if it is absent."""
        path = self.folder / run_dir / METRICS_FILE
        return read_rows(path) if path.exists() else self.curves.get(run_dir, [])


@dataclass(eq=False)  # it can be a key of a cache
class Results:
    """An ablation as it stands: all views (report, tables, lm.lab.results) are made of this frame.

    `runs` has the columns of COLUMNS, those of a Run (`planned_steps` are its steps), and the hyperparameters that are
    tuned. The `budget` of a run that is not reported is empty. A trial has its number `trial` (from
    0) within its arm, and `score`, the mean of the metric over the tuning seeds, missing where one diverged or has not
    finished. Last come the finished runs that are not asked for any more: their `purpose` is unused.
    """

    folder: Path
    record: AblationRecord
    reader: RunReader
    runs: pd.DataFrame
    frozen: list[Contrast] | None = None  # contrasts as published, in the place of those that the runs give
    shown: list[Contrast] | None = None  # those of a frozen study that pages show: of the same runs once

    def of(self, purpose: str) -> pd.DataFrame:
        return self.runs[self.runs["purpose"] == purpose]

    def reported(self) -> pd.DataFrame:
        return self.of(REPORTED)

    @cached_property
    def trials(self) -> pd.DataFrame:
        return self.of(TRIAL)

    @cached_property
    def done(self) -> pd.DataFrame:
        """The finished reported runs."""
        runs = self.reported()
        return runs[runs["status"] == "done"]

    def done_of(self, arm: str) -> pd.DataFrame:
        """The finished reported runs of an arm, indexed by seed."""
        return self.done[self.done["arm"] == arm].set_index("seed")

    def rows_alone(self) -> pd.DataFrame:
        """Finished reported runs of which results.csv is all that is left."""
        return self.done[~self.done["has_folder"].astype(bool)].drop_duplicates("run_dir")

    @cached_property
    def tuned_arms(self) -> dict[str, TunedArm]:
        """The arms with chosen hyperparameters, with the trials of the search that they come from.

        Losses are lower where better, and infinite if training diverged. Trials without one are left out.
        """
        tuned, sign = {}, 1 if self.lower_is_better else -1
        for name, arm in ((name, arm) for name, arm in self.record.arms.items() if arm.tuned):
            trials = self.trials[self.trials["arm"] == name]
            last = trials[trials["search"] == trials["search"][trials["status"].isin(ENDED)].max()]
            last = last.assign(loss=(sign * last["score"]).mask(last["status"] == "diverged", math.inf))
            of_trials = last.groupby("trial")[[*arm.tuned, "loss"]].max().dropna()  # settings are those of all its runs
            rows = of_trials.itertuples(index=False, name=None)
            if losses := [(dict(zip(arm.tuned, values, strict=True)), loss) for *values, loss in rows]:
                tuned[name] = TunedArm.of(arm.tuned, arm.centre, losses, self.record.tune.factor)
        return tuned

    @cached_property
    def regrets(self) -> dict[str, Regret]:
        """By arm, how much worse than its best it may be at its hyperparameters; empty where none is tuned."""
        return regrets(self.tuned_arms)

    @cached_property
    def failed_searches(self) -> dict[str, str]:
        """The arms whose best settings were not found, and why."""
        return failed_searches(self.tuned_arms, self.record.equivalence_margin)

    @cached_property
    def contrasts(self) -> list[Contrast]:
        """Each comparison, interactions included: see `compare_arms`."""
        if self.frozen is not None:
            return self.frozen
        return compare_arms(self.record, self.runs, self.regrets, self.failed_searches)

    @cached_property
    def comparisons(self) -> list[Contrast]:
        """The contrasts that pages show."""
        return self.contrasts if self.shown is None else self.shown

    def asked(self) -> list[Contrast]:
        """The comparisons that answer the question, the primary ones (all, where none is), and interactions."""
        has_primary = any(contrast.primary for contrast in self.comparisons)
        families = ("primary", "interaction") if has_primary else FAMILIES
        return [contrast for contrast in self.comparisons if contrast.family in families]

    @property
    def lower_is_better(self) -> bool:
        return METRICS[self.record.metric][0]

    @property
    def unit(self) -> str:
        return METRICS[self.record.metric][1]

    @property
    def ci(self) -> str:
        """What the intervals are called: with their level, which planned looks change."""
        return f"{percent(1 - level_of(self.record))} CI"

    def counts(self) -> dict[str, int]:
        """How many reported runs have each status."""
        status = self.reported().drop_duplicates("run_dir").status
        return {kind: int((status == kind).sum()) for kind in ("done", "failed", "diverged", "missing")}

    def is_whole(self) -> bool:
        """Whether all runs that are asked for have a result."""
        counts = self.counts()
        return not (counts["failed"] or counts["missing"] or self.record.untuned())

    def stopped_early(self) -> str:
        """What was not run because a planned look had decided; empty if nothing was."""
        n, looks = len(self.record.seeds), self.record.looks
        if not looks or n >= looks[-1]:
            return ""
        reported = self.reported()
        n_saved = reported["run_dir"][reported["seed"] == self.record.seeds[-1]].nunique() * (looks[-1] - n)
        return f"decided with {n} of {looks[-1]} seeds: {n_saved} runs were not made"

    def hyperparameters(self, *arms: str) -> list[str]:
        """What is tuned for these arms, or for any, as far as trials are asked for."""
        names = arms or self.record.arms
        trials = (run for name in names for run in self.record.of(TRIAL) if run.arm == name)
        return [*dict.fromkeys(key for run in trials for key in run.values)]

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row for each validation of each run: arm, budget, seed, run_dir, purpose, and the columns of POINT."""
        which = ["arm", "budget", "seed", "run_dir", "purpose"]
        rows = [
            run | line
            for run in self.runs[which][self.runs["purpose"] != TRIAL].to_dict("records")
            for line in self.reader.lines(run["run_dir"])
            if line.get("val/loss")
        ]
        curves = pd.DataFrame(rows, columns=[*which, *POINT])
        numbers = curves[[*POINT]].apply(pd.to_numeric, errors="coerce").replace([math.inf, -math.inf], math.nan)
        return curves.assign(**numbers).astype(dict.fromkeys(("step", "tokens", "val/tokens"), "Int64"))

    @cached_property
    def curves_shown(self) -> pd.DataFrame:
        """The validations of the finished reported runs; `metric` is that of the ablation.

        Where a run keeps its best model (checkpoint.best), `metric` is that of the best model so far, and ends at the
        score of the run: its arm is compared by that model.
        """
        curves, metric = self.curves, self.record.metric
        shown = curves["run_dir"].isin(self.done["run_dir"]) & (curves["purpose"] == REPORTED)
        curves = curves[shown].assign(metric=lambda frame: frame[f"val/{metric.removeprefix('val_')}"])
        scores = self.done.drop_duplicates("run_dir").set_index("run_dir")[metric].astype(float)
        for run_dir, run in curves[curves["arm"].isin(self.record.best_arms())].groupby("run_dir"):
            is_best = run["val/loss"] <= run["val/loss"].cummin()
            curves.loc[run.index, "metric"] = run["metric"].where(is_best).ffill()
            curves.loc[run.index[-1], "metric"] = scores[run_dir]
        return curves


def read_results(folder: Path) -> Results:
    """Raises UserError if the folder holds no ablation."""
    reader = RunReader(folder)
    if is_frozen(folder):
        record, contrasts, shown = read_frozen(folder, [*reader.rows.values()])
        return replace(results_of(record, reader), frozen=contrasts, shown=shown)
    return results_of(read_record(folder), reader)


def results_of(record: AblationRecord, reader: RunReader) -> Results:
    """The results of a record, which need not be written yet."""
    rows, trials = list[dict[str, Any]](), dict[tuple[Any, ...], list[dict[str, Any]]]()
    for run in record.runs:
        about = asdict(run) | {"planned_steps": run.steps} | run.values | reader.describe(run.run_dir)
        if run.purpose == REPORTED:
            about["source_hash"] = about["source_hash"] or record.arms[run.arm].identity.get("source_hash")
        rows.append(about | {"budget": record.budget if run.purpose == REPORTED else ""})
        if run.purpose == TRIAL:
            trials.setdefault((run.arm, *run.values.items()), []).append(rows[-1])
    numbers = Counter[str]()
    for (arm, *_), own in trials.items():
        scores = [row[record.metric] for row in own]
        score = None if None in scores else sum(scores) / len(scores)
        for row in own:
            row |= {"trial": numbers[arm], "score": score}
        numbers[arm] += 1
    asked = {run.run_dir for run in record.runs}
    for run_dir in (name for name in reader.finished() if name not in asked):
        # also of an arm that is not asked for any more: its row may be all that is left
        arm, own_seed = arm_and_seed(run_dir)
        offset = record.seed_offsets.get(arm, 0) if run_dir.startswith(FOLDERS[REPORTED]) else 0
        about = {"arm": arm, "seed": own_seed - offset, "purpose": UNUSED, "budget": ""}
        rows.append(about | reader.describe(run_dir))
    tuned = dict.fromkeys((key for run in record.runs for key in run.values), float)
    return Results(reader.folder, record, reader, frame(rows, {**COLUMNS, **tuned}))


def designs_seen(before: AblationRecord, reader: RunReader) -> list[dict[str, Any]]:
    """Those of earlier calls with which there was a verdict to see: when it ended, or in a report on the way."""
    seen, design, is_shown = before.designs_seen, design_of(before), bool(before.ended)
    with suppress(OSError, ValueError):  # no report yet
        is_shown |= read_json(reader.folder / "report.json").get("design") == json_sha256(design)
    if not is_shown or design in seen or all(row.n_seeds < 2 for row in results_of(before, reader).contrasts):
        return seen
    return [*seen, design]


def frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, type | None]) -> pd.DataFrame:
    """Rows as a frame with these columns: integers Int64, other numbers float64, what is not known missing."""
    return pd.DataFrame({key: _column([row.get(key) for row in rows], kind) for key, kind in columns.items()})


def _column(values: list[Any], kind: type | None) -> Any:
    kinds = {type(value) for value in values if value is not None}
    kind = kind or (kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else str)
    if kind not in DTYPES:
        values = [value if isinstance(value, str | None) else to_override_value(value) for value in values]
    return pd.Series(values, dtype=DTYPES.get(kind, "string"))


# --- curves, of `curves_shown`


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
