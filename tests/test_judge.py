"""From a frame of runs to verdicts: scipy's tests, pairs, families, lost runs, weighted sums, and the words.

How often verdicts are wrong is simulated by scripts/benchmark/error_rates.py; docs/statistics.md has its tables.
"""

import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import Polynomial
from scipy import stats

from lm.lab.ablation.folder import ArmRecord
from lm.lab.ablation.judge import ALPHA, detectable, holm, interval, judge
from lm.lab.ablation.question import Question
from lm.lab.ablation.sentence import sentence
from lm.lab.ablation.tuning import LADDER, MOST_MOVES, lowest_point, pilot

BEND = {"c": 1.0, "b": -2.0, "a": 1.0}  # the curvature of a over b to c, say
LOSSES = {  # by arm, of eight seeds
    "a": [1.00, 1.10, 1.20, 1.30, 1.05, 1.15, 1.25, 1.35],
    "b": [0.95, 1.06, 1.14, 1.26, 1.01, 1.10, 1.20, 1.31],
    "c": [0.80, 0.91, 0.98, 1.12, 0.85, 0.95, 1.06, 1.15],
}
LETTERS = {"n": "diverged", "f": "failed", "k": "killed", "m": "missing"}  # what becomes of a run; d: done


def runs(values, factor=1.0):
    """A row for each run. A value is a loss, or what became of a run that has none; None: no such run."""
    return pd.DataFrame(
        {
            "arm": arm,
            "seed": seed,
            "factor": factor,
            "status": value if isinstance(value, str) else "done",
            "val_loss": np.nan if isinstance(value, str) else value,
        }
        for arm, of_arm in values.items()
        for seed, value in enumerate(of_arm)
        if value is not None
    ).astype({"val_loss": float})


def ends(**letters):
    """The runs of arms whose ends are spelled by LETTERS, seed by seed."""
    return runs(
        {
            arm: [LETTERS.get(letter, loss) for letter, loss in zip(own, LOSSES[arm], strict=False)]
            for arm, own in letters.items()
        }
    )


def judged(frame, arms=None, arms_of="abc", **changes):
    """The contrasts by the arm, or by the name of a weighted sum."""
    asked = {"name": "test", "question": "?", "arms": {arm: [] for arm in arms_of}, "baseline": "a"}
    asked |= {"seeds": [*range(8)], "equivalence_margin": 0.001, "folds": False}
    question = Question(**asked | changes)
    given_arms = {arm: ArmRecord(is_tuned=question.tune is not None) for arm in question.arms} | (arms or {})
    contrasts = judge(question, frame, given_arms)
    for contrast in contrasts:
        contrast.sentence = sentence(contrast, question, given_arms)
    return pd.DataFrame(map(asdict, contrasts)).set_index("arm", drop=False)


def judged_differences(family, margin, **changes):
    """The contrasts of arms whose differences from a baseline of zeros are these, all primary."""
    n = max(map(len, family.values()))
    metric = changes.get("metric", "val_loss")
    frame = runs({"base": [0.0] * n, **family}).rename(columns={"val_loss": metric})
    if metric != "val_loss":
        frame["val_loss"] = 0.0
    asked = {"arms_of": ["base", *family], "baseline": "base", "seeds": [*range(n)], "equivalence_margin": margin}
    return judged(frame, **asked, **changes)


# --- scipy's tests

differences = st.lists(st.integers(-300, 300).map(lambda i: i / 64), min_size=3, max_size=6)  # sums of these are exact
varied = differences.filter(lambda values: len(set(values)) > 1)


@given(varied, st.floats(0.01, 10))
def test_interval_difference_and_equivalence_are_those_of_scipys_t_tests(values, margin):
    row = judged_differences({"b": values}, margin).loc["b"]
    single = stats.ttest_1samp(values, 0)
    assert (row.ci_low, row.ci_high) == pytest.approx(tuple(single.confidence_interval()))
    assert (row.p, row.sd) == pytest.approx((single.pvalue, np.std(values, ddof=1)))
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert row.p_equivalent == pytest.approx(max(above, below))
    low, high = interval(values, 2 * ALPHA) or (0, 0)
    assert (low, high) == pytest.approx(tuple(single.confidence_interval(0.9)))
    assert (row.verdict == "equivalent") == (-margin < low and high < margin)


SWAP = {"better": "worse", "worse": "better"}
five = st.lists(st.sampled_from([-2.0, -0.5, 0.125, 3.0]), min_size=5, max_size=5)
families = st.dictionaries(st.sampled_from("bcdef"), five.filter(lambda values: len(set(values)) > 1), min_size=1)


@given(families)
def test_a_verdict_follows_from_the_adjusted_p_values_and_the_sign_swaps_it(family):
    frame = judged_differences(family, 0.5)
    negative = judged_differences({name: [-value for value in values] for name, values in family.items()}, 0.5)
    upwards = judged_differences(family, 0.5, metric="val_top1")
    for raw in ("p", "p_equivalent"):
        assert frame[f"{raw}_adjusted"].tolist() == holm(frame[raw].tolist())
    for name, row in frame.iterrows():
        assert (row.verdict == "equivalent") == (row.p_equivalent_adjusted <= ALPHA)
        assert (row.verdict in SWAP) == (row.p_adjusted <= ALPHA < row.p_equivalent_adjusted)
        assert negative.verdict[name] == upwards.verdict[name] == SWAP.get(row.verdict, row.verdict)
        assert negative.wins[name] == upwards.wins[name] == sum(value > 0 for value in family[name])
        assert upwards.mean_difference[name] == pytest.approx(row.mean_difference)


@pytest.mark.parametrize("n", [3, 5, 8, 20])
def test_the_detectable_difference_is_found_with_the_power_that_is_said(n):
    """By scipy's noncentral t; the approximation errs by a few per cent at three seeds."""
    effect = detectable(1.0, n)
    limit = stats.t.ppf(1 - ALPHA / 2, n - 1)
    power = stats.nct.sf(limit, n - 1, effect * n**0.5)
    assert power == pytest.approx(0.8, abs=0.05 if n == 3 else 0.03)


# --- pairs and families


def test_differences_are_taken_seed_by_seed_in_whatever_order_the_runs_are():
    frame = judged(runs(LOSSES).sample(frac=1, random_state=0))
    for arm in "bc":
        row, expected = frame.loc[arm], np.subtract(LOSSES[arm], LOSSES["a"])
        assert row.differences == pytest.approx(expected)
        assert (row.baseline, row.family, row.metric, row.primary) == ("a", "primary", "val_loss", True)
        assert (row.n_seeds, row.wins, row.verdict) == (8, 8, "better")


def test_each_family_is_corrected_for_itself():
    frame = judged(runs(LOSSES), primary=["b"], contrasts={"bend": BEND})
    assert frame.family.to_dict() == {"b": "primary", "c": "secondary", "bend": "weighted"}
    assert frame.primary.tolist() == [True, False, False]
    assert (frame.p_adjusted == frame.p).all()


# --- lost runs

ENDS = [  # of a and of b, seed by seed, and the verdict on b
    ("dddddddd", "dddddddn", "undecided"),
    ("dddddddn", "dddddddn", "undecided"),
    ("dddddddd", "dkdddmdd", "better"),  # killed from outside, or not there yet: lost at random
    ("dddddddk", "dddddddf", "undecided"),
    ("dddddddf", "dddddddd", "better"),  # the baseline is not favoured
    ("dddd", "nnnn", "worse"),
    ("nnnn", "dddd", "better"),
    ("nnnn", "nnnn", "undecided"),
    ("nnnnnddd", "nnnnnnnn", "undecided"),
    ("dddddddd", "ffff", "undecided"),  # a fault of the code or no memory says nothing about the setting
    ("dddddddd", "nnnf", "undecided"),
    ("ffff", "dddddddd", "undecided"),  # nor is its rival better
    ("ddmm", "nnnn", "undecided"),  # two seeds do not show that a trains
    ("ddd", "n", "undecided"),  # one lost run decides nothing
]


@pytest.mark.parametrize(("a", "b", "verdict"), ENDS)
def test_an_arm_is_not_favoured_by_the_seeds_that_it_survived(a, b, verdict):
    row = judged(ends(a=a, b=b), arms_of="ab").loc["b"]
    assert row.verdict == verdict
    assert row.seeds == [seed for seed, pair in enumerate(zip(a, b, strict=False)) if pair == ("d", "d")]
    for letter, lost in (("n", row.diverged), ("f", row.failed)):
        own = {arm: [seed for seed, end in enumerate(of_arm) if end == letter] for arm, of_arm in (("a", a), ("b", b))}
        assert lost == {arm: seeds for arm, seeds in own.items() if seeds}


# --- weighted sums


def test_a_weighted_sum_is_of_the_seeds_of_its_own_arms_and_changes_no_other_comparison():
    chain = {"baselines": {"c": "b"}, "primary": ["b"]}
    frame = judged(runs(LOSSES), contrasts={"bend": BEND}, **chain)
    row = frame.loc["bend"]
    assert row.differences == pytest.approx(np.subtract(frame.differences["c"], frame.differences["b"]))
    assert (row.baseline, row.verdict, row.primary) == ("c - 2 b + a", "better", False)
    assert row.sentence.startswith("c + a is better than 2 b: -0.10")
    pd.testing.assert_frame_equal(frame[:2], judged(runs(LOSSES), **chain))
    sums = {"bend": BEND, "gap": {"c": 1.0, "b": -1.0}}
    lost = judged(ends(a="mnfddddd", b="dddddddd", c="dddddddd"), contrasts=sums, **chain)
    assert lost.seeds["bend"] == [3, 4, 5, 6, 7]
    assert lost.loc["gap", ["n_seeds", "diverged", "failed", "verdict"]].tolist() == [8, {}, {}, "better"]


@pytest.mark.parametrize(
    ("arm", "weights", "verdict"),
    [
        ("c", BEND, "undecided"),  # it is favoured: c - b is better
        ("a", BEND, "undecided"),  # a low loss of `a` makes it better too
        ("b", BEND, "better"),
        ("b", {"b": 2.0, "c": -1.0, "a": -1.0}, "worse"),
    ],
)
def test_in_a_weighted_sum_an_arm_that_diverged_is_not_favoured(arm, weights, verdict):
    frame = ends(**dict.fromkeys("abc", "dddddddd") | {arm: "dddddddn"})
    assert judged(frame, contrasts={"bend": weights}).verdict["bend"] == verdict


# --- tuned arms

TUNED = {"tune": "true", "arms_of": "ab", "equivalence_margin": 0.01}


def ladders(valleys):
    """Runs of arms over five factors: by arm the loss at the best factor, and the best factor in factors of two."""
    noise = [0.003, -0.002, 0.001, -0.004, 0.002, 0.0, -0.001, 0.001]
    return pd.concat(
        runs({arm: [low + 0.1 * (np.log2(factor) - best) ** 2 + n * (1 + i) for n in noise]}, factor)
        for i, (arm, (low, best)) in enumerate(valleys.items())
        for factor in (0.5, 0.707107, 1.0, 1.41421, 2.0)
    )


LADDERS = ladders({"a": (2.0, 0.5), "b": (2.1, -0.5)})


def diverging(rows):
    """LADDERS, of which the runs of b at these rows diverged."""
    return LADDERS.assign(status=LADDERS["status"].mask((LADDERS["arm"] == "b") & rows, "diverged"))


CRASHED = LADDERS.assign(status=LADDERS["status"].mask(LADDERS["arm"] == "b", "failed"))


def test_tuned_arms_are_scored_at_their_own_best_value_with_the_seeds_that_have_all_values():
    row = judged(LADDERS, **TUNED).loc["b"]
    assert row.mean_difference == pytest.approx(0.1, abs=0.003)
    assert (row.verdict, row.n_seeds, row.gain_low, row.gain_high) == ("worse", 8, 0, 0)
    is_gone = (LADDERS["arm"] == "b") & (LADDERS["seed"] == 2) & (LADDERS["factor"] == 2)
    assert judged(LADDERS[~is_gone], **TUNED).seeds["b"] == [0, 1, 3, 4, 5, 6, 7]


def test_an_end_of_the_ladder_widens_the_interval_by_what_its_arm_may_still_gain():
    inside = judged(ladders({"a": (2.0, 0.0), "b": (2.05, 0.0)}), **TUNED).loc["b"]
    edge = judged(ladders({"a": (2.0, 0.0), "b": (2.05, 2.0)}), **TUNED).loc["b"]  # still falling at its upper end
    assert edge.gain_low == pytest.approx(0.2, abs=0.01), "the slope there, for one factor of two"
    assert edge.ci_high - edge.ci_low > inside.ci_high - inside.ci_low + 0.19
    assert (inside.verdict, edge.verdict) == ("worse", "undecided")
    assert (edge.seeds_needed, edge.minimum_detectable) == (None, None), "more seeds would not help"
    assert "b may still gain 0.2" in edge.sentence
    better = judged(ladders({"a": (2.0, 2.0), "b": (1.7, 0.0)}), **TUNED).loc["b"]
    assert (better.verdict, better.gain_high) == ("better", pytest.approx(0.2, abs=0.01)), "0.4 are more than 0.2"


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (diverging(LADDERS["seed"] >= 0), ("worse", None, ["b"])),  # it trains at no value
        (diverging(LADDERS["seed"] == 3), ("undecided", "unstable", [])),  # 35 of 40 runs trained
        (diverging(LADDERS["factor"] > 0.8), ("undecided", "unstable", [])),  # two values are no curve
        (LADDERS[LADDERS["arm"] == "a"], ("undecided", "seeds", [])),  # the pilot of b has not ended
        (CRASHED, ("undecided", "untrainable", ["b"])),
    ],
)
def test_a_tuned_arm_without_a_curve_is_worse_only_if_it_never_trains(frame, expected):
    row = judged(frame, **TUNED).loc["b"]
    assert (row.verdict, row.undecided_by, row.untrainable) == expected


# --- the words


def shifted(by):
    """The arms a and b, whose differences have the sizes `by` and alternate in sign."""
    return runs({"a": LOSSES["a"], "b": [loss + (-1) ** i * by for i, loss in enumerate(LOSSES["a"])]})


def test_a_sentence_has_the_values_the_amount_its_certainty_and_what_was_not_done():
    sized = {"a": ArmRecord(overrides=["head=tied"], n_params=100, flops_per_token=10)}
    sized["b"] = ArmRecord(overrides=["head=untied"], n_params=150, flops_per_token=10)
    assert judged(runs(LOSSES), sized, arms_of="ab").sentence["b"] == (
        "head=untied is better than tied: 4.5 % lower perplexity (95 % CI -5.1 % to -3.9 %, 8 seeds, on this "
        "validation text), at the config's learning rates, not tuned; 50 % more parameters, same FLOPs per token; "
        "to tune the learning rates, add tune=true (80 runs or more)."
    )
    rates = {arm: ArmRecord(overrides=[f"optim.lr={arm}"]) for arm in "ab"}
    assert "not tuned" not in judged(runs(LOSSES), rates, arms_of="ab").sentence["b"]
    for bases, said in (
        (("RUN", "RUN"), ", from this trained model)"),
        (("RUN", "OTHER"), ", from these trained models)"),
        (("bases/seed{seed}", "bases/seed{seed}"), ")"),
    ):
        continued = {arm: ArmRecord(settings={"init_from": base}) for arm, base in zip("ab", bases, strict=True)}
        told = judged(runs(LOSSES), continued, arms_of="ab").sentence["b"]
        assert f"8 seeds, on this validation text{said}" in told
    neither = {arm: ArmRecord(is_tuned=False) for arm in "ab"}  # the tuned setting is 0 in both
    assert ", not tuned" in judged(runs(LOSSES), neither, arms_of="ab", tune="optim.weight_decay").sentence["b"]
    vague = judged(shifted(0.05), arms_of="ab", equivalence_margin=0.02).loc["b"]
    assert f"about {vague.seeds_needed} seeds would detect 2 % of perplexity" in vague.sentence
    assert detectable(vague.sd, vague.seeds_needed) <= 0.02 < detectable(vague.sd, vague.seeds_needed - 1)


FOUR = LADDERS[LADDERS["factor"] < 1.9]
FAR_OFF = LADDERS.assign(val_loss=LADDERS["val_loss"] + 9 * ((LADDERS["arm"] == "b") & (LADDERS["factor"] > 1.9)))
TWO = {"arms_of": "ab"}
NEARLY = {"a": [1.0] * 5, "b": [1.1, 1.3, 1.05, 1.4, 1.15], "c": [1.1, 0.9, 1.2, 0.8, 1.05]}  # p of b: 0.03, of two
NARROW = runs({"a": [3.0] * 4, "b": [3.00023, 3.00021, 3.00025, 3.00024]})  # not "+0.0 % to +0.0 %"
WORDS = [
    (runs(LOSSES), TWO | {"folds": True}, ["8 seeds, each on its own validation text"]),
    (runs(LOSSES), TWO | {"looks": [4, 8]}, ["97.5 % CI -5.2 % to -3.8 %"]),  # by scipy, at the level of a look
    (shifted(1e-4), TWO, ["b and a are equivalent within 0.1 % of perplexity: ", "90 % CI"]),
    (runs(LOSSES).iloc[:0], TWO, ["no seed has finished"]),
    (ends(a="d", b="d"), TWO, ["which give no interval"]),
    (runs({"a": [1.0] * 2, "b": [2.0, 2.1]}), TWO, ["is undecided", "a verdict needs 3 seeds"]),
    (runs({"a": [1.0] * 4, "b": [2.0] * 4}), TWO, ["no test is possible"]),  # as runs that ignore their seeds
    (ends(a="dddddddf", b="dddddddn"), TWO, ["b diverged at seed 7; a failed at seed 7", "others may favour it"]),
    (ends(a="nnnn", b="nnnn"), TWO, ["no run of b and a trained"]),
    (runs(NEARLY), {"seeds": [*range(5)]}, ["not after correction for the number of comparisons"]),
    (ends(a="ddd", b="nnd"), TWO | {"looks": [3, 8]}, ["b diverged at seed 0, 1"]),  # a look has decided
    (diverging(LADDERS["seed"] >= 0), TUNED, ["all five values of b"]),
    (diverging(LADDERS["factor"] > 1.9), TUNED, ["; 1 of the five values of b diverged"]),
    (FAR_OFF, TUNED, ["; 1 of the five values of b diverged or failed or were far off"]),
    (
        diverging(LADDERS["seed"] == 3),
        TUNED,
        ["a at its own best learning rate, from five values (a: 1.4 times the config's);"],
    ),
    (
        LADDERS,
        TUNED,
        ["from five values (b: 0.71 times the config's, a: 1.4 times the config's)"],
    ),
    (
        pd.concat([LADDERS[LADDERS["arm"] == "a"], FOUR[FOUR["arm"] == "b"]]),
        TUNED,
        ["learning rate, from four to five values"],
    ),
    (
        NARROW,
        TWO | {"seeds": [*range(4)], "equivalence_margin": 1e-4},
        ["0.023 % higher", "+0.021 % to +0.026 %"],
    ),
]


@pytest.mark.parametrize(("frame", "asked", "words"), WORDS)
def test_a_sentence_says_on_what_a_verdict_rests_and_why_there_is_none(frame, asked, words):
    told = judged(frame, **asked).sentence["b"]
    assert [part for part in words if part not in told] == [], told


@pytest.mark.parametrize(
    ("a", "differences", "expected"),
    [
        (5e6, [-1, -3, -2, -4, -2], "better"),  # a common offset changes nothing
        (1e9, [1e9, 1e9 + 800, 1e9 + 1600], "worse"),
        (10.0, [199990.09, 199989.98, 199990.05, 199990.02], "worse"),
        (1e-323, [5e-324, 1e-323, 5e-324, 1e-323], "equal"),  # too small for a standard error
        (1e12, [0.01, 0.02, 0.03, 0.02], "worse"),  # much more than double precision rounds
        (3.0, [1e-5, 1.01e-5, 0.99e-5, 1e-5, 1.02e-5], "equivalent"),  # within the margin
        (3.0, [0.5, 0.5 + 1e-7, 0.5 - 1e-7], "equal"),  # but for rounding to single precision
        (0.1, [0.2, 0.2, 0.2 + 1e-16], "equal"),
    ],
)
def test_differences_are_equal_if_they_vary_by_rounding_alone(a, differences, expected):
    values = {"a": [a] * len(differences), "b": [a + difference for difference in differences]}
    row = judged(runs(values), arms_of="ab", seeds=[*range(len(differences))]).loc["b"]
    assert expected in (row.verdict, row.undecided_by)


# --- the ladder: where the pilot puts its middle, which values count, where the curve is lowest

X = np.array(LADDER) / 2  # factors of two


def valley(best):
    return lambda rung: (rung / 2 - best) ** 2


MOVING = [*range(-2, 2 * MOST_MOVES + 1, 2)]
PILOTS = [  # the loss of a rung, the middle that the pilot finds, and the rungs that it asks for
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


@pytest.mark.parametrize(("n_values", "degree"), [(5, 3), (4, 2)])
def test_the_weights_of_the_curve_are_those_of_a_fit_of_numpy(n_values, degree):
    """A cubic through five means, a parabola where a value was dropped."""
    x, means = X[:n_values], np.array([3.4, 3.1, 3.0, 3.05, 3.3])[:n_values]
    point = lowest_point(x, means)
    grid = np.linspace(x[0], x[-1], 20_001)
    assert point.best == pytest.approx(grid[Polynomial.fit(x, means, degree)(grid).argmin()], abs=1e-4)
    for weight, one in zip(point.weights, np.eye(n_values), strict=True):
        assert weight == pytest.approx(Polynomial.fit(x, one, degree)(point.best))
