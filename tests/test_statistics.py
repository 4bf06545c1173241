"""Verdicts keep their promises: intervals cover, false alarms stay below 5 %, and power is what is said.

Each promise is checked by simulation, and the same check must refuse the usual mistake: a normal quantile for a t
quantile, no correction for many comparisons, pairs torn apart, absence of evidence taken for evidence of absence.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError
from functools import cache, partial

import numpy as np
import pytest
from conftest import some
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, stats

from lm.ablation.judge import advice, statistics
from lm.ablation.judge.advice import Advice, advise, seeds_to_decide
from lm.ablation.judge.power import ALPHA, POWER, chance, minimum_detectable_effect
from lm.ablation.judge.sentence import sentence
from lm.ablation.judge.statistics import Comparison, holm, interval, judge

Array = NDArray[np.float64]
Ends = Callable[[Array, Array], tuple[float, float]]
REPEATS = 2000
TINY = 1e-9  # a margin so small that nothing is equivalent: what is tested is the difference alone

differences = st.lists(st.integers(-300, 300).map(lambda i: i / 64), min_size=2, max_size=6)  # sums of these are exact
families = st.dictionaries(st.sampled_from("abcdef"), differences, min_size=1)


def near(rate: float, nominal: float, repeats: int = REPEATS) -> bool:
    """Within four binomial standard errors, at which a right rate is refused once in 16,000 seeds."""
    return abs(rate - nominal) <= 4 * math.sqrt(nominal * (1 - nominal) / repeats)


def at_most(rate: float, nominal: float, repeats: int = REPEATS) -> bool:
    return rate <= nominal or near(rate, nominal, repeats)


def asked_for(one: Comparison) -> Advice:
    return Advice(one.seeds_needed_low, one.seeds_needed_high)


def only(values: Sequence[float], margin: float, lower_is_better: bool = True) -> Comparison:
    return judge({"one": values}, margin, lower_is_better)["one"]


def rate(found: Iterable[bool] | NDArray[np.bool_]) -> float:
    return float(np.mean(list(found)))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict does not depend on how many seeds would give another; to know that takes most of the time."""
    monkeypatch.setattr(statistics, "advise", lambda *_: Advice(None, None))


# By comparison with others


@given(differences.filter(lambda values: len(set(values)) > 1))
@settings(deadline=None, max_examples=50)
def test_the_interval_and_the_difference_are_those_of_scipys_paired_t_test(values: list[float]) -> None:
    found, baseline = only(values, TINY), np.linspace(3, 4, len(values))
    paired, single = stats.ttest_rel(baseline + values, baseline), stats.ttest_1samp(values, 0)
    low, high = single.confidence_interval()
    assert (found.ci_low, found.ci_high) == pytest.approx((low, high))
    assert found.p_different == pytest.approx(single.pvalue) == pytest.approx(paired.pvalue, rel=1e-6)
    assert found.sd == pytest.approx(np.std(values, ddof=1))
    assert interval(values, 0.8) == pytest.approx(tuple(single.confidence_interval(0.8)))


@given(differences.filter(lambda values: len(set(values)) > 1), st.floats(0.01, 10))
@settings(deadline=None, max_examples=50)
def test_equivalence_is_two_one_sided_t_tests_and_the_90_percent_interval_inside_the_margin(
    values: list[float], margin: float
) -> None:
    found = only(values, margin)
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert found.p_equivalent == pytest.approx(max(above, below))
    low, high = interval(values, 1 - 2 * ALPHA) or (0, 0)
    assert (found.verdict == "equivalent") == (-margin < low and high < margin)


KNOWN = {
    (3, 0.05): 3.26,
    (4, 0.05): 2.13,
    (5, 0.05): 1.68,
    (6, 0.05): 1.435,
    (8, 0.05): 1.16,
    (10, 0.05): 1.00,
    (3, 0.0125): 6.55,
    (5, 0.0125): 2.48,
    (8, 0.0125): 1.53,
    (10, 0.0125): 1.28,
}


@pytest.mark.parametrize(("n", "alpha"), KNOWN)
def test_the_minimum_detectable_effect_agrees_with_the_table_and_with_an_integral(n: int, alpha: float) -> None:
    found = minimum_detectable_effect(1, n, alpha) or 0
    limit, shift = stats.t.ppf(1 - alpha / 2, n - 1), found * math.sqrt(n)
    spread = stats.chi(n - 1, scale=1 / math.sqrt(n - 1))

    def part(sd: float) -> float:
        return float(spread.pdf(sd) * (stats.norm.sf(limit * sd - shift) + stats.norm.cdf(-limit * sd - shift)))

    assert found == pytest.approx(KNOWN[n, alpha], abs=0.006)
    assert integrate.quad(part, 0, 6, limit=200)[0] == pytest.approx(POWER, abs=1e-4)
    assert minimum_detectable_effect(0.02, n, alpha) == pytest.approx(0.02 * found)


def test_the_minimum_detectable_effect_exists_for_any_alpha_and_not_for_one_seed() -> None:
    found = [minimum_detectable_effect(1, 2, alpha) or 0 for alpha in (0.05, 0.0005, 0.000005)]
    assert found[0] == pytest.approx(11.55, abs=0.01)
    assert found[1:] == pytest.approx([100 * found[0], 10_000 * found[0]], rel=0.01)  # 1 / alpha, with one degree
    assert minimum_detectable_effect(1, 1) is None
    assert minimum_detectable_effect(0, 5) == 0


def test_holm_by_hand() -> None:
    # 0.005 * 4; 0.01 * 3; 0.03 * 2; 0.04 * 1 would be below the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@given(
    st.lists(st.floats(0, 1), max_size=8).flatmap(lambda ps: st.tuples(st.just(ps), st.permutations(range(len(ps)))))
)
def test_holm_never_helps_and_does_not_look_at_the_order(case: tuple[list[float], list[int]]) -> None:
    ps, order = case
    found = holm(ps)
    assert all(p <= adjusted <= 1 for p, adjusted in zip(ps, found, strict=True))
    assert all(adjusted <= min(1, len(ps) * p) for p, adjusted in zip(ps, found, strict=True))  # Bonferroni's
    assert holm([ps[i] for i in order]) == [found[i] for i in order]
    by_p = [found[i] for i in sorted(range(len(ps)), key=ps.__getitem__)]
    assert by_p == sorted(by_p)


@pytest.mark.parametrize("comparisons", [1, 6])
def test_the_fewest_seeds_are_the_first_of_all_that_are_enough(comparisons: int) -> None:
    sizes = range(2, 101)
    for mean, margin in [
        (0, 0.1),
        (0, 1),
        (0.2, 0.5),
        (0.5, 0.5),
        (0.5, 0.01),
        (0.9, 1),
        (1.6, 0.1),
        (3, 2),
        (9, 20),
    ]:
        enough = (n for n in sizes if chance(mean, n, ALPHA / comparisons, margin) >= POWER)
        found = min(float(seeds_to_decide(mean, 1, margin, ALPHA / comparisons)), 101)
        assert abs(found - next(enough, 101)) <= 1  # fewer quantiles of the standard deviation are averaged over


# By simulation: intervals


def t_ends(arm: Array, baseline: Array) -> tuple[float, float]:
    return interval(list(arm - baseline)) or (0, 0)


def normal_ends(arm: Array, baseline: Array) -> tuple[float, float]:
    mean, error = np.mean(arm - baseline), np.std(arm - baseline, ddof=1) / math.sqrt(len(arm))
    return float(mean - 1.96 * error), float(mean + 1.96 * error)


def unpaired_ends(arm: Array, baseline: Array) -> tuple[float, float]:
    low, high = stats.ttest_ind(arm, baseline).confidence_interval()
    return float(low), float(high)


def runs(n: int, shared: float, repeats: int = REPEATS, truth: float = 0.3) -> list[tuple[Array, Array]]:
    """Losses of an arm and its baseline at n seeds; part of a seed's effect is shared, 1/sqrt(2) each arm's own."""
    draw = np.random.default_rng([n, repeats]).standard_normal((repeats, 3, n))
    own = math.sqrt(0.5)
    return [(truth + shared * both + own * a, shared * both + own * b) for both, a, b in draw]


def coverage(ends: Ends, pairs: list[tuple[Array, Array]], truth: float = 0.3) -> float:
    return rate(low <= truth <= high for low, high in (ends(*pair) for pair in pairs))


@pytest.mark.parametrize("shared", [0.0, 5.0])
@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_95_percent_interval_covers_the_truth_95_times_in_100(n: int, shared: float) -> None:
    assert near(coverage(t_ends, runs(n, shared)), 0.95)


@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_check_of_coverage_sees_a_normal_quantile(n: int) -> None:
    assert not near(coverage(normal_ends, runs(n, 0)), 0.95)


@pytest.mark.slow
def test_the_check_of_coverage_sees_torn_pairs() -> None:
    few = runs(5, 5, 500)
    assert not near(coverage(unpaired_ends, few), 0.95, 500)
    widths = [(np.diff(t_ends(*pair))[0], np.diff(unpaired_ends(*pair))[0]) for pair in few]
    paired, unpaired = np.mean(widths, axis=0)
    assert unpaired > 4 * paired  # what pairing gains, where seeds differ by five times what arms do


# By simulation: verdicts


def noise(n: int, contrasts: int = 1, correlated: bool = False, repeats: int = REPEATS) -> Array:
    """Differences of standard deviation 1 and mean 0; correlated, as where all arms have one baseline."""
    draw = np.random.default_rng([n, contrasts]).standard_normal((repeats, contrasts + 1, n))
    return (draw[:, 1:] - draw[:, :1]) / math.sqrt(2) if correlated else draw[:, 1:]


def verdicts(differences: Array, margin: float, corrected: bool = True) -> Array:
    """One row per family. Uncorrected: each contrast judged as if it were alone."""

    def family(rows: Array) -> list[str]:
        named = {str(i): row.tolist() for i, row in enumerate(rows)}
        if corrected:
            return [found.verdict for found in judge(named, margin).values()]
        return [only(values, margin).verdict for values in named.values()]

    return np.array([family(rows) for rows in differences])


def found_any(differences: Array, margin: float, *kinds: str, corrected: bool = True) -> float:
    """The rate of families with at least one such verdict."""
    return rate(np.isin(verdicts(differences, margin, corrected), kinds).any(axis=1))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("n", some([2, 3, 5, 8], 3))
def test_arms_that_do_not_differ_are_told_apart_5_times_in_100(n: int) -> None:
    found = verdicts(noise(n), TINY).ravel()
    assert near(rate(one != "undecided" for one in found), ALPHA)
    assert near(rate(one == "better" for one in found), ALPHA / 2)
    assert at_most(found_any(noise(n), 1.0, "better", "worse"), ALPHA)  # equivalence only takes from these


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("correlated", some([False, True], 2))
def test_among_six_arms_that_do_not_differ_any_is_told_apart_at_most_5_times_in_100(correlated: bool) -> None:
    families = noise(5, 6, correlated, 600)
    assert at_most(found_any(families, TINY, "better", "worse"), ALPHA, 600)
    assert not at_most(found_any(families, TINY, "better", "worse", corrected=False), ALPHA, 600)  # without Holm


def sure_of_nothing(values: list[float], margin: float) -> str:
    """The usual mistake: what is not significant is called equal."""
    found = only(values, margin)
    return "equivalent" if (found.p_different or 0) > ALPHA and abs(found.mean or 0) < margin else "undecided"


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("margin", some([1.0, 4.0], 3))
def test_a_difference_of_the_margin_is_called_equivalent_at_most_5_times_in_100(n: int, margin: float) -> None:
    differences = noise(n) + margin
    assert at_most(found_any(differences, margin, "equivalent"), ALPHA)
    if margin == 1:  # with wide intervals the mistake shows
        assert not at_most(rate(sure_of_nothing(row[0].tolist(), margin) == "equivalent" for row in differences), ALPHA)


@pytest.mark.slow
@pytest.mark.usefixtures("hurried")
def test_among_six_that_matter_any_is_called_equivalent_at_most_5_times_in_100() -> None:
    families = noise(5, 6, repeats=600) + 4.0
    assert at_most(found_any(families, 4.0, "equivalent"), ALPHA, 600)
    assert not at_most(found_any(families, 4.0, "equivalent", corrected=False), ALPHA, 600)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("n", some([3, 5, 8], 3))
def test_the_minimum_detectable_effect_is_found_80_times_in_100(n: int) -> None:
    effect = minimum_detectable_effect(1, n) or 0
    assert near(found_any(noise(n) - effect, TINY, "better"), POWER)
    normal = (1.96 + 0.84) / math.sqrt(n)
    assert not near(found_any(noise(n) - normal, TINY, "better"), POWER)  # what the normal distribution promises


@pytest.mark.usefixtures("hurried")
def test_torn_pairs_do_not_find_the_minimum_detectable_effect() -> None:
    effect = minimum_detectable_effect(1, 5) or 0
    pairs = runs(5, 5, 500, truth=-effect)
    assert near(rate(only(list(a - b), TINY).verdict == "better" for a, b in pairs), POWER, 500)
    assert not near(rate(unpaired_ends(*pair)[1] < 0 for pair in pairs), POWER, 500)


CASES = [(1.6, 0.1), (0.0, 1.0), (0.3, 1.2), (0.8, 1.0), (2.5, 3.0)]  # truth and margin, in standard deviations


@cache
def decided(mean: float, margin: float, n: int, contrasts: int = 1, repeats: int = REPEATS) -> float:
    return rate((verdicts(noise(n, contrasts, repeats=repeats) + mean, margin) != "undecided").ravel())


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("mean", "margin"), some(CASES, 3))
def test_so_many_seeds_decide_80_times_in_100_and_one_fewer_do_not(mean: float, margin: float) -> None:
    n = int(seeds_to_decide(mean, 1, margin))
    assert at_most(1 - decided(mean, margin, n), 1 - POWER)
    assert n == 2 or at_most(decided(mean, margin, n - 1), POWER)
    assert near(decided(mean, margin, n), chance(mean, n, ALPHA, margin))


@pytest.mark.usefixtures("hurried")
def test_the_check_of_seeds_sees_a_number_taken_from_the_normal_distribution() -> None:
    n = math.ceil(((1.96 + 0.84) / 1.6) ** 2)
    assert not at_most(1 - decided(1.6, 0.1, n), 1 - POWER)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("mean", "margin"), CASES[:2])
def test_for_a_family_it_takes_more_seeds(mean: float, margin: float) -> None:
    n = int(seeds_to_decide(mean, 1, margin, ALPHA / 4))
    assert n > seeds_to_decide(mean, 1, margin)
    assert at_most(1 - decided(mean, margin, n, 4, 750), 1 - POWER, 750)  # 750 rows, correlated by Holm: as if alone


CASES_OF_ADVICE = [(3, 0.8, 0.1), (5, 0.5, 0.5), (8, 0.8, 0.1)]  # seeds, truth, margin, in standard deviations


def held(n: int, mean: float, margin: float, repeats: int) -> float:
    """How often the range of the advice holds the right number of seeds."""
    right = max(float(seeds_to_decide(mean, 1, margin)), n + 1)
    draws = np.random.default_rng(n).standard_normal((repeats, n)) + mean
    found = [advise(float(row.mean()), float(row.std(ddof=1)), n, margin) for row in draws]
    return rate((one.fewest or math.inf) <= right <= (one.most or math.inf) for one in found)


@pytest.mark.parametrize(("n", "mean", "margin"), some(CASES_OF_ADVICE, 2))
def test_the_range_of_the_advice_holds_the_right_number_80_times_in_100(n: int, mean: float, margin: float) -> None:
    assert 0.72 <= held(n, mean, margin, 120) <= 0.97


def test_the_check_of_the_range_sees_a_mean_that_is_taken_for_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = advice.truths(5)[0]
    monkeypatch.setattr(advice, "truths", lambda n: (spread, np.zeros_like(spread)))
    assert held(5, 0.5, 0.5, 60) < 0.7


# What changes nothing, and what changes sides


@given(differences, st.lists(st.integers(-999, 999), min_size=6, max_size=6))
@settings(deadline=None, max_examples=50)
def test_what_a_seed_adds_to_both_arms_changes_nothing(arm: list[float], seeds: list[int]) -> None:
    baseline = [i / 8 for i in range(len(arm))]
    plain = [a - b for a, b in zip(arm, baseline, strict=True)]
    moved = [(a + c) - (b + c) for a, b, c in zip(arm, baseline, seeds, strict=False)]
    assert only(moved, 0.5) == only(plain, 0.5)


@given(families, st.sampled_from([2.0**-20, 0.25, 2.0, 2.0**20]))
@settings(deadline=None, max_examples=25)
def test_the_unit_changes_no_verdict(family: dict[str, list[float]], factor: float) -> None:
    found, scaled = judge(family, 0.5), judge({k: [factor * v for v in vs] for k, vs in family.items()}, 0.5 * factor)
    for name, one in found.items():
        other = scaled[name]
        assert (one.verdict, one.wins, asked_for(one)) == (other.verdict, other.wins, asked_for(other))
        assert one.p_different_adjusted == other.p_different_adjusted
        assert (one.mean or 0) * factor == other.mean


SWAP = {"better": "worse", "worse": "better"}


@given(families)
@settings(deadline=None, max_examples=25)
def test_the_other_sign_swaps_better_and_worse(family: dict[str, list[float]]) -> None:
    found = judge(family, 0.5)
    negative = judge({name: [-v for v in values] for name, values in family.items()}, 0.5)
    upwards = judge(family, 0.5, lower_is_better=False)
    for name, one in found.items():
        assert negative[name].verdict == upwards[name].verdict == SWAP.get(one.verdict, one.verdict)
        assert negative[name].wins == upwards[name].wins == sum(v > 0 for v in family[name])
        assert negative[name].p_equivalent == one.p_equivalent
        assert upwards[name].mean == one.mean


@given(families)
@settings(deadline=None, max_examples=25)
def test_a_verdict_follows_from_the_adjusted_p_values(family: dict[str, list[float]]) -> None:
    found = judge(family, 0.5)
    assert list(found) == list(family)
    for raw, adjusted in (("p_different", "p_different_adjusted"), ("p_equivalent", "p_equivalent_adjusted")):
        assert [getattr(one, adjusted) for one in found.values()] == holm([getattr(one, raw) for one in found.values()])
    for one in found.values():
        assert one.p_equivalent_adjusted is not None
        assert one.p_different_adjusted is not None
        assert (one.verdict == "equivalent") == (one.p_equivalent_adjusted <= ALPHA)
        assert (one.verdict in SWAP) == (one.p_different_adjusted <= ALPHA < one.p_equivalent_adjusted)
        assert asked_for(one) == (None, None) or (one.verdict == "undecided" and (one.seeds_needed_low or 0) > one.n)


# Edges


def test_more_seeds_are_asked_for_by_the_number_of_contrasts_that_have_an_interval() -> None:
    values = [-0.01, -0.04, 0.005, -0.025]
    family: dict[str, list[float]] = {"one": values, "two": values, "three": values, "single": [0.1], "none": []}
    mean, sd = float(np.mean(values)), float(np.std(values, ddof=1))
    needed = [advise(mean, sd, 4, 0.01, ALPHA / comparisons) for comparisons in (1, 3)]
    assert [asked_for(only(values, 0.01)), asked_for(judge(family, 0.01)["one"])] == needed
    assert (needed[0].fewest or 0) < (needed[1].fewest or 0)  # more for three
    least = [only(values, 0.01).minimum_detectable, judge(family, 0.01)["one"].minimum_detectable]
    assert least == [minimum_detectable_effect(sd, 4, ALPHA / comparisons) for comparisons in (1, 3)]
    assert (least[0] or 0) < (least[1] or 0)


def test_seeds_that_have_failed_to_decide_are_not_asked_for_again() -> None:
    values = [1.2 + d * math.sqrt(2 / 5) for d in (-2, -1, 0, 1, 2)]  # mean 1.2, standard deviation 1
    found = only(values, 2.14)  # a little too large for equivalence, a little too small for a difference
    assert found.verdict == "undecided"
    assert seeds_to_decide(1.2, 1, 2.14) <= 5  # nearly every other five seeds would have
    assert found.seeds_needed_low == 6


def test_a_difference_that_is_there_but_does_not_matter_is_equivalent() -> None:
    found = only([0.0010, 0.0011, 0.0009, 0.0010], 0.01)
    assert found.p_different is not None
    assert found.p_different < 0.001
    assert found.verdict == "equivalent"


def test_one_seed_gives_no_interval_and_none_no_mean() -> None:
    pair = [-0.030, -0.031, -0.032]
    alone, family = only(pair, 0.01), judge({"none": [], "single": [-0.2], "pair": pair}, 0.01)
    assert family["pair"] == alone  # not counted among the comparisons
    assert family["none"] == Comparison(n=0, mean=None, wins=0)
    assert family["single"] == Comparison(n=1, mean=-0.2, wins=1)
    assert family["single"].verdict == "undecided"
    assert interval([1.0]) is interval([]) is None
    assert judge({}, 0.01) == {}


def test_equal_differences_leave_no_doubt() -> None:
    nothing, much, little = only([0.0] * 3, 0.01), only([-0.5] * 3, 0.01), only([0.25] * 3, 1)
    assert (nothing.verdict, nothing.ci_low, nothing.ci_high, nothing.p_different) == ("equivalent", 0, 0, 1)
    assert (much.verdict, much.ci_low, much.ci_high, much.p_different) == ("better", -0.5, -0.5, 0)
    assert (much.p_equivalent, much.minimum_detectable) == (1, 0)
    assert little.verdict == "equivalent"
    assert only([1.0] * 2, 1).verdict == "worse"  # a difference of the margin is not smaller than it
    assert seeds_to_decide(0.5, 0, 0.01) == 2


def test_what_is_no_number_is_named() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"wide: .*{value}"):
            judge({"narrow": [0.1, 0.2], "wide": [0.1, value]}, 0.01)
        with pytest.raises(ValueError, match="wide"):
            judge({"wide": [value]}, 0.01)
    for margin in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"margin={margin}"):
            judge({"a": [0.1, 0.2]}, margin)


def test_a_comparison_stays_as_it_is() -> None:
    with pytest.raises(FrozenInstanceError):
        only([0.1, 0.2], 0.01).n = 3  # type: ignore[misc]


# In words

say = partial(sentence, "untied", "tied", unit="nats per token", margin=0.01)
FIVE = [-0.032, -0.029, -0.036, -0.027, -0.031]


def test_a_verdict_in_words() -> None:
    assert (
        say(only(FIVE, 0.01))
        == "untied is better than tied: -0.0310 nats per token (95 % CI -0.0352 to -0.0268, 5 seeds)."
    )
    worse = "untied is worse than tied: +0.0310 nats per token (95 % CI +0.0268 to +0.0352, 5 seeds)."
    assert say(only([-v for v in FIVE], 0.01)) == worse
    assert say(only(FIVE, 0.01, lower_is_better=False)) == say(only(FIVE, 0.01)).replace("better", "worse")
    assert say(only([0.001, 0.003, -0.001, 0.002], 0.01)) == (
        "untied and tied are equivalent: +0.0013 nats per token (90 % CI -0.0008 to +0.0033, 4 seeds), "
        "within the equivalence margin of ±0.01."
    )
    assert say(only([-0.01, -0.04, 0.005, -0.025], 0.01)) == (
        "untied compared with tied is undecided: -0.0175 nats per token (95 % CI -0.0483 to +0.0133, 4 seeds); "
        "6 to 66 new seeds (80 % range) would probably decide."
    )
    assert say(only([-1.0, 1.1, 0.9, -0.9], 0.01)).endswith(
        "; 14 new seeds could decide, but it may take more than 100 (80 % range)."
    )
    nothing = only([1e-4 * (-1) ** i for i in range(40)], 1e-5)
    assert say(nothing).endswith("; even 100 seeds would probably not decide.")
    assert say(only([-0.031], 0.01)) == (
        "untied compared with tied is undecided: -0.0310 nats per token with one seed, which gives no confidence "
        "interval."
    )
    assert say(only([], 0.01)) == "untied compared with tied is undecided: no seed has finished in both."
    assert say(only([-1e-9] * 3, 0.01)).count("+0.0000") == 3  # no -0.0000


def test_a_verdict_that_many_comparisons_took_away_says_so() -> None:
    values = [-0.010, -0.030, -0.022, -0.040]
    others: Mapping[str, Sequence[float]] = {str(i): [-0.1 * i, 0.1, -0.2] for i in range(5)}
    alone, among = only(values, 0.01), judge({"one": values, **others}, 0.01)["one"]
    assert alone.verdict == "better"
    assert among.verdict == "undecided"
    assert "which excludes zero, but not after correction for the number of comparisons; " in say(among)
    assert "correction" not in say(only([-0.01, -0.04, 0.005, -0.025], 0.01))


@pytest.mark.parametrize(("margin", "shown"), [(0.0005, "-0.250000"), (0.05, "-0.2500"), (2.0, "-0.25"), (300, "+0")])
def test_digits_follow_from_the_margin(margin: float, shown: str) -> None:
    assert f": {shown} nats" in sentence("a", "b", Comparison(1, -0.25, 1), "nats", margin)
