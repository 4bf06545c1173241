"""From a frame of runs to verdicts: scipy's tests, pairs, families, lost runs, weighted sums, and the words.

How often verdicts are wrong is simulated by scripts/benchmark/error_rates.py; docs/statistics.md has its tables.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lm.lab.ablation.folder import ArmRecord
from lm.lab.ablation.judge import ALPHA, detectable, holm, interval, judge
from lm.lab.ablation.question import Question
from lm.lab.ablation.sentence import sentence

BEND = {"c": 1.0, "b": -2.0, "a": 1.0}  # the curvature of a over b to c, say
LOSSES: dict[str, list[Any]] = {  # by arm, of eight seeds
    "a": [1.00, 1.10, 1.20, 1.30, 1.05, 1.15, 1.25, 1.35],
    "b": [0.95, 1.06, 1.14, 1.26, 1.01, 1.10, 1.20, 1.31],
    "c": [0.80, 0.91, 0.98, 1.12, 0.85, 0.95, 1.06, 1.15],
}


def runs(values: dict[str, list[Any]], factor: float = 1.0) -> pd.DataFrame:
    """A row for each run. A value is a loss, or what became of a run that has none; None: no such run."""
    return pd.DataFrame(
        {
            "arm": arm,
            "seed": seed,
            "factor": factor,
            "status": {"killed": "failed"}.get(value, value) if isinstance(value, str) else "done",
            "is_own_failure": value == "failed",
            "val_loss": np.nan if isinstance(value, str) else value,
        }
        for arm, of_arm in values.items()
        for seed, value in enumerate(of_arm)
        if value is not None
    ).astype({"val_loss": float})


def question(arms_of: Any = "abc", **changes: Any) -> Question:
    asked: dict[str, Any] = {"name": "test", "question": "?", "arms": {arm: [] for arm in arms_of}, "baseline": "a"}
    asked |= {"seeds": [*range(8)], "equivalence_margin": 0.001, "folds": False}
    return Question(**asked | changes)


def judged(frame: pd.DataFrame, arms: dict[str, ArmRecord] | None = None, **changes: Any) -> pd.DataFrame:
    """The contrasts by the arm, or by the name of a weighted sum."""
    asked = question(**changes)
    given_arms = {arm: ArmRecord(is_tuned=asked.tune is not None) for arm in asked.arms} | (arms or {})
    contrasts = judge(asked, frame, given_arms)
    for contrast in contrasts:
        contrast.sentence = sentence(contrast, asked, given_arms)
    return pd.DataFrame(map(asdict, contrasts)).set_index("arm", drop=False)


def lose(lost: dict[tuple[str, int], Any]) -> pd.DataFrame:
    """All runs but for what became of those at some arm and seed."""
    return runs({arm: [lost.get((arm, i), loss) for i, loss in enumerate(LOSSES[arm])] for arm in LOSSES})


def judged_differences(family: dict[str, list[float]], margin: float, **changes: Any) -> pd.DataFrame:
    """The contrasts of arms whose differences from a baseline of zeros are these, all primary."""
    n = max(map(len, family.values()))
    metric = changes.get("metric", "val_loss")
    frame = runs({"base": [0.0] * n, **family}).rename(columns={"val_loss": metric})
    if metric != "val_loss":
        frame["val_loss"] = 0.0
    asked: dict[str, Any] = {"arms_of": ["base", *family], "baseline": "base", "seeds": [*range(n)]}
    return judged(frame, **asked, equivalence_margin=margin, **changes)


# --- scipy's tests

differences = st.lists(st.integers(-300, 300).map(lambda i: i / 64), min_size=3, max_size=6)  # sums of these are exact
varied = differences.filter(lambda values: len(set(values)) > 1)


@given(varied, st.floats(0.01, 10))
@settings(deadline=None, max_examples=40)
def test_interval_difference_and_equivalence_are_those_of_scipys_t_tests(values: list[float], margin: float) -> None:
    row = judged_differences({"b": values}, margin).loc["b"]
    single = stats.ttest_1samp(values, 0)
    assert (row.ci_low, row.ci_high) == pytest.approx(tuple(single.confidence_interval()))
    assert (row.p, row.sd) == pytest.approx((single.pvalue, np.std(values, ddof=1)))
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert row.p_equivalent == pytest.approx(max(above, below))
    low, high = interval(values, 1 - 2 * ALPHA) or (0, 0)
    assert (low, high) == pytest.approx(tuple(single.confidence_interval(0.9)))
    assert (row.verdict == "equivalent") == (-margin < low and high < margin)


SWAP = {"better": "worse", "worse": "better"}
five = st.lists(st.sampled_from([-2.0, -0.5, 0.125, 3.0]), min_size=5, max_size=5)
families = st.dictionaries(st.sampled_from("bcdef"), five.filter(lambda values: len(set(values)) > 1), min_size=1)


@given(families)
@settings(deadline=None, max_examples=15)
def test_a_verdict_follows_from_the_adjusted_p_values_and_the_sign_swaps_it(family: dict[str, list[float]]) -> None:
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
def test_the_detectable_difference_is_found_with_the_power_that_is_said(n: int) -> None:
    """By scipy's noncentral t; the approximation errs by a few per cent at three seeds."""
    effect = detectable(1.0, n)
    limit = stats.t.ppf(1 - ALPHA / 2, n - 1)
    power = stats.nct.sf(limit, n - 1, effect * n**0.5)
    assert power == pytest.approx(0.8, abs=0.05 if n == 3 else 0.03)


def test_below_three_seeds_and_with_equal_differences_there_is_no_verdict() -> None:
    two = judged_differences({"b": [1.0, 1.1]}, 0.01).loc["b"]
    assert (two.verdict, two.undecided_by) == ("undecided", "seeds")
    assert "a verdict needs 3 seeds" in two.sentence
    one = judged_differences({"b": [-0.2]}, 0.01).loc["b"]
    assert (one.mean_difference, one.wins, one.verdict) == (-0.2, 1, "undecided")
    assert "which give no interval" in one.sentence
    for n in (3, 7, 100):  # deterministic runs with ignored seeds give exactly this
        for value in (0.0, 0.5):
            row = judged_differences({"b": [value] * n}, 0.01).loc["b"]
            assert (row.verdict, row.undecided_by, row.p) == ("undecided", "equal", None)
    assert "no test is possible" in row.sentence


# --- pairs and families


def test_differences_are_taken_seed_by_seed_in_whatever_order_the_runs_are() -> None:
    frame = judged(runs(LOSSES).sample(frac=1, random_state=0))
    for arm in "bc":
        row, expected = frame.loc[arm], [x - y for x, y in zip(LOSSES[arm], LOSSES["a"], strict=True)]
        assert row.differences == pytest.approx(expected)
        assert (row.baseline, row.family, row.metric, row.primary) == ("a", "primary", "val_loss", True)
        assert (row.n_seeds, row.wins, row.verdict) == (8, 8, "better")
    chain = judged(runs(LOSSES), baselines={"c": "b"})
    assert chain.loc["c"].differences == pytest.approx([x - y for x, y in zip(LOSSES["c"], LOSSES["b"], strict=True)])


def test_each_family_is_corrected_for_itself() -> None:
    frame = judged(runs(LOSSES), primary=["b"], contrasts={"bend": BEND})
    assert frame.family.to_dict() == {"b": "primary", "c": "secondary", "bend": "weighted"}
    assert frame.primary.tolist() == [True, False, False]
    assert (frame.p_adjusted == frame.p).all()
    together = judged(runs(LOSSES))
    assert together.p_adjusted.max() < 2 * together.p.max()
    assert together.p_adjusted.min() == 2 * together.p.min()


def test_with_planned_looks_the_level_is_that_of_a_look() -> None:
    looks = {"looks": [4, 8], "contrasts": {"bend": BEND}, "primary": ["b"]}
    assert judged(lose({("b", i): "missing" for i in range(1, 8)}), **looks).alpha.tolist() == [0.025] * 3
    row = judged(runs(LOSSES), **looks).loc["b"]
    assert (row.ci_low, row.ci_high) == interval(row.differences, 1 - row.alpha)
    assert "97.5 % CI" in row.sentence


def test_a_seed_that_lacks_a_run_is_left_out() -> None:
    for lost in (None, "missing", "killed"):
        frame = judged(lose({("b", 1): lost, ("b", 5): lost}))
        assert frame.seeds.to_dict() == {"b": [0, 2, 3, 4, 6, 7], "c": [*range(8)]}
        assert frame.verdict.tolist() == ["better"] * 2  # lost at random
        assert not frame.failed["b"]
    nothing = judged(runs(LOSSES).iloc[:0], contrasts={"bend": BEND})
    assert (nothing.n_seeds.tolist(), nothing.mean_difference.isna().all()) == ([0] * 3, True)
    assert nothing.sentence.str.contains("no seed has finished").all()


LETTERS = {"n": "diverged", "f": "failed", "k": "killed", "m": "missing"}
ENDS = [  # of a and of b, seed by seed (d: done), the verdict on b, what its sentence says
    (
        "dddddddd",
        "dddddddd",
        "better",
        ["b is better than a: 4.5 % lower perplexity (95 % CI -5.1 % to -3.9 %", "8 seeds"],
    ),
    ("dddddddd", "dddddddn", "undecided", ["b diverged at 1 of 8 seeds", "7 seeds", "others may favour it"]),
    ("dddddddn", "dddddddn", "undecided", ["b diverged at 1 of 8 seeds; a diverged at 1 of 8"]),
    ("dddddddd", "dddddddk", "better", ["7 seeds"]),  # killed from outside: lost at random
    ("dddddddk", "dddddddf", "undecided", ["b failed at seed 7"]),
    ("dddddddf", "dddddddd", "better", ["a failed at seed 7"]),  # the baseline is not favoured
    ("dddd", "nnnn", "worse", ["no run of b trained", "b diverged at 4 of 4 seeds"]),
    ("nnnn", "dddd", "better", ["no run of a trained"]),
    ("nnnn", "nnnn", "undecided", ["no run of b and a trained"]),
    ("ddmm", "nnnn", "undecided", ["no run of b trained"]),  # two seeds do not show that a trains
]


@pytest.mark.parametrize(("a", "b", "verdict", "words"), ENDS)
def test_an_arm_is_not_favoured_by_the_seeds_that_it_survived(a: str, b: str, verdict: str, words: list[str]) -> None:
    values = {
        arm: [LETTERS.get(letter, loss) for letter, loss in zip(letters, LOSSES[arm], strict=False)]
        for arm, letters in (("a", a), ("b", b))
    }
    row = judged(runs(values), seeds=[*range(len(a))], arms_of="ab").loc["b"]
    assert row.verdict == verdict
    for word in words:
        assert word in row.sentence
    assert row.diverged == {arm: _at(of, "n") for arm, of in (("b", b), ("a", a)) if "n" in of}
    assert row.failed == {arm: _at(of, "f") for arm, of in (("b", b), ("a", a)) if "f" in of}


def _at(letters: str, which: str) -> list[int]:
    return [seed for seed, letter in enumerate(letters) if letter in which]


# --- weighted sums


def test_a_weighted_sum_is_judged_and_changes_no_other_comparison() -> None:
    chain: dict[str, Any] = {"baselines": {"c": "b"}, "primary": ["b"]}
    frame = judged(runs(LOSSES), contrasts={"bend": BEND}, **chain)
    row = frame.loc["bend"]
    b, c = frame.loc["b"].differences, frame.loc["c"].differences
    assert row.differences == pytest.approx([y - x for x, y in zip(b, c, strict=True)])
    assert (row.baseline, row.verdict, row.primary) == ("c - 2 b + a", "better", False)
    assert row.sentence.startswith("c + a is better than 2 b: -0.10")
    without = judged(lose({("a", 3): "missing"}), contrasts={"bend": BEND}, **chain).loc["bend"]
    assert 3 not in without.seeds
    pd.testing.assert_frame_equal(frame[:2], judged(runs(LOSSES), **chain))


def test_weighted_sums_of_the_same_arms_are_comparisons_of_their_own() -> None:
    sums = {"bend": BEND, "last": {"c": 2.0, "b": -1.0, "a": -1.0}, "both": {"c": 1.0, "b": 1.0, "a": -2.0}}
    together = judged(runs(LOSSES), contrasts=sums)
    for name, weights in sums.items():
        alone, row = judged(runs(LOSSES), contrasts={name: weights}).loc[name], together.loc[name]
        assert (row.mean_difference, row.p) == (pytest.approx(np.mean(row.differences)), alone.p)
        assert row.p_adjusted >= alone.p_adjusted
    assert together.loc[[*sums]].p_adjusted.min() == 3 * together.loc[[*sums]].p.min()


@pytest.mark.parametrize(
    ("arm", "weights", "verdict"),
    [
        ("c", BEND, "undecided"),  # it is favoured: c - b is better
        ("a", BEND, "undecided"),  # a low loss of `a` makes it better too
        ("b", BEND, "better"),
        ("b", {"b": 2.0, "c": -1.0, "a": -1.0}, "worse"),
    ],
)
def test_in_a_weighted_sum_an_arm_that_diverged_is_not_favoured(arm: str, weights: dict, verdict: str) -> None:
    row = judged(lose({(arm, 7): "diverged"}), contrasts={"bend": weights}).loc["bend"]
    assert row.verdict == verdict
    assert f"{arm} diverged at 1 of 8 seeds" in row.sentence


def test_an_arm_that_has_no_weight_does_not_count() -> None:
    frame = lose({("a", 0): "missing", ("a", 1): "diverged", ("a", 2): "failed"})
    row = judged(frame, contrasts={"gap": {"c": 1.0, "b": -1.0}}).loc["gap"]
    assert (row.n_seeds, row.diverged, row.failed, row.verdict) == (8, {}, {}, "better")


# --- tuned arms

FACTORS = (0.5, 0.707107, 1.0, 1.41421, 2.0)


def ladders(valleys: dict[str, tuple[float, float]]) -> pd.DataFrame:
    """Runs of arms over five factors: by arm the loss at the best factor, and the best factor in factors of two."""
    noise = [0.003, -0.002, 0.001, -0.004, 0.002, 0.0, -0.001, 0.001]
    return pd.concat(
        runs({arm: [low + 0.1 * (np.log2(factor) - best) ** 2 + n * (1 + i) for n in noise]}, factor)
        for i, (arm, (low, best)) in enumerate(valleys.items())
        for factor in FACTORS
    )


TUNED: dict[str, Any] = {"tune": "true", "arms_of": "ab", "equivalence_margin": 0.01}


def test_tuned_arms_are_scored_at_their_own_best_value_and_the_sentence_names_it() -> None:
    row = judged(ladders({"a": (2.0, 0.5), "b": (2.1, -0.5)}), **TUNED).loc["b"]
    assert row.mean_difference == pytest.approx(0.1, abs=0.003)
    assert (row.verdict, row.n_seeds, row.gain_low, row.gain_high) == ("worse", 8, 0, 0)
    words = "each at its own best of five learning rates (b 0.71 times the config's, a 1.4 times)"
    assert words in row.sentence
    assert "not tuned" not in row.sentence


def test_an_end_of_the_ladder_widens_the_interval_by_what_its_arm_may_still_gain() -> None:
    inside = judged(ladders({"a": (2.0, 0.0), "b": (2.05, 0.0)}), **TUNED).loc["b"]
    edge = judged(ladders({"a": (2.0, 0.0), "b": (2.05, 2.0)}), **TUNED).loc["b"]  # still falling at its upper end
    assert edge.gain_low == pytest.approx(0.2, abs=0.01), "the slope there, for one factor of two"
    assert edge.ci_high - edge.ci_low > inside.ci_high - inside.ci_low + 0.19
    assert (inside.verdict, edge.verdict) == ("worse", "undecided")
    assert "b may still gain 0.2" in edge.sentence
    assert (edge.seeds_needed, edge.minimum_detectable) == (None, None), "more seeds would not help"
    assert "the ladder of b must reach further" in edge.sentence
    better = judged(ladders({"a": (2.0, 2.0), "b": (1.7, 0.0)}), **TUNED).loc["b"]
    assert (better.verdict, better.gain_high) == ("better", pytest.approx(0.2, abs=0.01)), "0.4 are more than 0.2"


def test_an_arm_that_trains_at_no_value_is_worse_and_one_tuned_arm_is_said() -> None:
    frame = ladders({"a": (2.0, 0.0), "b": (2.0, 0.0)})
    broken = frame.assign(status=frame["status"].mask(frame["arm"] == "b", "diverged"))
    row = judged(broken, **TUNED).loc["b"]
    assert (row.verdict, row.untrainable) == ("worse", ["b"])
    one_seed = frame.assign(status=frame["status"].mask((frame["arm"] == "b") & (frame["seed"] == 3), "diverged"))
    row = judged(one_seed, **TUNED).loc["b"]
    assert (row.verdict, row.undecided_by, row.untrainable) == ("undecided", "unstable", []), "35 of 40 runs trained"
    high = frame.assign(status=frame["status"].mask((frame["arm"] == "b") & (frame["factor"] > 1.9), "diverged"))
    assert "; 1 of the five values of b diverged" in judged(high, **TUNED).loc["b"].sentence
    only = frame[(frame["arm"] == "a") | (frame["factor"] == 1)]
    row = judged(only, {"a": ArmRecord(is_tuned=True), "b": ArmRecord()}, **TUNED).loc["b"]
    assert "a at its own best of five learning rates (a 1 times the config's), b not tuned" in row.sentence


def test_an_arm_whose_pilot_has_not_ended_is_not_judged() -> None:
    row = judged(ladders({"a": (2.0, 0.0)}), **TUNED).loc["b"]
    assert (row.verdict, row.untrainable) == ("undecided", [])
    two = judged(runs({"a": [1.0, 1.1, 1.3], "b": ["diverged", None, None]}), arms_of="ab", seeds=[0, 1, 2]).loc["b"]
    assert (two.verdict, two.untrainable) == ("undecided", []), "one lost run decides nothing"


def test_a_seed_of_a_ladder_that_lacks_a_run_is_left_out() -> None:
    frame = ladders({"a": (2.0, 0.0), "b": (2.05, 0.0)})
    is_gone = (frame["arm"] == "b") & (frame["seed"] == 2) & (frame["factor"] == 2)
    assert judged(frame[~is_gone], **TUNED).loc["b"].seeds == [0, 1, 3, 4, 5, 6, 7]


def test_the_words_of_a_verdict() -> None:
    sized = {"a": ArmRecord(overrides=["head=tied"], n_params=100, flops_per_token=10)}
    sized["b"] = ArmRecord(overrides=["head=untied"], n_params=150, flops_per_token=10)
    row = judged(runs(LOSSES), sized, arms_of="ab").loc["b"]
    assert row.sentence.startswith("head=untied is better than tied: 4.5 % lower perplexity (95 % CI -")
    assert ", 8 seeds, on this validation text), at the config's learning rates, not tuned" in row.sentence
    assert "; 50 % more parameters, same FLOPs per token" in row.sentence
    assert row.sentence.endswith("; tune=true tunes them, in 80 runs or more.")
    assert "8 seeds and validation texts" in judged(runs(LOSSES), arms_of="ab", folds=True).loc["b"].sentence
    same = {"a": LOSSES["a"], "b": [loss + (-1) ** i * 1e-4 for i, loss in enumerate(LOSSES["a"])]}
    equal = judged(runs(same), arms_of="ab").loc["b"]
    assert equal.sentence.startswith("b and a are equivalent within 0.1 % of perplexity: ")
    assert "90 % CI" in equal.sentence
    vague = {"a": LOSSES["a"], "b": [loss + (-1) ** i * 0.05 for i, loss in enumerate(LOSSES["a"])]}
    row = judged(runs(vague), arms_of="ab", equivalence_margin=0.02).loc["b"]
    assert (row.verdict, f"about {row.seeds_needed} seeds would detect 2 % of perplexity" in row.sentence) == (
        "undecided",
        True,
    )
    assert detectable(row.sd, row.seeds_needed) <= 0.02 < detectable(row.sd, row.seeds_needed - 1)
    rates = {arm: ArmRecord(overrides=[f"optim.lr={arm}"]) for arm in "ab"}
    assert "not tuned" not in judged(runs(LOSSES), rates, arms_of="ab").loc["b"].sentence
