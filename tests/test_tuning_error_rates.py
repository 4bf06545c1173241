"""Verdicts on tuned arms keep their promises, wherever the searches begin: scripts/benchmark/tuning_error_rates.py."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "benchmark" / "tuning_error_rates.py"))
Cell, simulate = SCRIPT["Cell"], SCRIPT["simulate"]
FAR = Cell(k=3, surface="quadratic", correlation=0.5, start="far", optimum="fixed", tuning_seeds=2)


@pytest.mark.nightly
def test_a_far_start_misleads_with_one_search() -> None:
    """Bounds beyond what chance does to a rate of 0.05 in 60 repetitions; with one search 0.4 and 0.6 are found."""
    once, again = simulate(FAR, 60, searches=1), simulate(FAR, 60)
    assert again["false_0.005_8"] <= 0.15 < 0.25 <= once["false_0.005_8"]
    assert again["covered_8"] >= 0.85 > 0.75 >= once["covered_8"]
    assert again["power_better"] >= 0.6 > 0.5 >= once["power_better"]
    assert once["settings"] == 14 < 26 <= again["settings"] <= 42


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["near", "far"])
@pytest.mark.parametrize(("surface", "power"), [("tilted_cliff", 0.0), ("soft_cliff", 0.25)])
def test_where_training_diverges_or_blows_up_beside_the_best_value(surface: str, power: float, start: str) -> None:
    """In 100 repetitions; without a rule for it 0.17 to 0.3 of the verdicts are false, or the power is zero."""
    rates = simulate(Cell(1, surface, 0.0, start, "fixed", 2), 100)
    assert max(rate for name, rate in rates.items() if name.startswith("false")) <= 0.1
    assert min(rates["covered_5"], rates["covered_8"]) >= 0.9
    assert min(rates["power_worse"], rates["power_better"]) >= power
