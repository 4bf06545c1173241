"""The ladder: where the pilot puts its middle, which values count, and where the curve through them is lowest."""

import math

import numpy as np
import pandas as pd
import pytest
from numpy.polynomial import Polynomial
from scipy import stats

from lm.lab.ablation.tuning import FAR, LADDER, MOST_MOVES, climb, factor, lowest_point, pilot

X = np.array(LADDER) / 2  # factors of two


def valley(best):
    return lambda rung: (rung / 2 - best) ** 2


MOVING = [*range(-2, 2 * MOST_MOVES + 1, 2)]
PILOTS = [  # the loss of a rung, the middle that the pilot finds, and the rungs that it asks for
    (valley(0.0), 0, [-2, 0, 2]),
    (valley(2.9), 6, [-2, 0, 2, 4, 6, 8]),
    (valley(-1.2), -2, [-4, -2, 0, 2]),
    (lambda rung: 1.0, 0, [-2, 0, 2]),  # on a plateau it stays
    (lambda rung: -rung, 2 * MOST_MOVES, MOVING),  # it moves so often at most
    (lambda rung: math.inf if rung > -4 else valley(-3)(rung), -6, [-8, -6, -4, -2, 0, 2]),  # quarters what diverges
    (lambda rung: math.inf, -12, [*range(-14, 3, 2)]),  # three times at most
    (lambda rung: math.inf if rung > 1 else -rung / 99, 0, [-2, 0, 2]),  # a neighbour that diverges is worse
]


@pytest.mark.parametrize(("loss", "expected", "rungs"), PILOTS)
def test_the_pilot_stops_where_both_neighbours_are_worse(loss, expected, rungs):
    known = {}
    middle, unknown = pilot(known.get)
    while middle is None:
        assert unknown
        assert not {*unknown} & {*known}, "nothing is asked for twice"
        known |= {rung: loss(rung) for rung in unknown}
        middle, unknown = pilot(known.get)
    assert (middle, sorted(known)) == (expected, rungs)


def bowl(best, height=0.1):
    """The losses of four seeds by factor, lowest at `best` factors of two."""
    return {factor(rung): [3 + seed + height * (rung / 2 - best) ** 2 for seed in range(4)] for rung in LADDER}


def climbed(losses, **status):
    """The ladder of these losses; `status` of a run by its name, such as f2_s0 for factor 2 at seed 0."""
    return climb(
        pd.DataFrame(
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
    )


def test_a_seed_is_scored_on_the_curve_of_all_seeds_at_its_lowest_point():
    ladder = climbed(bowl(0.3))
    assert ladder.best == pytest.approx(2**0.3, rel=1e-4)
    assert ladder.scores == pytest.approx({seed: 3 + seed for seed in range(4)}, abs=1e-6)
    assert (ladder.gain, ladder.end, ladder.dropped) == (0, "", [])
    lacking = climbed(bowl(0.3), f1_s2="missing")
    assert ([*lacking.scores], lacking.dropped) == ([0, 1, 3], []), "until the run is made"


def test_the_weights_of_the_curve_are_those_of_a_fit_of_numpy():
    means = np.array([3.4, 3.1, 3.0, 3.05, 3.3])
    point = lowest_point(X, means)
    grid = np.linspace(-1, 1, 20_001)
    assert point.best == pytest.approx(grid[Polynomial.fit(X, means, 3)(grid).argmin()], abs=1e-4)
    for weight, one in zip(point.weights, np.eye(5), strict=True):
        assert weight == pytest.approx(Polynomial.fit(X, one, 3)(point.best))


@pytest.mark.parametrize(("best", "end"), [(2.0, "upper"), (-2.0, "lower")])
def test_an_end_says_what_one_factor_more_may_gain(best, end):
    ladder = climbed(bowl(best))
    assert (ladder.end, ladder.best) == (end, pytest.approx(2 ** (best / 2), rel=1e-4))
    assert ladder.gain == pytest.approx(0.2, abs=1e-3), "the slope of the bowl at its end"


ALL_LOST = {f"f{by:g}_s0": "diverged" for by in bowl(0.0)}
FEW = {by: losses for by, losses in bowl(0.0).items() if by in (1.0, 2.0)}
DROPPED = [
    (bowl(0.0), {"f2_s1": "diverged"}, [2.0], 4),
    (bowl(0.0), {"f2_s1": "failed"}, [2.0], 4),
    (bowl(0.0) | {2.0: [9.0 + FAR] * 4}, {}, [2.0], 4),  # far above the others
    (bowl(0.0), ALL_LOST, [*bowl(0.0)], 0),
    (FEW, {}, [], 0),  # two values are no curve
]


@pytest.mark.parametrize(("losses", "status", "dropped", "n_scores"), DROPPED)
def test_a_value_that_lost_a_run_or_lies_far_above_is_dropped(losses, status, dropped, n_scores):
    ladder = climbed(losses, **status)
    assert (ladder.dropped, len(ladder.scores)) == (dropped, n_scores)
    assert ladder.best == (pytest.approx(1, abs=1e-3) if n_scores else None), "by a parabola through four"


def test_values_that_do_not_differ_are_found_by_the_f_test_of_scipy():
    noise = np.random.default_rng(1).normal(size=(5, 8))
    losses = {factor(rung): [*(3 + np.arange(8) + 0.01 * own)] for rung, own in zip(LADDER, noise, strict=True)}
    ladder = climbed(losses)
    table = np.array([*losses.values()])
    centred = table - table.mean(axis=0)
    between = 8 * (centred.mean(axis=1) ** 2).sum() / 4
    within = ((centred - centred.mean(axis=1, keepdims=True)) ** 2).sum() / 28
    assert ladder.p_equal == pytest.approx(stats.f.sf(between / within, 4, 28))
    assert ladder.p_equal > 0.05 > (climbed(bowl(0.0)).p_equal or 0.0)
    assert climbed(bowl(0.0, height=0.0)).p_equal == 1.0, "the setting has no effect at all"
