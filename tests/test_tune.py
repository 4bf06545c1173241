"""The search of an arm's settings finds what is there to find, with the same number of trials for every arm."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm.ablation.run.search import Done, Point, best, best_trial, inside, propose, values


def search(loss: Callable[[Point], float], n_hyperparameters: int, budget: int, done: Done | None = None) -> Done:
    done = dict(done or {})
    while batch := propose(done, n_hyperparameters, budget):
        assert not set(batch) & set(done)
        done |= {point: loss(point) for point in batch}
    return done


def bowl(*centre: float) -> Callable[[Point], float]:
    return lambda point: sum((x - c) ** 2 for x, c in zip(point, centre, strict=True))


@pytest.mark.parametrize(("n_hyperparameters", "budget"), [(1, 8), (2, 10), (3, 14), (3, 20)])
def test_the_whole_budget_is_spent(n_hyperparameters: int, budget: int) -> None:
    assert len(search(bowl(*[0.3] * n_hyperparameters), n_hyperparameters, budget)) == budget
    assert len(search(bowl(*[9.0] * n_hyperparameters), n_hyperparameters, budget)) == budget


def test_an_optimum_between_the_trials_is_found_and_lies_inside() -> None:
    done = search(bowl(1.3, -0.8), 2, 8)
    assert best(done) == pytest.approx([1.3, -0.8], abs=0.1)
    assert list(best(done)) not in map(list, done)
    assert inside(done) == [True, True]


def test_three_settings_are_looked_at_on_both_sides() -> None:
    done = search(bowl(0.2, -0.3, 0.4), 3, 8)
    assert inside(done) == [True, True, True]
    assert best(done) == pytest.approx([0.2, -0.3, 0.4], abs=0.1)


def test_a_far_optimum_is_approached_and_reported_as_not_inside() -> None:
    done = search(bowl(20, 0), 2, 8)
    assert best(done)[0] >= 6
    assert inside(done)[0] is False
    wider = search(bowl(20, 0), 2, 12, done)
    assert len(wider) == 12
    assert best(wider)[0] > best(done)[0]  # a widening goes on where the search stood


def test_a_ridge_is_followed() -> None:
    """Neither setting alone leads far: what is best for one depends on the other."""

    def ridge(*point: float) -> float:
        along, across = point[0] + point[1], point[0] - point[1]
        return (along - 6) ** 2 + 3 * across**2

    done = search(lambda point: ridge(*point), 2, 12)
    assert ridge(*best(done)) < done[0, 0] / 10


def test_one_lucky_trial_does_not_decide() -> None:
    """The best of noisy trials is partly the luckiest; a surface through all of them is not moved as far."""
    done = {point: bowl(0)(point) for point in [(-4,), (-3,), (-2,), (-1,), (0,), (1,), (2,), (3,), (4,)]} | {
        (2,): -1.0
    }
    assert best_trial(done) == (2,)
    assert abs(best(done)[0]) < 1


def test_what_is_not_allowed_is_never_proposed() -> None:
    done: Done = {}
    while batch := propose(done, 2, 8, lambda point: point[0] <= 1):
        done |= {point: bowl(5, 0)(point) for point in batch}
    assert max(point[0] for point in done) == 1
    assert len(done) == 8
    assert best(done)[0] == 1
    assert inside(done)[0] is False


def test_a_setting_that_was_never_varied_is_no_edge() -> None:
    assert inside(search(bowl(0, 0), 2, 3)) == [True, None]


def test_where_all_diverges_but_one_side_the_search_goes_there() -> None:
    def loss(point: Point) -> float:
        return math.inf if point[0] >= 0 else abs(point[0] + 3)

    assert best(search(loss, 2, 8))[0] in (-4, -3, -2)


def test_equal_losses_stay_where_the_search_began() -> None:
    assert best(search(lambda point: 1.0, 2, 8)) == pytest.approx([0, 0], abs=0.5)


def test_the_search_is_a_function_of_what_was_tried() -> None:
    """A driver that was killed goes on as if it had not been: in whatever order the trials came back."""
    whole = search(bowl(3, -1), 2, 8)
    for cut in range(len(whole)):
        part = dict(list(whole.items())[:cut])
        assert set(search(bowl(3, -1), 2, 8, dict(reversed(part.items())))) == set(whole)


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=3), st.integers(1, 12))
def test_it_never_asks_too_much_or_twice(centre: list[int], budget: int) -> None:
    assert len(search(bowl(*centre), len(centre), budget)) <= budget


def test_values_are_geometric_and_begin_at_the_arms_own() -> None:
    assert values((0, 0), [3e-3, 6.0], 2.0) == [3e-3, 6.0]
    assert values((2, -2), [3e-3, 6.0], 2.0) == [6e-3, 3.0]
    assert values((1, 0), [3e-3, 6.0], 2.0) == [pytest.approx(3e-3 * 2**0.5, rel=1e-3), 6.0]
