"""The ladder: where the pilot puts its middle, which values count, and where the curve through them is lowest."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lm.lab.ablation.tuning import FAR, LADDER, MOST_MOVES, climb, factor, lowest_point, pilot

X = np.array(LADDER) / 2  # factors of two


def middle_of(loss: Callable[[int], float]) -> tuple[int, set[int]]:
    """Return the middle that the pilot finds, and the rungs that it has asked for."""
    known = dict[int, float]()
    while True:
        middle, unknown = pilot(known.get)
        if middle is not None:
            return middle, {*known}
        assert unknown
        assert not {*unknown} & {*known}
        known |= {rung: loss(rung) for rung in unknown}


def valley(best: float) -> Callable[[int], float]:
    return lambda rung: (rung / 2 - best) ** 2


def test_the_pilot_stops_where_both_neighbours_are_worse() -> None:
    assert middle_of(valley(0.0)) == (0, {-2, 0, 2})
    assert middle_of(valley(2.9)) == (6, {-2, 0, 2, 4, 6, 8})
    assert middle_of(valley(-1.2)) == (-2, {-4, -2, 0, 2})
    assert middle_of(lambda rung: 1.0) == (0, {-2, 0, 2}), "on a plateau it stays"


def test_the_pilot_quarters_a_value_that_diverges_three_times_at_most() -> None:
    assert middle_of(lambda rung: math.inf if rung > -4 else (rung / 2 + 3) ** 2)[0] == -6
    assert middle_of(lambda rung: math.inf)[0] == -12
    assert middle_of(lambda rung: math.inf if rung > 1 else -rung / 99)[0] == -0, "its neighbours diverge and are worse"


def test_the_pilot_moves_nine_times_at_most() -> None:
    middle, asked = middle_of(lambda rung: -rung)
    assert middle == 2 * MOST_MOVES
    assert len(asked) == 3 + MOST_MOVES - 1


def rows(losses: dict[float, list[float]], **status: str) -> pd.DataFrame:
    """Runs by factor and seed; `status` of a run by its name, such as f2_s0 for factor 2 at seed 0."""
    return pd.DataFrame(
        {
            "seed": seed,
            "factor": by,
            "status": status.get(f"f{by:g}_s{seed}", "done"),
            "loss": loss,
            "val_loss": loss,
        }
        for by, own in losses.items()
        for seed, loss in enumerate(own)
    )


def bowl(best: float, n: int = 4, height: float = 0.1) -> dict[float, list[float]]:
    return {factor(rung): [3 + seed + height * (rung / 2 - best) ** 2 for seed in range(n)] for rung in LADDER}


def test_a_seed_is_scored_on_the_curve_of_all_seeds_at_its_lowest_point() -> None:
    ladder = climb(rows(bowl(0.3)))
    assert ladder.best == pytest.approx(2**0.3, rel=1e-4)
    assert ladder.scores == pytest.approx({seed: 3 + seed for seed in range(4)}, abs=1e-6)
    assert (ladder.gain, ladder.end, ladder.dropped) == (0, "", [])


def test_the_weights_of_the_curve_are_those_of_a_fit_of_numpy() -> None:
    means = np.array([3.4, 3.1, 3.0, 3.05, 3.3])
    point = lowest_point(X, means)
    fit = np.polynomial.Polynomial.fit(X, means, 3)
    grid = np.linspace(-1, 1, 20_001)
    assert point.best == pytest.approx(grid[fit(grid).argmin()], abs=1e-4)
    assert point.weights.sum() == pytest.approx(1)
    assert point.weights @ means == pytest.approx(fit(point.best))
    one = np.array([0, 1.0, 0, 0, 0])
    assert point.weights[1] == pytest.approx(np.polynomial.Polynomial.fit(X, one, 3)(point.best))


def test_an_end_says_what_one_factor_more_may_gain() -> None:
    falling = climb(rows(bowl(2.0)))
    assert (falling.end, falling.best) == ("upper", pytest.approx(2, rel=1e-4))
    assert falling.gain == pytest.approx(0.2, abs=1e-3), "the slope of the bowl at its end"
    rising = climb(rows(bowl(-2.0)))
    assert (rising.end, rising.gain) == ("lower", pytest.approx(0.2, abs=1e-3))


def test_a_value_at_which_a_run_diverged_or_failed_or_that_lies_far_above_is_dropped() -> None:
    for lost in ({"f2_s1": "diverged"}, {"f2_s1": "failed"}):
        ladder = climb(rows(bowl(0.0), **lost))
        assert (ladder.dropped, ladder.best) == ([2.0], pytest.approx(1, abs=1e-3)), "a parabola through four"
        assert len(ladder.scores) == 4
    spiked = bowl(0.0) | {2.0: [9.0 + FAR] * 4}
    assert climb(rows(spiked)).dropped == [2.0]
    two = climb(rows({by: losses for by, losses in bowl(0.0).items() if by in (1.0, 2.0)}))
    assert (two.best, two.scores) == (None, {}), "two values are no curve"
    lost = {f"f{by:g}_s0": "diverged" for by in bowl(0.0)}
    nothing = climb(rows(bowl(0.0), **lost))
    assert (nothing.best, nothing.scores, len(nothing.dropped)) == (None, {}, 5)


def test_a_missing_run_keeps_its_seed_out_until_it_is_made() -> None:
    ladder = climb(rows(bowl(0.3), f1_s2="missing"))
    assert [*ladder.scores] == [0, 1, 3]
    assert ladder.dropped == []


def test_values_that_do_not_differ_are_found_by_the_f_test_of_scipy() -> None:
    noise = np.random.default_rng(1).normal(size=(5, 8))
    losses = {factor(rung): [*(3 + np.arange(8) + 0.01 * own)] for rung, own in zip(LADDER, noise, strict=True)}
    ladder = climb(rows(losses))
    table = np.array([*losses.values()])
    centred = table - table.mean(axis=0)
    between = 8 * (centred.mean(axis=1) ** 2).sum() / 4
    within = ((centred - centred.mean(axis=1, keepdims=True)) ** 2).sum() / 28
    assert ladder.p_equal == pytest.approx(stats.f.sf(between / within, 4, 28))
    assert ladder.p_equal > 0.05 > (climb(rows(bowl(0.0))).p_equal or 0.0)
    assert climb(rows(bowl(0.0, height=0.0))).p_equal == 1.0, "the setting has no effect at all"
