"""Verdicts keep their promises: they are those of scipy's tests, corrected, and power is what is said.

What scipy has no test for is checked by simulation, and the same check must refuse the usual mistake: no correction for
many comparisons, looks without a level of their own.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from conftest import some
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, stats

from lm.ablation.power import ALPHA, POWER, TuningVariance, minimum_detectable_effect, power
from lm.ablation.statistics import (
    Comparison,
    decide,
    holm,
    interval,
    judge,
)

Array = NDArray[np.float64]
REPEATS = 1000
TINY = 1e-9  # a margin so small that nothing is equivalent: what is tested is the difference alone
DIFFERENT, EQUIVALENT = ("better", "worse"), ("equivalent",)

differences = st.lists(st.integers(-300, 300).map(lambda i: i / 64), min_size=2, max_size=6)  # sums of these are exact
varied = differences.filter(lambda values: len(set(values)) > 1)
families = st.dictionaries(st.sampled_from("abcdef"), differences, min_size=1)


def is_near(rate: float, nominal: float, repeats: int = REPEATS) -> bool:
    """Within four binomial standard errors, at which a right rate is refused once in 16,000 seeds."""
    return abs(rate - nominal) <= 4 * math.sqrt(nominal * (1 - nominal) / repeats)


def is_at_most(rate: float, nominal: float, repeats: int = REPEATS) -> bool:
    return rate <= nominal or is_near(rate, nominal, repeats)


def rate(outcomes: Iterable[bool] | NDArray[np.bool_]) -> float:
    return float(np.mean(list(outcomes)))


@given(varied, st.floats(0.01, 10))
@settings(deadline=None, max_examples=40)
def test_interval_difference_and_equivalence_are_those_of_scipys_t_tests(values: list[float], margin: float) -> None:
    comparison, baseline = decide({"alone": values}, margin)["alone"], np.linspace(3, 4, len(values))
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
    assert minimum_detectable_effect(0.02, n, alpha) == pytest.approx(0.02 * effect)
    for few in (0.05, 0.0005, 0.000005):  # also where noncentral t fails: 1 / alpha, with one degree of freedom
        assert minimum_detectable_effect(1, 2, few) == pytest.approx(0.5775 / few, rel=0.01)
    assert minimum_detectable_effect(0, 5) == 0


# --- by simulation: verdicts


def noise(n: int, comparisons: int = 1, correlated: bool = False, repeats: int = REPEATS) -> Array:
    """Differences of standard deviation 1 and mean 0; correlated, as where all arms have one baseline."""
    draw = np.random.default_rng([n, comparisons]).standard_normal((repeats, comparisons + 1, n))
    return (draw[:, 1:] - draw[:, :1]) / math.sqrt(2) if correlated else draw[:, 1:]


def verdicts(differences: Array, margin: float, corrected: bool = True) -> Array:
    """(families, comparisons). Uncorrected: each comparison is judged as if it were alone."""
    if not corrected:
        return np.concatenate([verdicts(differences[:, [i]], margin) for i in range(differences.shape[1])], axis=1)
    families = ({str(i): row.tolist() for i, row in enumerate(rows)} for rows in differences)
    return np.array([[each.verdict for each in decide(family, margin).values()] for family in families])


def rate_of(kinds: Sequence[str], differences: Array, margin: float, corrected: bool = True) -> float:
    """The rate of families with at least one such verdict."""
    return rate(np.isin(verdicts(differences, margin, corrected), kinds).any(axis=1))


@pytest.mark.parametrize(("truth", "correlated"), some([(0.0, False), (0.0, True), (4.0, False)], 3))
def test_a_family_of_six_has_a_false_verdict_at_most_5_times_in_100(truth: float, correlated: bool) -> None:
    """Where no arm differs, and where all differ by the margin."""
    draws, repeats = noise(5, 6, correlated, 300) + truth, 300
    false, margin = (EQUIVALENT, truth) if truth else (DIFFERENT, TINY)
    assert is_at_most(rate_of(false, draws, margin), ALPHA, repeats)
    assert not is_at_most(rate_of(false, draws, margin, corrected=False), ALPHA, repeats)  # without Holm


@pytest.mark.parametrize("n", some([3, 5, 8], 1))
def test_a_difference_that_is_detectable_is_found_80_times_in_100(n: int) -> None:
    effect, level = minimum_detectable_effect(1, n), minimum_detectable_effect(1, n, ALPHA / 4)
    assert is_near(rate_of(DIFFERENT, noise(n) + effect, TINY), POWER)
    assert power(effect, n) == pytest.approx(POWER)
    assert level > effect
    assert is_at_most(1 - rate((verdicts(noise(n, 4, repeats=200) + level, TINY) != "undecided").ravel()), 0.2, 200)


# --- by simulation: planned looks


def false_verdicts(looks: tuple[int, ...], alpha: float, comparisons: int = 1, mean: float = 0.0) -> float:
    """The rate of families with a false verdict at any look: of a difference, or of equivalence where it is `mean`."""
    draws = np.random.default_rng([*looks, comparisons]).standard_normal((400, comparisons, looks[-1])) + mean
    false = EQUIVALENT if mean else DIFFERENT

    def at(rows: Array, n: int) -> set[str]:
        family = {str(i): row[:n].tolist() for i, row in enumerate(rows)}
        return {comparison.verdict for comparison in decide(family, mean or TINY, alpha=alpha).values()}

    return rate(any({*false} & at(rows, n) for n in looks) for rows in draws)


CASES = [((3, 4, 5, 6, 8), 1, 0.0), ((5, 8, 12), 3, 0.0), ((3, 5, 8), 1, 3.0), ((5, 10), 3, 3.0)]


@pytest.mark.slow
@pytest.mark.parametrize(("looks", "comparisons", "mean"), CASES)
def test_false_verdicts_at_all_looks_keep_the_level(looks: tuple[int, ...], comparisons: int, mean: float) -> None:
    alpha = ALPHA / len(looks)
    assert is_at_most(false_verdicts(looks, alpha, comparisons, mean), ALPHA, 400)
    if len(looks) > 3:  # without it, looks find differences where there are none
        assert not is_at_most(false_verdicts(looks, ALPHA), ALPHA, 400)


SWAP = {"better": "worse", "worse": "better"}


@given(families)
@settings(deadline=None, max_examples=15)
def test_a_verdict_follows_from_the_adjusted_p_values_and_the_sign_swaps_it(family: dict[str, list[float]]) -> None:
    comparisons = judge(family, 0.5)
    negative = decide({name: [-value for value in values] for name, values in family.items()}, 0.5)
    upwards = decide(family, 0.5, lower_is_better=False)
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
        (judge({"first": values}, 0.01)["first"], ALPHA),
        (judge(family, 0.01)["first"], ALPHA / 3),
    ):
        assert (comparison.verdict, comparison.limited_by) == ("undecided", "seeds")
        assert comparison.minimum_detectable == minimum_detectable_effect(sd, 4, level)
    for share, limit in ((0.9, "seeds"), (1.1, "tuning")):  # of the variance of the seeds' mean
        tuned = judge({"first": values}, 0.01, tunings={"first": TuningVariance(share * sd**2 / 4, 9)})["first"]
        assert tuned.limited_by == limit


def test_one_seed_gives_no_interval_and_none_no_mean() -> None:
    pair = [-0.030, -0.031, -0.032]
    family = judge({"none": [], "single": [-0.2], "pair": pair}, 0.01, alpha=0.02)
    assert family["pair"] == judge({"pair": pair}, 0.01, alpha=0.02)["pair"]  # the others are no tests
    assert family["none"] == Comparison(n_seeds=0, mean_difference=None, wins=0, alpha=0.02)
    assert family["single"] == Comparison(n_seeds=1, mean_difference=-0.2, wins=1, alpha=0.02)
    assert interval([1.0]) is interval([]) is None
    assert judge({}, 0.01) == {}


def test_equal_differences_leave_no_doubt() -> None:
    nothing, much = (judge({"a": [value] * 3}, 0.01)["a"] for value in (0.0, -0.5))
    assert (nothing.verdict, nothing.ci_low, nothing.ci_high, nothing.p) == ("equivalent", 0, 0, 1)
    assert (much.verdict, much.ci_low, much.ci_high, much.p, much.minimum_detectable) == ("better", -0.5, -0.5, 0, 0)
    assert judge({"a": [1.0] * 2}, 1)["a"].verdict == "worse"  # a difference of the margin is not smaller than it
