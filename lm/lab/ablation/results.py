"""An ablation as it stands: its record, its runs as a frame, its contrasts and curves. All views are made of it."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from lm.errors import reading
from lm.lab.ablation.folder import (
    CONTRASTS,
    REPORTED,
    UNUSED,
    AblationRecord,
    ArmRecord,
    Run,
    RunReader,
    finite,
    read_record,
    settings_of_run,
)
from lm.lab.ablation.judge import Contrast, Scored, alpha_of, judge, score
from lm.lab.ablation.question import METRICS, Metric, Question
from lm.lab.ablation.sentence import percent, sentence
from lm.lab.ablation.tuning import Ladder
from lm.system.files import read_csv

POINT = ("step", "tokens", "val/loss", "val/bpb", "val/top1", "val/tokens")  # columns of curves.csv, from metrics.csv


@dataclass(eq=False)
class Results:
    """The record need not be written yet. The runs are read once, when they are first asked for. Writes nothing."""

    record: AblationRecord
    reader: RunReader
    frozen: list[Contrast] | None = None  # contrasts as published, in place of those that the runs give

    @property
    def folder(self) -> Path:
        return self.reader.folder

    @property
    def question(self) -> Question:
        return self.record.question

    @property
    def metric(self) -> Metric:
        return METRICS[self.question.metric]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row for each run, with the columns of COLUMNS."""
        return self.reader.frame(self.record)

    @cached_property
    def reported(self) -> pd.DataFrame:
        """The runs that verdicts rest on."""
        return self.runs[self.runs["purpose"] == REPORTED]

    @cached_property
    def asked_for(self) -> pd.DataFrame:
        """The runs of the question, those of the pilot too."""
        return self.runs[self.runs["purpose"] != UNUSED]

    @cached_property
    def done(self) -> pd.DataFrame:
        """The finished reported runs."""
        return self.reported[self.reported["status"] == "done"]

    @property
    def n_seeds(self) -> int:
        """How many seeds there are: fewer than planned if a planned look has decided."""
        return self.reported["seed"].nunique() if self.stopped_early() else len(self.question.seeds)

    @cached_property
    def contrasts(self) -> list[Contrast]:
        """Each comparison: see `judge`."""
        if self.frozen is not None:
            return self.frozen
        contrasts = judge(self.question, self.reported, self.record.arms)
        return [
            replace(contrast, sentence=sentence(contrast, self.question, self.record.arms)) for contrast in contrasts
        ]

    @cached_property
    def scored(self) -> dict[str, Scored]:
        """The scores of each arm by seed."""
        rows = {arm: self.reported[self.reported["arm"] == arm] for arm in self.record.arms}
        return {arm: score(self.question, own, self.record.arms[arm].is_tuned) for arm, own in rows.items()}

    @property
    def ladders(self) -> dict[str, Ladder]:
        """The ladders of the tuned arms that have one."""
        return {arm: own.ladder for arm, own in self.scored.items() if own.ladder and len(own.ladder.losses)}

    def ladder_differences(self, arm: str) -> pd.DataFrame:
        """Return the metric of a tuned arm minus the score of the baseline, by seeds and factors."""
        reference = pd.Series(self.scored[self.question.baseline].scores, dtype=float)
        return self.metric.sign * self.ladders[arm].losses.sub(reference, axis=0).dropna()

    def tuned(self) -> list[str]:
        return [name for name, arm in self.record.arms.items() if arm.is_tuned]

    def untuned(self) -> list[str]:
        """Return the tuned arms whose pilot has not finished: they have no reported run yet."""
        return [arm for arm in self.tuned() if arm not in {*self.reported["arm"]}]

    @property
    def comparisons(self) -> list[Contrast]:
        """The contrasts that pages show."""
        return [contrast for contrast in self.contrasts if contrast.budget == self.contrasts[0].budget]

    def answers(self) -> list[Contrast]:
        """Return the comparisons that answer the question: the primary ones, and weighted sums."""
        return [contrast for contrast in self.comparisons if contrast.family != "secondary"]

    @property
    def ci(self) -> str:
        """The name of the intervals, with their confidence, which planned looks change."""
        return f"{percent(1 - alpha_of(self.question))} CI"

    def counts(self) -> dict[str, int]:
        """Return how many runs have each status."""
        status = self.asked_for["status"]
        return {kind: int((status == kind).sum()) for kind in ("done", "failed", "killed", "diverged", "missing")}

    def is_whole(self) -> bool:
        """Return whether all runs that are asked for have a result."""
        counts = self.counts()
        return not (counts["failed"] or counts["killed"] or counts["missing"] or self.untuned())

    def settings_of(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a run, a row of `runs`, with dotted keys."""
        arm = self.record.arms[run["arm"]]
        settings = arm.settings | settings_of_run(self.record, run["arm"], arm, run["seed"], run["factor"])
        return settings | {"trainer.max_steps": arm.steps or run["steps"]}

    def stopped_early(self) -> str:
        """Return what was not run because a planned look had decided; empty if nothing was."""
        n, planned = self.reported["seed"].nunique(), len(self.question.seeds)
        if not self.question.looks or not self.is_whole() or n == planned:
            return ""
        return f"decided with {n} of {planned} seeds, so {(planned - n) * len(self.reported) // n} runs were not made"

    def shown_runs(self) -> pd.DataFrame:
        """Return one finished run for each arm and seed: of a tuned arm the one nearest to its best value."""
        best = self.done["arm"].map({arm: ladder.best for arm, ladder in self.ladders.items()}).astype(float)
        distance = (self.done["factor"].fillna(1.0) / best.fillna(1.0)).map(math.log2).abs()
        nearest = self.done.loc[distance.sort_values(kind="stable").index]
        return nearest.drop_duplicates(["arm", "seed"]).sort_index()

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row for each validation of each run: arm, seed, run_dir, purpose, and the columns of POINT."""
        which = ["arm", "seed", "run_dir", "purpose"]
        rows = [
            run | line
            for run in self.runs[which].to_dict("records")
            for line in self.reader.lines(run["run_dir"])
            if line.get("val/loss")
        ]
        curves = pd.DataFrame(rows, columns=[*which, *POINT])
        kinds = dict.fromkeys(("step", "tokens", "val/tokens"), "Int64")
        return curves.assign(**finite(curves[[*POINT]])).astype(kinds)

    def curve_table(self, arm: str) -> pd.DataFrame:
        """Return a curve of the metric for each of the `shown_runs` of an arm: tokens by seeds."""
        key = f"val/{self.question.metric.removeprefix('val_')}"
        chosen = self.curves[(self.curves["arm"] == arm) & self.curves["run_dir"].isin(self.shown_runs()["run_dir"])]
        last = chosen.dropna(subset=key).drop_duplicates(["tokens", "seed"], keep="last")
        return last.pivot(index="tokens", columns="seed", values=key).astype(float)


def read_results(folder: Path) -> Results:
    """Return the results of a folder. Raises UserError if the folder holds no ablation."""
    reader = RunReader(folder)
    if (folder / CONTRASTS).exists():
        return _frozen(folder, reader)
    return Results(read_record(folder), reader)


# --- a study whose contrasts are frozen as published: contrasts.csv holds them, and nobody reads its record


def _frozen(folder: Path, reader: RunReader) -> Results:
    """Return a frozen study: its contrasts, and its reported runs under the first budget that it held equal.

    Raises UserError that names contrasts.csv.
    """
    with reading(folder / CONTRASTS):
        cells = read_csv(folder / CONTRASTS)
        contrasts = [_contrast(row) for row in cells]
        budget = contrasts[0].budget
        pairs = {contrast.arm: contrast.baseline for contrast in contrasts}
        rows = [row for row in reader.rows.values() if row["purpose"] == REPORTED and budget in row["budgets"].split()]
        arms = [*dict.fromkeys(row["arm"] for row in rows)]
        baseline = next(other for other in pairs.values() if other not in pairs)
        question = Question(
            name=folder.resolve().name,
            question=cells[0]["question"],
            arms={arm: [] for arm in arms},
            baseline=baseline,
            baselines={arm: other for arm, other in pairs.items() if other != baseline},
            primary=[arm for arm in pairs if any(row.primary for row in contrasts if row.arm == arm)],
            seeds=sorted({int(row["seed"]) for row in rows}),
            folds=False,
            metric=contrasts[0].metric,
            equivalence_margin=contrasts[0].equivalence_margin,
        )
        runs = [Run(arm=row["arm"], seed=int(row["seed"]), run_dir=row["run_dir"]) for row in rows]
        record = AblationRecord(question=question, arms={arm: ArmRecord() for arm in arms}, runs=runs)
        return Results(record, reader, contrasts)


def _contrast(cells: Mapping[str, str]) -> Contrast:
    values = {key: _value(cells[key]) for key in cells if key in Contrast.__slots__}
    return Contrast(name=f"{cells['arm']} - {cells['baseline']}", failed=json.loads(cells["broken"]), **values)


def _value(cell: str) -> Any:
    """Return a cell of contrasts.csv: text, or JSON where it is anything else."""
    with suppress(ValueError):
        return json.loads(cell)
    return cell or None
