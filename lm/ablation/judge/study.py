"""What an ablation's folder says: its runs, its contrasts, its failures. A pure reading: also while runs go on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lm.ablation.judge.contrasts import Contrast, decide, paired, say
from lm.ablation.judge.level import level
from lm.ablation.judge.regret import Regret, read, regrets, together
from lm.ablation.judge.sentence import percent
from lm.ablation.outcomes import Outcomes
from lm.ablation.record import AblationRecord, SearchRecord, read_record
from lm.ablation.run_files import broke
from lm.config.ablation import METRICS, interaction
from lm.report.metrics import Lines


@dataclass(slots=True)
class Row:
    """One run of the ablation."""

    arm: str
    seed: int  # of the pair; an arm with seeds of its own adds to it
    budgets: list[str]  # that it serves; none for a trial
    run_dir: str  # relative to the ablation's folder
    steps: int  # to be made
    status: str  # this and what follows: see Outcome
    error: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, str] | None = None


@dataclass
class Study:
    record: AblationRecord
    outcomes: Outcomes
    rows: list[Row]  # reported
    trials: list[Row]

    @property
    def metric(self) -> str:
        return self.record.metric

    @property
    def lower_is_better(self) -> bool:
        return METRICS[self.metric][0]

    @property
    def unit(self) -> str:
        return METRICS[self.metric][1]

    @property
    def alpha(self) -> float:
        """The level of each look, which is that of all where one is planned; 1 - alpha is that of the intervals."""
        record = self.record
        comparisons = len(record.budgets) * (len(record.contrasts) + len(record.interactions))
        return level(tuple(record.looks), comparisons)

    @property
    def ci(self) -> str:
        return f"{percent(1 - self.alpha)} CI"

    @property
    def searches(self) -> dict[str, SearchRecord]:
        """By arm, what was tried for its settings; empty where nothing was tuned."""
        return self.record.searches if self.record.tune.trials else {}

    def finished(self, arm: str, budget: str) -> dict[int, Row]:
        """The finished runs of an arm under a budget, by seed."""
        chosen = (row for row in self.rows if row.arm == arm and budget in row.budgets and row.result)
        return {row.seed: row for row in chosen}

    def scores(self, arm: str, budget: str, key: str | None = None) -> dict[int, float]:
        return {seed: float(row.result[key or self.metric]) for seed, row in self.finished(arm, budget).items()}

    def unused(self) -> list[Row]:
        """Runs in the folder that have come to an end and that the ablation, as it stands, does not ask for."""
        used, offsets = {row.run_dir for row in (*self.rows, *self.trials)}, self.record.seed_offsets
        return [
            Row(arm, seed - offsets.get(arm, 0), [], run_dir, 0, *self.outcomes.of(run_dir))
            for run_dir, (arm, seed) in self.outcomes.ended().items()
            if run_dir not in used
        ]

    def contrasts(self) -> list[Contrast]:
        """Every arm against its baseline under every budget. The primary ones and the others are corrected apart."""
        found = [
            self.contrast((arm, other), {arm: 1, other: -1}, budget)
            for budget in self.record.budgets
            for arm, other in self.record.contrasts.items()
        ]
        for primary in (True, False):
            self.decide([one for one in found if one.primary is primary])
        return found

    def interactions(self) -> list[Contrast]:
        """Every interaction under every budget, corrected as a family of their own."""
        found = [
            self.contrast(*interaction(formula), budget, name)
            for budget in self.record.budgets
            for name, formula in self.record.interactions.items()
        ]
        self.decide(found)
        return found

    @cached_property
    def regrets(self) -> dict[str, Regret]:
        return regrets(*read(self.record))

    def contrast(
        self, sides: tuple[str, str], weights: dict[str, int], budget: str, interaction: str | None = None
    ) -> Contrast:
        rows = {arm: [row for row in self.rows if row.arm == arm and budget in row.budgets] for arm in weights}
        found = paired(weights, {arm: self.scores(arm, budget) for arm in weights}, self.record.seeds)
        diverged = {arm: [row.seed for row in of if row.status == "diverged"] for arm, of in rows.items()}
        broken = {arm: [row.seed for row in of if broke(row.status, row.error)] for arm, of in rows.items()}
        return Contrast(
            *sides,
            budget,
            primary=interaction is None and sides[0] in self.record.primary,
            weights=weights,
            seeds=list(found),
            differences=list(found.values()),
            lost=[seed for seed in self.record.seeds if seed not in found],
            ended={arm: sum(row.status in ("done", "diverged") for row in of) for arm, of in rows.items()},
            diverged={arm: seeds for arm, seeds in diverged.items() if seeds},
            broken={arm: seeds for arm, seeds in broken.items() if seeds},
            runs=" ".join(row.run_dir for of in rows.values() for row in of) or f"{sides} {budget}",
            tuning=together(weights, self.regrets),
            interaction=interaction,
        )

    def decide(self, family: list[Contrast]) -> None:
        decide(family, self.record.equivalence_margin, self.lower_is_better, self.alpha)

    def say(self, one: Contrast) -> str:
        """A contrast's verdict in a sentence."""
        return say(one, self.unit, self.record.equivalence_margin)

    def lines(self, row: Row, name: str) -> Lines:
        """The whole rows of a CSV file of a run; none if it has no such file."""
        return self.outcomes.lines(row.run_dir, name)

    def rows_alone(self) -> int:
        """Finished runs of which results.csv is all that is left."""
        return sum(row.row is not None for row in self.rows if row.result)

    def counts(self) -> dict[str, int]:
        kinds = ("done", "failed", "diverged", "missing")
        return {kind: sum(row.status == kind for row in self.rows) for kind in kinds}


def read_study(path: Path) -> Study:
    """Raises UserError if the folder holds no ablation."""
    return study_of(read_record(path), Outcomes(path))


def study_of(record: AblationRecord, outcomes: Outcomes) -> Study:
    """The runs of a record, which need not be written yet."""
    rows = dict[str, Row]()
    for one in record.cells:
        if one.run_dir not in rows:
            identity = record.arms[one.arm].identity | {"config_hash": one.config_hash}
            found = outcomes.of(one.run_dir, identity)
            rows[one.run_dir] = Row(one.arm, one.seed, [], one.run_dir, one.steps, *found)
        rows[one.run_dir].budgets.append(one.budget)
    trials = [
        Row(arm, seed, [], run_dir, 0, *outcomes.of(run_dir))
        for arm, search in record.searches.items()
        for trial in search.trials
        for seed, run_dir in zip(search.seeds, trial.run_dirs, strict=True)
    ]
    return Study(record, outcomes, list(rows.values()), trials)


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter nan for one value."""
    return fmean(values), stdev(values) if len(values) > 1 else math.nan
