"""The search of an arm's own best settings: a pure function from the trials made to the trials to make next.

A pattern search on a logarithmic grid (Hooke and Jeeves, 1961). It starts from the settings that the arm's config
brings and looks to both sides of the best point along one setting after another, a whole factor away, then half.
Points are integer offsets, in half factors, so they are exact keys.
"""

from collections.abc import Callable, Iterator

Point = tuple[int, ...]
Trials = dict[Point, float]  # point -> loss; infinity where training diverged


def propose(
    done: Trials, n_hyperparameters: int, budget: int, allowed: Callable[[Point], bool] = lambda _: True
) -> list[Point]:
    """The next points to try, none if the budget is spent. They are independent: run them side by side."""
    if not done:
        return [(0,) * n_hyperparameters][:budget]
    room = budget - len(done)
    for group in surroundings(done, best(done)):
        if missing := [point for point in group if point not in done and allowed(point)]:
            return missing[:room]
    return []


def surroundings(done: Trials, centre: Point) -> Iterator[list[Point]]:
    """What is worth knowing about the surroundings of the best point, the most important first."""
    hyperparameters = range(len(centre))
    for setting in hyperparameters:  # a setting whose best value lies at the edge of the search range
        tried = [point[setting] for point in done]
        edges = ((-2, min(tried)), (2, max(tried)))
        yield [shift(centre, setting, by) for by, edge in edges if centre[setting] == edge]
    for reach in (2, 1):
        for setting in hyperparameters:
            yield [shift(centre, setting, -reach), shift(centre, setting, reach)]


def shift(point: Point, setting: int, by: int) -> Point:
    return (*point[:setting], point[setting] + by, *point[setting + 1 :])


def best(done: Trials) -> Point:
    """The point of the lowest loss; of equals, the one nearest to where the search began."""
    return min(done, key=lambda point: (done[point], sum(map(abs, point)), point))


def inside(done: Trials) -> list[bool | None]:
    """For each setting, whether values on both sides of the best one were tried; None where only one value was."""
    columns = [(at, set(values)) for at, values in zip(best(done), zip(*done, strict=True), strict=True)]
    return [min(values) < at < max(values) if len(values) > 1 else None for at, values in columns]


def values(point: Point, start: list[float], factor: float) -> list[float]:
    """The settings at a point, rounded to four digits."""
    return [float(f"{value * factor ** (offset / 2):.4g}") for value, offset in zip(start, point, strict=True)]
