"""Verdicts on tuned arms err as seldom as they should, in a small simulation; docs/statistics.md has the large one."""

import pytest
from conftest import some

from scripts.benchmark.error_rates import SHAPES, Cell, simulate


@pytest.mark.parametrize("shape", some(SHAPES, 3))
def test_arms_of_unequal_curvature_get_few_false_verdicts_and_large_differences_are_found(shape):
    """With 60 repetitions a true rate of 0.05 is above 0.15 once in 600 cases."""
    rates = simulate(Cell(shape, ratio=4, apart=1, start="near", correlation=0.5), 60)
    for n in (5, 8):
        assert rates[f"false_{n}"] <= 0.15
        assert rates[f"covered_{n}"] >= 0.85
        assert max(rates[f"equivalent_worse_{n}"], rates[f"equivalent_better_{n}"]) <= 0.15
    assert rates["power4_8"] >= (0.6 if shape == "spikes" else 0.9)


def test_an_end_of_the_ladder_is_counted():
    """On a tilted cliff the loss falls right up to where training diverges."""
    rates = simulate(Cell("tilted cliff", ratio=1, apart=0, start="near", correlation=0.5), 60)
    assert rates["false_5"] <= 0.1
