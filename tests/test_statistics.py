"""Verdicts keep their promises: they are those of scipy's tests, corrected, and power is what is said.

How often they are wrong, also at planned looks and for tuned arms, is simulated by scripts/benchmark/looks.py and
tuning_error_rates.py; docs/statistics.md has their tables.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from lm.lab.ablation.statistics import (
    ALPHA,
    POWER,
    Comparison,
    TuningVariance,
    holm,
    interval,
    judge_family,
    minimum_detectable_effect,
    power,
)

differences = st.lists(st.integers(-300, 300).map(lambda i: i / 64), min_size=2, max_size=6)  # sums of these are exact
varied = differences.filter(lambda values: len(set(values)) > 1)
families = st.dictionaries(st.sampled_from("abcdef"), varied, min_size=1)


@given(varied, st.floats(0.01, 10))
@settings(deadline=None, max_examples=40)
def test_interval_difference_and_equivalence_are_those_of_scipys_t_tests(values: list[float], margin: float) -> None:
    comparison, baseline = judge_family({"alone": values}, margin)["alone"], np.linspace(3, 4, len(values))
    paired, single = stats.ttest_rel(baseline + values, baseline), stats.ttest_1samp(values, 0)
    assert (comparison.ci_low, comparison.ci_high) == pytest.approx(tuple(single.confidence_interval()))
    assert comparison.p == pytest.approx(single.pvalue) == pytest.approx(paired.pvalue, rel=1e-6)
    assert comparison.sd == pytest.approx(np.std(values, ddof=1))
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert comparison.p_equivalent == pytest.approx(max(above, below))
    low, high = interval(values, 1 - 2 * ALPHA) or (0, 0)
    assert (low, high) == pytest.approx(tuple(single.confidence_interval(0.9)))
    assert (comparison.verdict == "equivalent") == (-margin < low and high < margin)


@pytest.mark.parametrize(("n", "alpha", "expected"), [(3, 0.05, 3.26), (5, 0.05, 1.68), (8, 0.0125, 1.53)])
def test_the_minimum_detectable_effect_agrees_with_an_integral(n: int, alpha: float, expected: float) -> None:
    effect = minimum_detectable_effect(1, n, alpha)
    limit, shift = stats.t.ppf(1 - alpha / 2, n - 1), effect * math.sqrt(n)
    deviation = stats.chi(n - 1, scale=1 / math.sqrt(n - 1))

    def density(sd: float) -> float:
        return float(deviation.pdf(sd) * (stats.norm.sf(limit * sd - shift) + stats.norm.cdf(-limit * sd - shift)))

    assert effect == pytest.approx(expected, abs=0.006)
    assert integrate.quad(density, 0, 6, limit=200)[0] == pytest.approx(POWER, abs=1e-4)
    assert power(effect, n, alpha) == pytest.approx(POWER)
    assert minimum_detectable_effect(0.02, n, alpha) == pytest.approx(0.02 * effect)
    for few in (0.05, 0.0005, 0.000005):  # also where noncentral t fails: 1 / alpha, with one degree of freedom
        assert minimum_detectable_effect(1, 2, few) == pytest.approx(0.5775 / few, rel=0.01)
    assert minimum_detectable_effect(0, 5) == 0


SWAP = {"better": "worse", "worse": "better"}


@given(families)
@settings(deadline=None, max_examples=15)
def test_a_verdict_follows_from_the_adjusted_p_values_and_the_sign_swaps_it(family: dict[str, list[float]]) -> None:
    comparisons = judge_family(family, 0.5)
    negative = judge_family({name: [-value for value in values] for name, values in family.items()}, 0.5)
    upwards = judge_family(family, 0.5, lower_is_better=False)
    assert list(comparisons) == list(family)
    for raw in ("p", "p_equivalent"):
        ps = [getattr(comparison, raw) for comparison in comparisons.values()]
        assert [getattr(comparison, f"{raw}_adjusted") for comparison in comparisons.values()] == holm(ps)
    for name, comparison in comparisons.items():
        p, p_equivalent = comparison.p_adjusted or 0, comparison.p_equivalent_adjusted or 0
        verdict = comparison.verdict
        assert (verdict == "equivalent") == (p_equivalent <= ALPHA)
        assert (verdict in SWAP) == (p <= ALPHA < p_equivalent)
        assert comparison.limited_by == ("seeds" if verdict == "undecided" else None)
        assert negative[name].verdict == upwards[name].verdict == SWAP.get(verdict, verdict)
        assert negative[name].wins == upwards[name].wins == sum(value > 0 for value in family[name])
        assert upwards[name].mean_difference == comparison.mean_difference


# --- edges


def test_power_counts_the_comparisons_that_were_tested_and_says_what_limits_it() -> None:
    values = [-0.01, -0.04, 0.005, -0.025]
    family: dict[str, list[float]] = {"first": values, "second": values, "third": values, "single": [0.1], "none": []}
    sd = float(np.std(values, ddof=1))
    for comparison, level in (
        (judge_family({"first": values}, 0.01)["first"], ALPHA),
        (judge_family(family, 0.01)["first"], ALPHA / 3),
    ):
        assert (comparison.verdict, comparison.limited_by) == ("undecided", "seeds")
        assert comparison.minimum_detectable == minimum_detectable_effect(sd, 4, level)
    for share, limit in ((0.9, "seeds"), (1.1, "tuning")):  # of the variance of the seeds' mean
        tuned = judge_family({"first": values}, 0.01, tunings={"first": TuningVariance(share * sd**2 / 4, 9)})["first"]
        assert tuned.limited_by == limit


def test_one_seed_gives_no_interval_and_none_no_mean() -> None:
    pair = [-0.030, -0.031, -0.032]
    family = judge_family({"none": [], "single": [-0.2], "pair": pair}, 0.01, alpha=0.02)
    assert family["pair"] == judge_family({"pair": pair}, 0.01, alpha=0.02)["pair"]  # the others are no tests
    assert family["none"] == Comparison(n_seeds=0, mean_difference=None, wins=0, alpha=0.02)
    assert family["single"] == Comparison(n_seeds=1, mean_difference=-0.2, wins=1, alpha=0.02)
    assert interval([1.0]) is interval([]) is None
    assert judge_family({}, 0.01) == {}


def test_equal_differences_are_a_test_by_their_signs_if_they_are_six() -> None:
    """Fewer coarse values, as of a few questions, are often equal."""
    nothing, much = (judge_family({"a": [value] * 6}, 0.01)["a"] for value in (0.0, -0.5))
    assert (nothing.verdict, nothing.ci_low, nothing.ci_high, nothing.p) == ("equivalent", 0, 0, 1)
    assert (much.verdict, much.ci_low, much.ci_high, much.p, much.p_equivalent) == ("better", -0.5, -0.5, 2**-5, 1)
    assert {own.verdict for own in judge_family({name: [0.5] * 6 for name in "abcde"}, 0.01).values()} == {"undecided"}
    assert judge_family({"a": [1.0] * 6}, 1)["a"].verdict == "worse", "that of the margin is not smaller than it"
    for pair in ([1.0] * 5, [1.0 - 0.9, 1.1 - 1.0], [0.0, 0.0]):
        two = judge_family({"a": pair}, 0.01)["a"]
        assert (two.verdict, two.p, two.p_equivalent, two.minimum_detectable) == ("undecided", None, None, None)
    generator = np.random.default_rng(0)
    scores = generator.binomial(20, 0.5, (4000, 2, 2)).astype(float)  # of twenty questions, two seeds, no effect
    verdicts = [judge_family({"a": [*(pair[:, 0] - pair[:, 1])]}, 1e-9)["a"].verdict for pair in scores]
    assert np.mean([verdict != "undecided" for verdict in verdicts]) < 0.05
