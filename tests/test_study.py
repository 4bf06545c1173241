"""What a folder's runs say: pairs by seed, each comparison counted once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_record import record

from lm.ablation.judge.study import Row, Study
from lm.ablation.outcomes import Outcomes

LOSSES = {"a": [1.0, 1.1, 1.2], "b": [0.9, 1.02, 1.09], "c": [1.01, 1.12, 1.19]}


def study(rows: list[Row], budgets: tuple[str, ...] = ("tokens", "flops"), **changes: Any) -> Study:
    asked = {"contrasts": {"b": "a", "c": "a"}, "primary": ["b", "c"], "seeds": [0, 1, 2]}
    found = record(**({"equivalence_margin": 0.001, "budgets": list(budgets)} | asked | changes))
    return Study(found, Outcomes(Path("absent")), rows, [])


def row(arm: str, seed: int, budgets: list[str], shift: float = 0.0) -> Row:
    result = {"val_loss": LOSSES[arm][seed] + shift}
    return Row(arm, seed, budgets, f"cells/{arm}-{seed}-{shift}", 10, "done", "", result)


SHARED = [row(arm, seed, ["tokens", "flops"]) for arm in LOSSES for seed in range(3)]


def test_differences_are_taken_seed_by_seed() -> None:
    found = {(one.arm, one.budget): one for one in study(SHARED).contrasts()}
    assert found["b", "tokens"].differences == pytest.approx([-0.1, -0.08, -0.11])
    assert found["c", "flops"].differences == pytest.approx([0.01, 0.02, -0.01])


def test_runs_that_serve_two_budgets_are_one_comparison() -> None:
    """Counted twice, they would make Holm's correction harder on everybody."""
    once = {one.arm: one.comparison for one in study(SHARED, ("tokens",)).contrasts()}
    twice = study(SHARED).contrasts()
    assert len(twice) == 4
    assert all(one.comparison == once[one.arm] for one in twice)
    apart = [
        *(row(arm, seed, ["tokens"]) for arm in LOSSES for seed in range(3)),
        *(row("a", i, ["flops"]) for i in range(3)),
    ]
    apart += [row(arm, seed, ["flops"], 0.001) for arm in "bc" for seed in range(3)]
    for one in study(apart).contrasts():
        assert one.comparison.p_different_adjusted >= once[one.arm].p_different_adjusted
    assert study(apart).contrasts()[0].comparison.p_different_adjusted > once["b"].p_different_adjusted


def test_a_seed_that_lacks_a_run_is_named_and_left_out() -> None:
    (b, c) = study([one for one in SHARED if (one.arm, one.seed) != ("b", 1)], ("tokens",)).contrasts()
    assert (b.seeds, b.lost, b.comparison.n) == ([0, 2], [1], 2)
    assert (c.seeds, c.lost) == ([0, 1, 2], [])


def test_without_runs_nothing_is_said() -> None:
    assert [one.comparison.mean for one in study([]).contrasts()] == [None] * 4


def diverged(arm: str, seed: int) -> Row:
    return Row(arm, seed, ["tokens"], f"cells/{arm}-{seed}", 10, "diverged", "the loss is nan", {})


def test_an_arm_is_not_praised_by_the_seeds_that_it_survived() -> None:
    whole = [row(arm, seed, ["tokens"]) for arm in "ab" for seed in range(3)]
    whole += [replace(one, seed=one.seed + 3) for one in whole]  # enough for a verdict without one of them
    for arms, expected in ((("b",), "undecided"), (("a",), "better"), (("a", "b"), "undecided"), ((), "better")):
        rows = [diverged(one.arm, 2) if one.arm in arms and one.seed == 2 else one for one in whole]
        found = study(rows, ("tokens",), contrasts={"b": "a"}, primary=["b"], seeds=list(range(6)))
        (one,) = found.contrasts()
        assert one.comparison.verdict == expected
        for arm in arms:
            assert f"{arm} on 1 of 6" in found.say(one).replace(" diverged", "")
