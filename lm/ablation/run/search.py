"""The search of an arm's own best settings: a pure function from the trials made to the trials to make next.

It begins with the settings that the arm's config brings and a whole factor to both sides along each setting. Then it
fits a surface to the trials and tries what the surface knows least about: its lowest point if that lies at the edge of
what was tried, else both sides of it along the setting whose best value is least certain. Trials lie on a grid of half
factors, as integer offsets, so they are exact keys; what is chosen at the end is the lowest point of the surface.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np

from lm.ablation.judge.surface import Surface, Trials, fit

Point = tuple[int, ...]
Done = dict[Point, float]  # point -> loss; infinity where training diverged


def propose(
    done: Done, n_hyperparameters: int, budget: int, allowed: Callable[[Point], bool] = lambda _: True
) -> list[Point]:
    """The next points to try, none if the budget is spent. They are independent: run them side by side."""
    if not done:
        return [(0,) * n_hyperparameters][:budget]
    room = budget - len(done)
    for group in candidates(done):
        if missing := [point for point in group if point not in done and allowed(point)]:
            return missing[:room]
    return []


def candidates(done: Done) -> Iterator[list[Point]]:
    """Groups of points, the most informative first."""
    start = (0,) * len(next(iter(done)))
    yield [shift(start, i, by) for i in range(len(start)) for by in (-2, 2)]
    centre, order = best_trial(done), list(range(len(start)))
    if found := surface(done):
        lowest = found.optimum(reach=1.0)
        centre = tuple(int(offset) for offset in np.rint(2 * lowest))
        order = [int(i) for i in np.argsort(-found.regrets(lowest, reach=1.0).mean(0))]
    if not all(min(values) < at < max(values) for at, values in zip(centre, zip(*done, strict=True), strict=True)):
        yield [centre]
    for middle, by, i in product((centre, best_trial(done)), (2, 3, 1, 4), order):
        yield [shift(middle, i, by), shift(middle, i, -by)]


def shift(point: Point, setting: int, by: int) -> Point:
    return (*point[:setting], point[setting] + by, *point[setting + 1 :])


def trials(done: Done) -> Trials:
    return Trials(np.array(list(done), dtype=float) / 2, np.array(list(done.values())))


def surface(done: Done) -> Surface | None:
    """None while fewer trials have ended than a surface has unknowns."""
    found = trials(done)
    return fit(found) if found.enough() else None


def best(done: Done) -> Sequence[float]:
    """The offsets of the lowest point of the surface, within what was tried; without a surface, of the best trial."""
    found = surface(done)
    return [float(2 * x) for x in found.optimum()] if found else best_trial(done)


def best_trial(done: Done) -> Point:
    """Of equals, the one nearest to where the search began."""
    return min(done, key=lambda point: (done[point], sum(map(abs, point)), point))


def inside(done: Done) -> list[bool | None]:
    """For each setting, whether values on both sides of the best one were tried; None where only one value was."""
    columns = [(at, set(values)) for at, values in zip(best(done), zip(*done, strict=True), strict=True)]
    return [min(values) < at < max(values) if len(values) > 1 else None for at, values in columns]


def values(point: Sequence[float], start: list[float], factor: float) -> list[float]:
    """The settings at a point, rounded to four digits."""
    return [float(f"{value * factor ** (offset / 2):.4g}") for value, offset in zip(start, point, strict=True)]
