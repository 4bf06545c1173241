"""What an ablation's folder says: its runs, its contrasts, its failures. A pure reading: also while runs go on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lm.ablation.judge.power import Tuning
from lm.ablation.judge.regret import tunings
from lm.ablation.judge.sentence import decimals, sentence
from lm.ablation.judge.statistics import Comparison, judge
from lm.ablation.outcomes import Outcomes
from lm.ablation.record import AblationRecord, SearchRecord, read_record
from lm.config.ablation import METRICS
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


@dataclass(slots=True)
class Contrast:
    arm: str
    baseline: str
    budget: str
    primary: bool
    seeds: list[int]  # that both arms have finished
    differences: list[float]  # arm minus baseline, in the order of the seeds
    lost: list[int]  # seeds that lack one of the two
    diverged: dict[str, list[int]]  # arm -> the seeds on which it did
    runs: str  # the same for contrasts of the same runs: under several budgets they are one comparison
    tuning: Tuning | None  # None: the interval counts the seeds only
    comparison: Comparison = field(init=False)


@dataclass(slots=True)
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
        found, compared, known = [], dict[str, Comparison](), tunings(self.record)
        for budget in self.record.budgets:
            for arm, other in self.record.contrasts.items():
                ours, theirs = self.finished(arm, budget), self.finished(other, budget)
                seeds = [seed for seed in self.record.seeds if seed in ours and seed in theirs]
                lost = [seed for seed in self.record.seeds if seed not in seeds]
                pairs = [(ours[seed], theirs[seed]) for seed in seeds]
                differences = [float(one.result[self.metric]) - float(two.result[self.metric]) for one, two in pairs]
                runs = "|".join(f"{one.run_dir} {two.run_dir}" for one, two in pairs) or f"{arm} {budget}"
                about = (arm, other, budget, arm in self.record.primary, seeds, differences, lost)
                found.append(Contrast(*about, self.diverged((arm, other), budget), runs, known.get((arm, other))))
        for primary in (True, False):
            asked = [one for one in found if one.primary is primary]
            family = {one.runs: one.differences for one in asked}
            noise = {one.runs: one.tuning for one in asked if one.tuning}
            compared |= judge(family, self.record.equivalence_margin, self.lower_is_better, noise)
        for one in found:
            one.comparison = without_praise_of_survivors(one, compared[one.runs])
        return found

    def diverged(self, arms: tuple[str, str], budget: str) -> dict[str, list[int]]:
        """By arm, the seeds on which it diverged, if any."""
        rows = [row for row in self.rows if row.status == "diverged" and budget in row.budgets]
        return {arm: seeds for arm in arms if (seeds := [row.seed for row in rows if row.arm == arm])}

    def say(self, one: Contrast) -> str:
        """A contrast's verdict in a sentence."""
        lost = " and ".join(f"{arm} diverged on seed {', '.join(map(str, of))}" for arm, of in one.diverged.items())
        if lost and one.comparison.verdict == "undecided" and one.comparison.mean is not None:
            size = f"{one.comparison.mean:+.{decimals(self.record.equivalence_margin)}f} {self.unit}"
            return f"{one.arm} compared with {one.baseline} is undecided: {lost}; on the other seeds it is {size}."
        said = sentence(one.arm, one.baseline, one.comparison, self.unit, self.record.equivalence_margin)
        return f"{said} And {lost}." if lost else said

    def lines(self, row: Row, name: str) -> Lines:
        """The whole rows of a CSV file of a run; none if it has no such file."""
        return self.outcomes.lines(row.run_dir, name)

    def rows_alone(self) -> int:
        """Finished runs of which results.csv is all that is left."""
        return sum(row.row is not None for row in self.rows if row.result)

    def counts(self) -> dict[str, int]:
        return {
            kind: sum(row.status == kind for row in self.rows) for kind in ("done", "failed", "diverged", "missing")
        }


def without_praise_of_survivors(one: Contrast, found: Comparison) -> Comparison:
    """Against survivorship bias: an arm that diverged on a seed can be called worse, not better or equivalent."""
    praised = {"better": {one.arm}, "worse": {one.baseline}, "equivalent": {one.arm, one.baseline}}
    if praised.get(found.verdict, set()) & one.diverged.keys():
        return replace(found, verdict="undecided", seeds_needed=None)
    return found


def read_study(path: Path) -> Study:
    """Raises BadInput if the folder holds no ablation."""
    record, outcomes, rows = read_record(path), Outcomes(path), dict[str, Row]()
    for one in record.cells:
        if one.run_dir not in rows:
            identity = record.arms[one.arm].identity | ({"config_hash": one.config_hash} if one.config_hash else {})
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
