"""The tuning of the arms: from the trials made so far to the trials to make next, and to the settings of each arm.

A search begins at a centre and tries it and a whole factor to both sides along each hyperparameter. Then it fits a
surface to its trials and tries what the surface knows least about: its lowest point if that lies at the edge of what
was tried, else both sides of it along the hyperparameter whose best value is least certain. The lowest point of the
surface is the optimum of the search. Trials lie on a grid of half factors around the centre. Where training diverges
at the centre, the search first walks down the learning rates until a trial is finite, and goes on from there. Where
they make no difference, the next search begins CLIMB factors above: it may be a plateau, far below the best.

The surface has no interactions, so where hyperparameters interact one search ends short of the best settings if it
began far from them. Therefore an arm searches again from its optimum until that lies at most SETTLED from the centre of
its search, and so inside of what was tried. The last search alone decides.

Everything here is a pure function of the trials, in whatever order and in how many calls they were made.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np

from lm.lab.ablation.response_surface import (
    GRID,
    Array,
    Regret,
    Surface,
    fit,
    is_determined,
    no_effect_p,
    pooled_noise,
    with_blow_ups_diverged,
)
from lm.lab.ablation.settings import TuneConfig
from lm.lab.ablation.statistics import ALPHA

Settings = dict[str, float]  # a value for each hyperparameter
Key = tuple[float, ...]  # settings in the order of the hyperparameters, rounded to four digits
Point = tuple[int, ...]  # offsets from the centre of a search, in half factors
WALK = 4  # half factors by which learning rates are lowered at a time until training does not diverge
CLIMB = 2.0  # factors by which learning rates are raised on a plateau
PLATEAU = 0.3  # p above which learning rates seem to make no difference; a lower level climbs too often by noise
SETTLED = 0.25  # factors that an optimum may lie from the centre of its search without another search


def round_value(value: float) -> float:
    """A value as trials have it: rounded to four digits."""
    return float(f"{value:.4g}")


def learning_rates(hyperparameters: Iterable[str]) -> tuple[int, ...]:
    """Which hyperparameters are learning rates; if none is, which multiply one."""
    names = [name.rpartition(".")[2] for name in hyperparameters]
    rates = tuple(j for j, name in enumerate(names) if name in ("lr", "adam_lr"))
    return rates or tuple(j for j, name in enumerate(names) if name.endswith("lr_multiplier"))


@dataclass(slots=True, frozen=True)
class ArmTrials:
    """What tuning knows of an arm."""

    start: Settings  # where the first search begins: the positive values of the arm's config
    losses: Mapping[Key, float] = field(default_factory=dict)  # of the finished trials; infinite where one diverged

    def key(self, settings: Mapping[str, float]) -> Key:
        return tuple(round_value(settings[name]) for name in self.start)

    def named(self, key: Key) -> Settings:
        return dict(zip(self.start, key, strict=True))


@dataclass(slots=True)
class Search:
    """The trials of one search of one arm, by offsets from its centre."""

    arm: ArmTrials
    centre: Key
    factor: float
    losses: dict[Point, float] = field(default_factory=dict)

    def key(self, factors: Iterable[float]) -> Key:
        """The settings so many factors from the centre."""
        return tuple(round_value(value * self.factor**x) for value, x in zip(self.centre, factors, strict=True))

    def key_of(self, point: Point) -> Key:
        return self.key([offset / 2 for offset in point])

    def arrays(self) -> tuple[Array, Array]:
        """Coordinates in factors from the centre, (n, k), and losses (n,)."""
        x, y = np.array(list(self.losses), dtype=float) / 2, np.array(list(self.losses.values()))
        return x, with_blow_ups_diverged(x, y)

    def surface(self) -> Surface | None:
        """None while fewer trials have finished than a surface has unknowns."""
        x, y = self.arrays()
        return fit(x, y) if is_determined(x, y) else None

    def next_centre(self) -> Key:
        """Where to search again: CLIMB higher on a plateau, else at the optimum, or no more if that is near."""
        (x, y), optimum, rates = self.arrays(), self.optimum(), learning_rates(self.arm.start)
        if is_determined(x, y) and no_effect_p(x, y, rates, *pooled_noise([(x, y)])) > PLATEAU:
            optimum[[*rates]] = CLIMB
        return self.centre if (np.abs(optimum) <= SETTLED).all() else self.key(optimum)

    def best_trial(self) -> Point:
        """Of equals, the one nearest to the centre."""
        return min(self.losses, key=lambda point: (self.losses[point], sum(map(abs, point)), point))

    def optimum(self) -> Array:
        """(k,) in factors from the centre: the lowest point of the surface; without a surface, of the trials."""
        surface = self.surface()
        return surface.optimum() if surface else np.array(self.best_trial(), dtype=float) / 2

    def propose(self, budget: int, is_allowed: Callable[[Settings], bool]) -> list[Point]:
        """The next points to try, which are independent of each other; none if the budget is spent.

        The centre is tried even if it is not allowed, so that the error shows.
        """
        remaining = budget - len(self.losses)
        if remaining <= 0:
            return []
        if not self.losses:
            return [(0,) * len(self.centre)]
        for group in self._candidates():
            new = [point for point in group if point not in self.losses]
            if allowed := [point for point in new if is_allowed(self.arm.named(self.key_of(point)))]:
                return allowed[:remaining]
        return []

    def _candidates(self) -> Iterator[list[Point]]:
        """Groups of points, the most informative first."""
        dimensions = range(len(self.centre))
        origin = next((point for point, loss in self.losses.items() if math.isfinite(loss)), None)
        if origin is None and (rates := learning_rates(self.arm.start)):
            yield [tuple(-WALK * len(self.losses) if j in rates else 0 for j in dimensions)]
        origin = origin or (0,) * len(self.centre)
        yield [_offset(origin, j, by) for j in dimensions for by in (-2, 2)]
        best, order = self.best_trial(), [*dimensions]
        middle = best
        if surface := self.surface():
            optimum = surface.optimum(extrapolation=1.0)
            middle = tuple(round(2 * x) for x in optimum)
            order = [int(j) for j in np.argsort(-surface.regrets(optimum, extrapolation=1.0).mean(1))]
        columns = zip(middle, zip(*self.losses, strict=True), strict=True)
        if not all(min(tried) < offset < max(tried) for offset, tried in columns):
            yield [middle]
        for point, by, j in product((middle, best), (2, 3, 1, 4), order):
            yield [_offset(point, j, way) for way in (by, -by) if not self._diverges_between(point, j, way)]

    def _diverges_between(self, point: Point, j: int, by: int) -> bool:
        """Whether, from a point that trains, training diverges on the way to what lies `by` from it."""
        diverged = {tried for tried, loss in zip(self.losses, self.arrays()[1], strict=True) if loss == math.inf}
        way = {_offset(point, j, step) for step in range(by, 0, -1 if by > 0 else 1)}
        return point not in diverged and bool(way & diverged)

    def advance(self, budget: int, is_allowed: Callable[[Settings], bool]) -> list[Key]:
        """Take in the trials that were made, batch by batch; returns those of the next batch that have no loss yet."""
        while batch := {point: self.key_of(point) for point in self.propose(budget, is_allowed)}:
            if missing := [key for key in batch.values() if key not in self.arm.losses]:
                return missing
            self.losses |= {point: self.arm.losses[key] for point, key in batch.items()}
        return []


def _offset(point: Point, j: int, by: int) -> Point:
    return (*point[:j], point[j] + by, *point[j + 1 :])


@dataclass(slots=True, frozen=True)
class TunedArm:
    """The settings of an arm, with the trials of the last search. Coordinates are in factors from its centre."""

    settings: Settings
    centre: Settings
    x: Array  # (n, k) coordinates of the trials
    y: Array  # (n,) their losses
    point: Array  # (k,) coordinates of the settings

    @classmethod
    def of(
        cls, settings: Settings, centre: Settings, trials: Sequence[tuple[Settings, float]], factor: float
    ) -> "TunedArm":
        """`trials` are those of the last search, which began at `centre`: settings and loss.

        Values are rounded, so coordinates are taken back to the grids that trials and optima lie on. Otherwise a trial
        at exactly LOCAL_RADIUS would be part of a fit, or not, by chance. Committed studies have no `centre`: their
        published intervals rest on the coordinates of rounded values, from the first trial.
        """
        origin = centre or trials[0][0]

        def coordinates(values: Settings, step: float) -> list[float]:
            raw = [math.log(values[key] / origin[key]) / math.log(factor) for key in origin]
            return [round(x / step) * step for x in raw] if centre else raw

        x = np.array([coordinates(values, 0.5) for values, _ in trials]).reshape(len(trials), len(origin))
        y = with_blow_ups_diverged(x, np.array([loss for _, loss in trials]))
        return cls(settings, origin, x, y, np.array(coordinates(settings, GRID)))

    def trains(self) -> bool:
        """Whether any trial has not diverged."""
        return bool(np.isfinite(self.y).any())

    def is_interior(self) -> dict[str, bool | None]:
        """For each hyperparameter, whether values on both sides were tried. None where only one was, or none trains."""
        if not self.trains():
            return dict.fromkeys(self.settings)
        ranges = zip(self.settings, self.point, self.x.min(0), self.x.max(0), strict=True)
        return {name: bool(low < at < high) if low < high else None for name, at, low, high in ranges}

    def at_edge(self) -> list[str]:
        return [name for name, inside in self.is_interior().items() if inside is False]

    def moved(self) -> list[str]:
        """Hyperparameters in which the last search ended away from where it began."""
        return [name for name, x in zip(self.settings, self.point, strict=True) if self.trains() and abs(x) > SETTLED]

    def gain_at_edge(self, surface: Surface | None) -> float:
        """By how much the loss still falls per factor at an edge of what was tried; 0 if the settings lie inside.

        By the surface; without one, from the nearest value to the chosen one.
        """
        gains = [0.0]
        for j, inside in enumerate(self.is_interior().values()):
            if inside is False:
                side = 1 if self.point[j] >= self.x[:, j].max() else -1
                if surface:
                    gains.append(-side * float(surface.slope(self.point)[j]))
                    continue
                factors = side * (self.point[j] - self.x[:, j])
                nearest = min((d, loss) for d, loss in zip(factors, self.y, strict=True) if d > 0)
                gains.append(float((nearest[1] - self.y.min()) / nearest[0]))
        return max(gains)


@dataclass(slots=True, frozen=True)
class TuningState:
    """Where tuning stands. Until it has finished no arm has settings, which a later call could move."""

    next_trials: dict[str, list[Settings]]  # to be run in any order, before `tune` is called again with their losses
    trials: dict[str, list[tuple[Settings, int]]]  # made so far, each with the number of its last search, from 0
    arms: dict[str, TunedArm]  # empty until tuning has finished


def tune(
    arms: Mapping[str, ArmTrials],
    config: TuneConfig,
    is_allowed: Callable[[str, Settings], bool] = lambda arm, settings: True,
) -> TuningState:
    """Where the tuning of these arms stands, after the trials that were made. One without hyperparameters is left out.

    `is_allowed` says whether an arm can be trained with settings; others are never proposed.
    """
    tunable = {name: arm for name, arm in arms.items() if arm.start and config.trials}
    states = {name: _search(arm, config, partial(is_allowed, name)) for name, arm in tunable.items()}
    missing = {name: [arms[name].named(key) for key in keys] for name, (_, keys) in states.items() if keys}
    tried, tuned = dict[str, list[tuple[Settings, int]]](), dict[str, TunedArm]()
    for name, (searches, _) in states.items():
        arm, last = arms[name], searches[-1]
        numbers = {search.key_of(point): i for i, search in enumerate(searches) for point in search.losses}
        tried[name] = [(arm.named(key), number) for key, number in numbers.items()]
        if not missing:
            optimum = last.optimum()
            tuned[name] = TunedArm(arm.named(last.key(optimum)), arm.named(last.centre), *last.arrays(), optimum)
    return TuningState(missing, tried, tuned)


def _search(
    arm: ArmTrials, config: TuneConfig, is_allowed: Callable[[Settings], bool]
) -> tuple[list[Search], list[Key]]:
    """The searches of an arm, and the trials that it cannot go on without.

    A search for which the arm has not enough trials left is not begun.
    """
    size = search_size(len(arm.start), config)
    searches = [Search(arm, arm.key(arm.start), config.factor)]
    while True:
        last = searches[-1]
        if missing := last.advance(size, is_allowed):
            return searches, missing
        centre, n_tried = last.next_centre(), len({own.key_of(point) for own in searches for point in own.losses})
        if centre in [search.centre for search in searches] or n_tried + size > config.trials:
            return searches, []
        searches.append(Search(arm, centre, config.factor))


def search_size(k: int, config: TuneConfig) -> int:
    """The settings that a search of k hyperparameters tries: two on each side, and two to know their noise."""
    return min(4 * k + 2, config.trials) if k else 0


def _surfaces(arms: Mapping[str, TunedArm]) -> tuple[dict[str, Surface], float | None, int]:
    """Fitted with the noise of all arms, that noise and its df; without an arm of which too few trials finished."""
    determined = {name: arm for name, arm in arms.items() if is_determined(arm.x, arm.y)}
    noise, df = pooled_noise((arm.x, arm.y) for arm in determined.values())
    return {name: fit(arm.x, arm.y, noise) for name, arm in determined.items()}, noise, df


def regrets(arms: Mapping[str, TunedArm]) -> dict[str, Regret]:
    """By arm, how far the loss at its settings is above that of its best; left out where too few trials finished.

    Empty if no arm has more trials than its surface has unknowns: then nothing says how noisy a trial is.
    """
    surfaces, _, df = _surfaces(arms)
    if not df:
        return {}
    draws = {name: surface.regrets(arms[name].point).sum(0) for name, surface in surfaces.items()}
    return {name: Regret(float(own.mean()), float(own.var()), df) for name, own in draws.items()}


def failed_searches(arms: Mapping[str, TunedArm], margin: float) -> dict[str, str]:
    """The arms whose best settings were not found, and why.

    divergence: no trial trains. edge: the loss still falls by more than the margin per factor where the trials end.
    flat: the learning rates that were tried make no difference, as on a plateau far from the best.
    """
    (surfaces, noise, df), failed = _surfaces(arms), dict[str, str]()
    for name, arm in arms.items():
        if not arm.trains():
            failed[name] = "divergence"
        elif arm.gain_at_edge(surfaces.get(name)) > margin:
            failed[name] = "edge"
        elif no_effect_p(arm.x, arm.y, learning_rates(arm.settings), noise, df) > ALPHA:
            failed[name] = "flat"
    return failed
