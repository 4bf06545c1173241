"""What a folder's runs say: pairs by seed, each comparison counted once."""

from pathlib import Path

import pytest

from lm.ablation.study import Row, Study

LOSSES = {"a": [1.0, 1.1, 1.2], "b": [0.9, 1.02, 1.09], "c": [1.01, 1.12, 1.19]}


def study(rows: list[Row], budgets: tuple[str, ...] = ("tokens", "flops"), **record: object) -> Study:
    content = {
        "metric": "val_loss",
        "matters": 0.001,
        "budgets": list(budgets),
        "contrasts": {"b": "a", "c": "a"},
        "primary": ["b", "c"],
        "seeds": [0, 1, 2],
    }
    return Study(Path(), content | record, rows, [])


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
