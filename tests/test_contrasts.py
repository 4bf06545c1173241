"""From a frame of runs to a frame of contrasts: pairs, families, lost runs, interactions, and verdicts in words."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from lm.lab.ablation.contrasts import compare_arms
from lm.lab.ablation.record import AblationRecord
from lm.lab.ablation.response_surface import Regret, combine_regrets
from lm.lab.ablation.statistics import interval, judge_family

BEND = {"c": 1.0, "b": -2.0, "a": 1.0}  # the curvature of a over b to c, say
LOSSES: dict[str, list[Any]] = {  # by arm, of eight seeds
    "a": [1.00, 1.10, 1.20, 1.30, 1.05, 1.15, 1.25, 1.35],
    "b": [0.95, 1.06, 1.14, 1.26, 1.01, 1.10, 1.20, 1.31],
    "c": [0.80, 0.91, 0.98, 1.12, 0.85, 0.95, 1.06, 1.15],
}


def record(**changes: Any) -> AblationRecord:
    settings: dict[str, Any] = {"name": "test", "question": "?", "baseline": "a", "seeds": list(range(8))}
    settings |= {"pairs": {"b": "a", "c": "a"}, "primary": ["b", "c"], "equivalence_margin": 0.001}
    return AblationRecord(**settings | changes)


def runs(values: dict[str, list[Any]], budget: str = "tokens") -> pd.DataFrame:
    """A row for each run. A value is a loss, or what became of a run that has none; None: no such run."""
    return pd.DataFrame(
        {
            "arm": arm,
            "seed": seed,
            "budget": budget,
            "status": {"killed": "failed"}.get(value, value) if isinstance(value, str) else "done",
            "is_own_failure": value == "failed",
            "run_dir": f"runs/{arm}-seed{seed}-{budget}",
            "val_loss": np.nan if isinstance(value, str) else value,
        }
        for arm, of_arm in values.items()
        for seed, value in enumerate(of_arm)
        if value is not None
    ).astype({"val_loss": float})


def compared(question: AblationRecord, *of_runs: Any) -> pd.DataFrame:
    return pd.DataFrame(contrast.row() for contrast in compare_arms(question, *of_runs))


def contrasts(frame: pd.DataFrame, regrets: dict[str, Regret] | None = None, **changes: Any) -> pd.DataFrame:
    """By the name of the arm or interaction."""
    return compared(record(**changes), frame, regrets or {}).set_index("arm", drop=False)


def lose(lost: dict[tuple[str, int], Any]) -> pd.DataFrame:
    """All runs but for what became of those at some arm and seed."""
    return runs({arm: [lost.get((arm, i), loss) for i, loss in enumerate(LOSSES[arm])] for arm in LOSSES})


# --- pairs and families


def test_differences_are_taken_seed_by_seed_in_whatever_order_the_runs_are() -> None:
    frame = contrasts(runs(LOSSES).sample(frac=1, random_state=0))
    expected = {arm: [x - y for x, y in zip(LOSSES[arm], LOSSES["a"], strict=True)] for arm in "bc"}
    for arm, judged in judge_family(expected, 0.001).items():
        row = frame.loc[arm]
        assert row.differences == pytest.approx(expected[arm])
        assert (row.baseline, row.budget, row.family, row.metric) == ("a", "tokens", "primary", "val_loss")
        assert (row.p_adjusted, row.ci_low, row.df) == pytest.approx((judged.p_adjusted, judged.ci_low, 7))
        assert (row.n_seeds, row.wins, row.verdict) == (8, 8, "better")
    chain = contrasts(runs(LOSSES), pairs={"b": "a", "c": "b"})
    assert chain.loc["c"].differences == pytest.approx([x - y for x, y in zip(LOSSES["c"], LOSSES["b"], strict=True)])


def test_each_family_is_corrected_for_itself() -> None:
    frame = contrasts(runs(LOSSES), primary=["b"], contrasts={"bend": BEND}, pairs={"b": "a", "c": "b"})
    assert frame.family.to_dict() == {"b": "primary", "c": "secondary", "bend": "interaction"}
    assert frame.primary.tolist() == [True, False, False]
    assert (frame.p_adjusted == frame.p).all()
    together = contrasts(runs(LOSSES))
    assert together.p_adjusted.max() < 2 * together.p.max()
    assert together.p_adjusted.min() == 2 * together.p.min()


def test_with_planned_looks_the_level_is_that_of_a_look() -> None:
    looks = {"looks": [4, 8], "contrasts": {"bend": BEND}, "pairs": {"b": "a", "c": "b"}}
    frame = contrasts(lose({("b", i): "missing" for i in range(1, 8)}), **looks)
    assert frame.alpha.tolist() == [0.025] * 3  # also where one seed is tested
    row = contrasts(runs(LOSSES), **looks).loc["b"]
    assert (row.ci_low, row.ci_high) == interval(row.differences, 1 - row.alpha)
    assert "97.5 % CI" in row.sentence


def test_a_seed_that_lacks_a_run_is_named_and_left_out() -> None:
    for lost in (None, "missing", "killed"):
        frame = contrasts(lose({("b", 1): lost, ("b", 5): lost}))
        assert frame.seeds.to_dict() == {"b": [0, 2, 3, 4, 6, 7], "c": list(range(8))}
        assert frame.lost_seeds.to_dict() == {"b": [1, 5], "c": []}
        assert frame.n_seeds.to_dict() == {"b": 6, "c": 8}
        assert frame.verdict.tolist() == ["better"] * 2  # lost at random
        assert not frame.broken["b"]
    nothing = contrasts(runs(LOSSES).iloc[:0], contrasts={"bend": BEND}, pairs={"b": "a", "c": "b"})
    assert (nothing.n_seeds.tolist(), nothing.mean_difference.isna().all()) == ([0] * 3, True)
    assert nothing.sentence.str.contains("no seed has finished").all()


LETTERS = {"n": "diverged", "f": "failed", "k": "killed", "m": "missing"}
ENDS = [  # of a and of b, seed by seed (d: done), the verdict on b, what its sentence says
    ("dddddddd", "dddddddd", "better", ["b is better than a: 4.5 % lower perplexity (-0.0", "8 seeds"]),
    ("dddddddd", "dddddddn", "undecided", ["b diverged on 1 of 8 seeds, a on 0 of 8", "7 seeds that both finished"]),
    ("dddddddn", "dddddddn", "undecided", ["b diverged on 1 of 8 seeds, a on 1 of 8"]),
    ("dddddddd", "dddddddk", "better", ["7 seeds"]),  # killed from outside: lost at random
    ("dddddddk", "dddddddf", "undecided", ["b failed on seed 7; on the 7 seeds"]),
    ("dddddddf", "dddddddd", "better", ["a failed on seed 7"]),  # the baseline is not favoured
    ("dddd", "nnnn", "undecided", ["no seed has finished", "b diverged on 4 of 4 seeds, a on 0 of 4"]),
    ("nnnnnm", "dddddm", "undecided", ["a on 5 of 5"]),  # of what has not ended nothing is counted
]


@pytest.mark.parametrize(("a", "b", "verdict", "words"), ENDS)
def test_an_arm_is_not_favoured_by_the_seeds_that_it_survived(a: str, b: str, verdict: str, words: list[str]) -> None:
    values = {
        arm: [LETTERS.get(letter, loss) for letter, loss in zip(letters, LOSSES[arm], strict=False)]
        for arm, letters in (("a", a), ("b", b))
    }
    row = contrasts(runs(values), pairs={"b": "a"}, primary=["b"], seeds=list(range(len(a)))).loc["b"]
    assert row.verdict == verdict
    for word in words:
        assert word in row.sentence
    assert row.diverged == {arm: [*_at(of, "n")] for arm, of in (("b", b), ("a", a)) if "n" in of}
    assert row.broken == {arm: [*_at(of, "f")] for arm, of in (("b", b), ("a", a)) if "f" in of}
    assert row.ended == {arm: len(of) - len(_at(of, "fkm")) for arm, of in (("b", b), ("a", a))}


def _at(letters: str, which: str) -> list[int]:
    return [seed for seed, letter in enumerate(letters) if letter in which]


# --- weighted sums

CHAIN = {"pairs": {"b": "a", "c": "b"}, "primary": ["b"]}


def test_a_weighted_sum_is_judged_and_changes_no_other_comparison() -> None:
    frame = contrasts(runs(LOSSES), contrasts={"bend": BEND}, **CHAIN)
    row = frame.loc["bend"]
    b, c = frame.loc["b"].differences, frame.loc["c"].differences
    assert row.differences == pytest.approx([y - x for x, y in zip(b, c, strict=True)])
    assert row.p == judge_family({"bend": row.differences}, 0.001)["bend"].p
    assert (row.baseline, row.verdict, row.primary) == ("c - 2 b + a", "better", False)
    assert row.sentence.startswith("c + a is better than 2 b: -0.10")
    assert contrasts(lose({("a", 3): "missing"}), contrasts={"bend": BEND}, **CHAIN).loc["bend"].lost_seeds == [3]
    pd.testing.assert_frame_equal(frame[:2], contrasts(runs(LOSSES), **CHAIN))


def test_weighted_sums_of_the_same_arms_are_comparisons_of_their_own() -> None:
    sums = {"bend": BEND, "last": {"c": 2.0, "b": -1.0, "a": -1.0}, "both": {"c": 1.0, "b": 1.0, "a": -2.0}}
    together = contrasts(runs(LOSSES), contrasts=sums, **CHAIN)
    for name, weights in sums.items():
        alone, row = contrasts(runs(LOSSES), contrasts={name: weights}, **CHAIN).loc[name], together.loc[name]
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
    row = contrasts(lose({(arm, 7): "diverged"}), contrasts={"bend": weights}, **CHAIN).loc["bend"]
    assert row.verdict == verdict
    assert f"{arm} on 1 of 8" in row.sentence.replace(" diverged", "")


def test_an_arm_that_has_no_weight_does_not_count() -> None:
    """Neither its missing runs nor its divergence nor its unknown regret."""
    gap, regrets = {"gap": {"c": 1.0, "b": -1.0}}, {"b": Regret(0.3, 2.0, 5), "c": Regret(0.2, 4.0, 5)}
    frame = lose({("a", 0): "missing", ("a", 1): "diverged", ("a", 2): "failed"})
    row = contrasts(frame, regrets, contrasts=gap).loc["gap"]
    assert (row.n_seeds, row.lost_seeds, row.diverged, row.broken) == (8, [], {}, {})
    assert row.tuning_sd == pytest.approx((2 + 4 + 0.1**2) ** 0.5)
    assert contrasts(frame, contrasts=gap).loc["gap"].verdict == "better"
    assert combine_regrets({"a": 1, "b": -1}, regrets) is None


def test_regrets_of_tuning_stand_beside_the_difference_that_they_may_explain() -> None:
    regrets = {"a": Regret(0.01, 1e-4, 5), "b": Regret(0.03, 2e-4, 5)}
    frame = contrasts(runs(LOSSES), regrets)
    row = frame.loc["b"]
    assert (row.regret, row.baseline_regret) == (0.03, 0.01)
    assert row.mean_without_regret == pytest.approx(row.mean_difference - 0.02)
    assert row.tuning_sd == pytest.approx((3e-4 + 0.02**2) ** 0.5)
    assert (row.ci_high - row.ci_low) > 3 * np.ptp(interval(row.differences))
    assert frame.loc["c", ["is_tuning_counted", "tuning_sd"]].tolist() == [False, 0]  # one of the arms is not tuned
    assert np.isnan(frame.loc["c"].mean_without_regret)
    upwards = contrasts(runs(LOSSES).rename(columns={"val_loss": "val_top1"}), regrets, metric="val_top1").loc["b"]
    assert upwards.mean_without_regret == pytest.approx(upwards.mean_difference + 0.02)
    assert (upwards.wins, "fraction of tokens" in upwards.sentence) == (0, True), "more is better"
    variance = combine_regrets(BEND, regrets | {"c": Regret(0.0, 0.0, 5)})
    assert variance
    assert (variance.variance, variance.df) == pytest.approx((1e-4 + 4 * 2e-4 + (0.01 - 2 * 0.03) ** 2, 5))


SAME = {"a": LOSSES["a"], "b": [loss + (-1) ** i * 1e-5 for i, loss in enumerate(LOSSES["a"])], "c": LOSSES["c"]}
DIVERGED = LOSSES | {"b": ["diverged"] * 8}


@pytest.mark.parametrize(
    ("values", "failed", "verdict", "reason", "words"),
    [
        (LOSSES, {"a": "edge"}, "undecided", "edge", "the best settings of a lie beyond what was tried: 4.5 % lower"),
        (LOSSES, {"b": "edge"}, "better", None, "b is better than a"),  # it would gain more
        (LOSSES, {"c": "edge"}, "better", None, "b is better than a"),
        (LOSSES, {"a": "flat"}, "undecided", "flat", "the learning rates of a that were tried make no difference: 4.5"),
        (LOSSES, {"b": "flat"}, "better", None, "b is better than a"),
        (SAME, {}, "equivalent", None, "equivalent"),
        (SAME, {"a": "edge"}, "undecided", "edge", "of a lie"),
        (SAME, {"b": "edge", "a": "edge"}, "undecided", "edge", "of a and b lie"),
        (DIVERGED, {}, "undecided", None, "b diverged on 8 of 8 seeds"),
        (DIVERGED, {"b": "divergence"}, "undecided", "divergence", "no setting was found with which b trains"),
        (LOSSES, {"a": "divergence"}, "undecided", "divergence", "with which a trains: 4.5 % lower"),
        (DIVERGED, {"a": "divergence", "b": "divergence"}, "undecided", "divergence", "with which a and b trains"),
        (LOSSES | {"b": ["failed", *LOSSES["b"][1:]]}, {}, "undecided", "survivors", "b failed on seed 0"),
    ],
)
def test_a_failed_search_undoes_what_more_search_may_undo(
    values: dict[str, list[Any]], failed: dict[str, str], verdict: str, reason: str | None, words: str
) -> None:
    row = compared(record(), runs(values), {}, failed).set_index("arm").loc["b"]
    assert (row.verdict, row.undecided_by) == (verdict, reason)
    assert words in row.sentence
    assert "seeds would" not in row.sentence


@pytest.mark.parametrize(("arm", "weights", "verdict"), [("a", BEND, "better"), ("b", BEND, "undecided")])
def test_in_a_weighted_sum_every_arm_that_more_search_would_move_against_the_verdict_counts(
    arm: str, weights: dict[str, float], verdict: str
) -> None:
    frame = compared(record(contrasts={"bend": weights}, **CHAIN), runs(LOSSES), {}, {arm: "edge"})
    assert frame.set_index("arm").loc["bend"].verdict == verdict
