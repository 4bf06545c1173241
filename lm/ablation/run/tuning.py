"""The tuning of the arms with real runs, in proportion to what each has to tune, on seeds that are not reported."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.arms import Arm, Arms
from lm.ablation.plan.cells import Cell, cell
from lm.ablation.record import AblationRecord, SearchRecord, TrialRecord
from lm.ablation.run import search as pattern
from lm.config import UserError
from lm.config.ablation import METRICS, AblationConfig
from lm.config.identity import flat


class Search:
    """The tuning of one arm: its hyperparameters, the trials made so far, and their losses."""

    def __init__(self, ablation: AblationConfig, arm: Arm, outcomes: Outcomes) -> None:
        self.ablation, self.settings, self.arm, self.outcomes = ablation, ablation.tune, arm, outcomes
        self.sign = 1 if METRICS[ablation.metric][0] else -1
        known = flat(asdict(arm.run))
        self.start = {key: float(known[key]) for key in self.settings.hyperparameters if known[key]}  # not null, not 0
        self.done: pattern.Done = {}
        self.asked: list[pattern.Point] = []
        self.known: SearchRecord | None = None  # of an earlier call

    def values(self, point: Sequence[float]) -> dict[str, float]:
        found = pattern.values(point, list(self.start.values()), self.settings.factor)
        return dict(zip(self.start, found, strict=True))

    def cells(self, point: pattern.Point) -> list[Cell]:
        steps, values = self.arm.steps[self.ablation.budgets[0]], self.values(point)
        return [cell(self.arm, seed, steps, values, "trials") for seed in self.settings.seeds]

    def restore(self, known: SearchRecord) -> None:
        """Take the trials of an earlier call, so that nothing is tried again, whatever today's search would try."""
        self.known, half = known, math.log(self.settings.factor) / 2
        for trial in known.trials:
            point = tuple(round(math.log(trial.values[key] / start) / half) for key, start in self.start.items())
            self.done[point] = math.inf if trial.score is None else self.sign * trial.score

    def run_dirs(self, point: pattern.Point) -> list[str]:
        return [one.run_dir for one in self.cells(point)]

    def allowed(self, point: pattern.Point) -> bool:
        try:
            return bool(self.cells(point))
        except UserError:  # a fraction above one
            return False

    def next_cells(self, budget: int) -> list[Cell]:
        """The cells of the next trials, after taking in those that were asked for before; none after a broken one."""
        if self.broken():
            return []
        self.done |= {point: self.loss(point) for point in self.asked}
        self.asked = pattern.propose(self.done, len(self.start), budget, self.allowed)
        return [one for point in self.asked for one in self.cells(point)]

    def broken(self) -> list[str]:
        """Trials that were asked for and have no outcome, as when they were killed: they say nothing about a value."""
        asked, ended = [one for point in self.asked for one in self.cells(point)], ("done", "diverged")
        return [one.run_dir for one in asked if self.outcomes.of(one.run_dir, one.identity).status not in ended]

    def loss(self, point: pattern.Point) -> float:
        """The mean over the tuning seeds; infinity where training diverged with one of them."""
        found = [self.outcomes.of(one.run_dir, one.identity).result for one in self.cells(point)]
        total = sum(self.sign * float(one.get(self.ablation.metric, math.nan)) for one in found)
        return total / len(found) if all(found) else math.inf

    def record(self) -> SearchRecord:
        if self.known:
            return self.known
        score = {point: self.sign * loss if loss < math.inf else None for point, loss in self.done.items()}
        return SearchRecord(
            hyperparameters=[*self.start],
            seeds=self.settings.seeds,
            inside=dict(zip(self.start, pattern.inside(self.done), strict=True)),
            trials=[TrialRecord(self.values(point), score[point], self.run_dirs(point)) for point in self.done],
        )


class Tuning:
    """The searches of all arms. What an earlier call has decided (`before`) holds until it is decided anew."""

    def __init__(self, ablation: AblationConfig, arms: Arms, outcomes: Outcomes, before: AblationRecord) -> None:
        self.ablation, self.settings, self.arms, self.outcomes = ablation, ablation.tune, arms, outcomes
        searched = arms if self.settings.trials else {}
        self.searches = {name: Search(ablation, arm, outcomes) for name, arm in searched.items()}
        self.decided: int | None = None  # trials that the arm with the most hyperparameters makes
        # where the first trial runs tells whether settings, text and code are still those that were decided for
        known = before.searches if before.tune == ablation.tune else {}
        for name, search in self.searches.items():
            same = name in known and known[name].trials[0].run_dirs == search.run_dirs((0,) * len(search.start))
            if same and before.trials_made and (tuned := before.arms[name].tuned):
                self.decided, arms[name].tuned = before.trials_made, tuned
                search.restore(known[name])

    def open(self) -> list[Arm]:
        """Arms that have no settings of their own yet."""
        return [search.arm for search in self.searches.values() if not search.arm.tuned]

    def share(self, arm: str, trials: int) -> int:
        """The trials of an arm if the one with the most hyperparameters makes `trials`: in proportion, after two."""
        most = max(len(search.start) for search in self.searches.values())
        return min(trials, round(2 + (trials - 2) * len(self.searches[arm].start) / most))

    def extension(self) -> int:
        """The trials of all arms that have no settings yet, if one of them ends at an edge."""
        first, more = self.settings.trials, self.settings.extension_trials
        return sum(self.share(arm.name, first + more) - self.share(arm.name, first) for arm in self.open())

    def to_make(self) -> dict[str, int]:
        """By arm, how many trials there are at least to make."""
        left = {}
        for arm in self.open():
            search, number = Search(self.ablation, arm, self.outcomes), self.share(arm.name, self.settings.trials)
            while search.next_cells(number) and not search.broken():  # another one, to go as far as trials have ended
                pass
            left[arm.name] = number - len(search.done)
        return left

    def rounds(self) -> Iterator[list[Cell]]:
        """Batch after batch of trials, to be run before the next is asked for.

        Arms make their share of `trials`, and if one of them ended at an edge all make that of `extension_trials` more:
        also those that are added later, so that what is decided stays. An arm whose trial came to no end is left as it
        is.
        """
        open_ones = {arm.name: self.searches[arm.name] for arm in self.open()}
        for number in (self.settings.trials, self.settings.trials + self.settings.extension_trials):
            while batch := [
                one for name, search in open_ones.items() for one in search.next_cells(self.share(name, number))
            ]:
                yield batch
            settled = all(all(pattern.inside(search.done)) for search in self.searches.values() if search.done)
            if self.decided == number or (self.decided is None and settled):
                break
        if not self.broken():
            self.decided = number or None
        for name, search in open_ones.items():
            self.arms[name].tuned = {} if search.broken() else search.values(pattern.best(search.done))

    def broken(self) -> dict[str, list[str]]:
        """By arm, the run_dirs of trials that have come to no end."""
        return {name: lost for name, search in self.searches.items() if (lost := search.broken())}
