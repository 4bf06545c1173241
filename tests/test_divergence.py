"""Runs that end without a number: divergence is an outcome, and a failure earns no praise.

`python tests/test_divergence.py` prints the table of docs/ablations.md.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import some
from helpers.ablation_folder import Page, make, numbers, write
from numpy.typing import NDArray
from scipy import special
from test_study import row, study

from lm.ablation.judge import statistics
from lm.ablation.judge.advice import Advice
from lm.ablation.judge.divergence import Divergence
from lm.ablation.judge.statistics import judge
from lm.ablation.judge.study import Row
from lm.ablation.report_input import read_results
from lm.ablation.run_files import broke, cause_of_death
from lm.ablation.summary import result_table

ARMS = 4  # of which the first is the baseline
SAME = 0.5  # correlation of whether the two runs of a seed diverge, where they are correlated
Array = NDArray[np.float64]


def hurry(patch: pytest.MonkeyPatch) -> None:
    """A verdict does not depend on these, and they take most of the time."""
    patch.setattr(statistics, "advise", lambda *_: Advice(None, None))
    patch.setattr(statistics, "minimum_detectable_effect", lambda *_, **__: None)


def families(n: int, rate: float, same: float, repeats: int) -> Iterator[tuple[Array, NDArray[np.bool_]]]:
    """(arms, n) losses and whether each run diverged, where no arm is better and none diverges more often."""
    draw = np.random.default_rng([n, int(100 * rate), int(100 * same)])
    limit = special.ndtri(rate)
    for _ in range(repeats):
        shared, own = draw.standard_normal(n), draw.standard_normal((ARMS, n))
        yield draw.standard_normal((ARMS, n)), same**0.5 * shared + (1 - same) ** 0.5 * own < limit


def false_verdicts(n: int, rate: float, same: float, repeats: int) -> tuple[float, float, float]:
    """Rates of families with a false "better" or "worse": of `judge`, without its correction, and Fisher's alone."""
    found = np.zeros(3)
    for losses, diverged in families(n, rate, same, repeats):
        values, counts = {}, {}
        for i in range(1, ARMS):
            both = ~diverged[i] & ~diverged[0]
            values[str(i)] = (losses[i] - losses[0])[both].tolist()
            counts[str(i)] = Divergence(int(diverged[i].sum()), n, int(diverged[0].sum()), n)
        together = judge(values, 1e-9, divergences=counts).values()
        alone = [*judge(values, 1e-9).values()]
        fisher = any(one.p <= 0.05 for one in counts.values())
        uncorrected = fisher or any(one.verdict != "undecided" for one in alone)
        found += [any(one.verdict != "undecided" for one in together), uncorrected, fisher]
    return tuple((found / repeats).tolist())


@pytest.mark.parametrize(("same", "repeats"), some([(0.0, 400), (SAME, 2000)], 2))
def test_arms_that_diverge_equally_often_are_seldom_told_apart(
    same: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences and divergences are one family; the same check must see tests that are not corrected."""
    hurry(monkeypatch)
    found, uncorrected, _ = false_verdicts(8, 0.4, same, repeats)
    allowed = 0.05 + 2 * (0.05 * 0.95 / repeats) ** 0.5
    assert found <= allowed
    assert uncorrected > allowed


def test_fishers_test_by_hand_and_where_it_is_made() -> None:
    assert Divergence(4, 4, 0, 4).p == pytest.approx(2 / 70)
    assert Divergence(3, 3, 0, 3).p == pytest.approx(2 / 20)
    assert Divergence(2, 5, 2, 5).p == 1
    testable = {(n, total) for n in (3, 4, 5, 8) for total in range(n + 1) if Divergence(total, n, 0, n).testable(0.05)}
    assert testable == {(4, 4), (5, 4), (5, 5), (8, 5), (8, 6), (8, 7), (8, 8)}
    assert not Divergence(4, 4, 0, 4).testable(0.021)  # p is 1/35: never significant at the level of a planned look
    assert Divergence(2, 5, 2, 5).testable(0.05)  # four divergences would be significant if they were all of one arm
    assert Divergence(0, 6, 2, 2).testable(0.05)  # p is 1/28, though the other extreme, 2 of 6, is not significant


def test_no_divergence_and_too_few_change_no_correction() -> None:
    values = {"b": [-0.1, -0.2, -0.1, -0.3, -0.2], "c": [0.1, -0.1, 0.0, 0.2, 0.1]}
    few = {"b": Divergence(0, 6, 1, 6), "c": Divergence(0, 6, 0, 6)}
    assert judge(values, 0.01, divergences=few) == judge(values, 0.01)
    many = judge(values, 0.01, divergences=few | {"c": Divergence(6, 6, 0, 6)})
    p = judge({"b": values["b"]}, 0.01)["b"].p_different or 0
    assert [judge(values, 0.01)["b"].p_different_adjusted, many["b"].p_different_adjusted] == [2 * p, 2 * p]
    assert (many["c"].verdict, many["c"].by_divergence) == ("worse", True)
    assert many["c"].p_diverged_adjusted == pytest.approx(3 * 2 / 924)  # the smallest of three


ENDS = {"diverged": "the loss is nan", "failed": "ValueError: nan", "killed": "killed by signal 9"}


def ended(arm: str, seed: int, how: str) -> Row:
    if how == "done":
        return row(arm, seed % 3, ["tokens"], (seed % 5) / 1000) if seed < 3 else later(arm, seed)
    status = "failed" if how == "killed" else how
    return Row(arm, seed, ["tokens"], f"cells/{arm}-{seed}", 10, status, ENDS[how], {})


def later(arm: str, seed: int) -> Row:
    found = row(arm, seed % 3, ["tokens"])
    return Row(arm, seed, ["tokens"], f"cells/{arm}-{seed}", 10, "done", "", found.result)


def verdict(a: str, b: str) -> tuple[str, str]:
    """The verdict on b against a, and what is said of it; a letter for each seed: d done, n diverged, f failed, k."""
    words = {"d": "done", "n": "diverged", "f": "failed", "k": "killed"}
    pairs = itertools.chain(zip(itertools.repeat("a"), range(9), a), zip(itertools.repeat("b"), range(9), b))
    rows = [ended(arm, seed, words[letter]) for arm, seed, letter in pairs]
    found = study(rows, ("tokens",), contrasts={"b": "a"}, primary=["b"], seeds=list(range(len(a))))
    (one,) = found.contrasts()
    return one.comparison.verdict, found.say(one)


def test_an_arm_that_always_diverges_is_worse() -> None:
    said = "b is worse than a: it diverged on 4 of 4 seeds, a on 0 of 4 (Fisher's exact test, p = 0.029)."
    assert verdict("dddd", "nnnn") == ("worse", said)
    said = "b is better than a: it diverged on 0 of 4 seeds, a on 4 of 4 (Fisher's exact test, p = 0.029)."
    assert verdict("nnnn", "dddd") == ("better", said)
    assert verdict("ddd", "nnn") == (
        "undecided",
        "b compared with a is undecided: no seed has finished in both. b diverged on 3 of 3 seeds, a on 0 of 3.",
    )
    found, said = verdict("ddddd", "nnnnd")
    assert found == "worse"
    assert said.startswith("b is worse than a: it diverged on 4 of 5 seeds, a on 0 of 5 (Fisher's exact test, p = 0.0")
    assert said.endswith("; on the 1 seed that both finished the difference is -0.08000 nats per token.")


def test_where_both_diverge_the_counts_are_said_and_decide_nothing() -> None:
    found, said = verdict("nnnndddd", "nnnndddd")
    assert found == "undecided"
    assert "b diverged on 4 of 8 seeds, a on 4 of 8 (Fisher's exact test, p = 1, corrected" in said or "p = 1)" in said


def test_a_failure_of_its_own_earns_no_praise_and_a_kill_costs_nothing() -> None:
    assert verdict("dddddd", "dddddd")[0] == "better"
    assert verdict("dddddd", "dddddk")[0] == "better"  # lost at random
    assert verdict("dddddf", "dddddd")[0] == "better"  # the baseline is not praised
    found, said = verdict("dddddd", "dddddf")
    assert found == "undecided"
    assert said.startswith("b compared with a is undecided: b failed on seed 5; on the 5 seeds that both finished")
    assert verdict("nnnnnd", "dddddd")[0] == "better"
    assert verdict("nnnnnd", "dddddf")[0] == "undecided"  # also where divergence decides


@pytest.mark.parametrize(
    ("exitcode", "cause", "own"),
    [
        (-9, "killed by signal 9", False),
        (143, "killed by signal 15", False),  # the worker has handled it
        (1, "ended with exit code 1", True),
        (-11, "crashed by signal 11", True),
        (134, "crashed by signal 6", True),
    ],
)
def test_what_a_process_died_of_says_whose_fault_it_is(exitcode: int, cause: str, own: bool) -> None:
    assert cause_of_death(exitcode) == cause
    assert broke("failed", cause) is own
    assert not broke("diverged", cause)


def test_a_report_in_which_nothing_but_divergence_decides(tmp_path: Path) -> None:
    seeds, asked = tuple(range(4)), ["untied"]
    for seed in seeds:
        write(tmp_path / f"cells/untied-seed{seed}-1000.json", {"status": "diverged", "error": "the loss is nan"})
    path = make(tmp_path, lambda arm, _: arm != "untied", seeds, budgets=("tokens",), primary=asked)
    said = "untied is worse than tied: it diverged on 4 of 4 seeds, tied on 0 of 4 (Fisher's exact test, p = 0.029)."
    assert said in Page(path).text
    assert said in result_table(read_results(path))
    assert ["untied", "4 of 4", "tied", "0 of 4", "0.029", "0.029"] in Page(path).tables[1]
    (one,) = (one for one in numbers(path)["contrasts"] if one["arm"] == "untied")
    assert (one["verdict"], one["by_divergence"], one["mean_difference"]) == ("worse", True, None)
    assert "too small to matter" not in Page(path).text
    make(path, lambda arm, _: arm != "untied", seeds, budgets=("tokens",), primary=["untied_matched"])
    assert "untied is worse than tied (by divergence)" in Page(path).text


if __name__ == "__main__":
    hurry(pytest.MonkeyPatch())
    print("| seeds | rate of divergence | pairs | false verdicts | uncorrected | Fisher's test alone |")
    for n, rate, same in itertools.product((5, 8), (0.1, 0.4, 0.7), (0.0, SAME)):
        kind = "correlated" if same else "independent"
        print(
            f"| {n} | {rate} | {kind} | " + " | ".join(f"{x:.3f}" for x in false_verdicts(n, rate, same, 3000)) + " |"
        )
