"""What an ablation's folder says: its runs, its contrasts, its failures. A pure reading: also while runs go on."""

import csv
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lm.ablation.judge.sentence import decimals, sentence
from lm.ablation.judge.statistics import Comparison, judge
from lm.ablation.run.workers import Place
from lm.config import BadInput
from lm.config.ablation import METRICS


@dataclass(slots=True)
class Row:
    """One run of the ablation."""

    arm: str
    seed: int  # of the pair; an arm with seeds of its own adds to it
    budgets: list[str]  # that it serves; none for a trial
    run_dir: str  # relative to the ablation's folder
    steps: int  # to be made
    status: str  # done, failed, diverged, or missing: not run yet, or at it
    error: str
    result: dict[str, Any]  # result.json, or empty


@dataclass(slots=True)
class Contrast:
    arm: str
    baseline: str
    budget: str
    primary: bool
    seeds: list[int]  # that both arms have finished
    differences: list[float]  # arm minus baseline, in the order of the seeds
    lost: list[int]  # seeds that lack one of the two
    comparison: Comparison
    diverged: dict[str, list[int]]  # arm -> the seeds on which it did
    runs: str  # the same for contrasts of the same runs: under several budgets they are one comparison


@dataclass(slots=True)
class Study:
    path: Path
    record: dict[str, Any]  # ablation.json
    rows: list[Row]  # reported
    trials: list[Row]

    @property
    def metric(self) -> str:
        return str(self.record["metric"])

    @property
    def lower_is_better(self) -> bool:
        return METRICS[self.metric][0]

    @property
    def unit(self) -> str:
        return METRICS[self.metric][1]

    @property
    def searches(self) -> dict[str, Any]:
        """By arm, what was tried for its settings, as ablation.json has it; empty where nothing was tuned."""
        return dict(self.record.get("searches", {})) if self.record["tune"]["trials"] else {}

    def finished(self, arm: str, budget: str) -> dict[int, Row]:
        """The finished runs of an arm under a budget, by seed."""
        chosen = (row for row in self.rows if row.arm == arm and budget in row.budgets and row.result)
        return {row.seed: row for row in chosen}

    def scores(self, arm: str, budget: str, key: str | None = None) -> dict[int, float]:
        return {seed: float(row.result[key or self.metric]) for seed, row in self.finished(arm, budget).items()}

    def unused(self) -> list[Row]:
        """Finished runs in the folder that the ablation, as it stands, does not ask for."""
        used = {Path(row.run_dir).name for row in self.rows}
        names = sorted(path.parent.name for path in self.path.glob("cells/*/result.json"))
        found = [re.fullmatch(r"(.+)-seed(\d+)-\w+", name) for name in names if name not in used]
        whose = [(one[0], one[1], int(one[2]) - self.record["seed_offsets"].get(one[1], 0)) for one in found if one]
        return [read_row(self.path, arm, seed, [], f"cells/{name}", 0, {}) for name, arm, seed in whose]

    def contrasts(self) -> list[Contrast]:
        """Every arm against its baseline under every budget. The primary ones and the others are corrected apart."""
        drafts, samples = [], {}
        for budget in self.record["budgets"]:
            for arm, other in self.record["contrasts"].items():
                ours, theirs = self.finished(arm, budget), self.finished(other, budget)
                seeds = [seed for seed in self.record["seeds"] if seed in ours and seed in theirs]
                lost = [seed for seed in self.record["seeds"] if seed not in seeds]
                pairs = [(ours[seed], theirs[seed]) for seed in seeds]
                differences = [float(one.result[self.metric]) - float(two.result[self.metric]) for one, two in pairs]
                same = "|".join(f"{one.run_dir} {two.run_dir}" for one, two in pairs) or f"{arm} {budget}"
                samples[same] = differences
                drafts.append((same, (arm, other, budget, arm in self.record["primary"], seeds, differences, lost)))
        found: dict[str, Comparison] = {}
        for primary in (True, False):
            family = {same: samples[same] for same, draft in drafts if draft[3] is primary}
            found |= judge(family, self.record["equivalence_margin"], self.lower_is_better)
        return [
            self.sober(Contrast(*draft, found[same], self.diverged(draft[:2], draft[2]), same))
            for same, draft in drafts
        ]

    def diverged(self, arms: tuple[str, str], budget: str) -> dict[str, list[int]]:
        """By arm, the seeds on which it diverged, if any."""
        rows = [row for row in self.rows if row.status == "diverged" and budget in row.budgets and row.arm in arms]
        return {arm: seeds for arm in arms if (seeds := [row.seed for row in rows if row.arm == arm])}

    def sober(self, one: Contrast) -> Contrast:
        """Nothing good is said of an arm by the seeds that it survived: only that it is worse."""
        praised = {"better": {one.arm}, "worse": {one.baseline}, "equivalent": {one.arm, one.baseline}}
        if praised.get(one.comparison.verdict, set()) & one.diverged.keys():
            one.comparison = replace(one.comparison, verdict="undecided", seeds_needed=None)
        return one

    def say(self, one: Contrast) -> str:
        """A contrast's verdict in a sentence."""
        lost = " and ".join(f"{arm} diverged on seed {', '.join(map(str, of))}" for arm, of in one.diverged.items())
        if lost and one.comparison.verdict == "undecided" and one.comparison.mean is not None:
            size = f"{one.comparison.mean:+.{decimals(self.record['equivalence_margin'])}f} {self.unit}"
            return f"undecided, for {lost}; on the others {one.arm} minus {one.baseline} is {size}."
        said = sentence(one.arm, one.baseline, one.comparison, self.unit, self.record["equivalence_margin"])
        return f"{said} And {lost}." if lost else said

    def lines(self, row: Row, name: str) -> list[dict[str, str]]:
        """The whole rows of a CSV file of a run; none if it has no such file."""
        try:
            with open(self.path / row.run_dir / name, newline="") as file:
                return [line for line in csv.DictReader(file) if None not in line.values()]
        except OSError:
            return []

    def counts(self) -> dict[str, int]:
        return {
            kind: sum(row.status == kind for row in self.rows) for kind in ("done", "failed", "diverged", "missing")
        }


def read_study(path: Path) -> Study:
    """Raises BadInput if the folder holds no ablation."""
    try:
        record = json.loads((path / "ablation.json").read_text())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"output_dir={path}: holds no ablation.json ({why}); expected what ablate.py wrote") from error
    try:
        record["begun"]  # the overview's order; a record without it is another program's
        return Study(path, record, *read_rows(path, record))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path / 'ablation.json'}: not what ablate.py wrote ({error!r})") from error


def read_rows(path: Path, record: dict[str, Any]) -> tuple[list[Row], list[Row]]:
    """The reported runs and the trials that a record names."""
    rows: dict[str, Row] = {}
    for cell in record["cells"]:
        if cell["run_dir"] in rows:
            rows[cell["run_dir"]].budgets.append(cell["budget"])
        else:
            identity, place = record["arms"][cell["arm"]]["identity"], (cell["run_dir"], cell["steps"])
            rows[cell["run_dir"]] = read_row(path, cell["arm"], cell["seed"], [cell["budget"]], *place, identity)
    trials = [
        read_row(path, arm, seed, [], run_dir, 0, {})
        for arm, search in record.get("searches", {}).items()
        for trial in search["trials"]
        for seed, run_dir in zip(search["seeds"], trial["run_dirs"], strict=True)
    ]
    return list(rows.values()), trials


def read_row(
    path: Path, arm: str, seed: int, budgets: list[str], run_dir: str, steps: int, identity: dict[str, str]
) -> Row:
    """`identity`: what the result, if there is one, must have been made of; its other words are part of run_dir."""
    found = Place(path / run_dir).status()
    result = found.get("result", {})
    hashes = [key for key in identity if key.endswith("_hash")]
    if other := [key for key in hashes if key in result and result[key] != identity[key]]:
        found, result = {"status": "failed", "error": f"its {other[0]} is not the one planned: remove {run_dir}"}, {}
    return Row(arm, seed, budgets, run_dir, steps, found["status"], found.get("error", ""), result)


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter nan for one value."""
    return fmean(values), stdev(values) if len(values) > 1 else math.nan
