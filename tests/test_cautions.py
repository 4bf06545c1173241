"""What in a plan and its history weakens its answer."""

from typing import Any

from lm.ablation.run.cautions import early, history
from test_plan import question

from lm.ablation.record import look
from lm.config.ablation import Look, TuneConfig


def later(seen: list[Look], **changes: Any) -> list[str]:
    """The cautions of an ablation that is asked again; afterwards its verdict has been seen."""
    asked = question(**changes)
    found = [head for head, _ in history(asked, seen, asked.seeds)]
    seen.append(look(asked, asked.seeds))
    return found


def test_a_verdict_seen_with_fewer_seeds_is_told() -> None:
    looks: list[Look] = []
    assert later(looks, seeds=[0, 1]) == []
    assert later(looks, seeds=[0, 1]) == []  # the same again is no second look
    assert later(looks, seeds=[0, 1, 2]) == ["A verdict was seen with fewer seeds (at 2, now 3):"]
    assert later(looks, seeds=[0, 1, 2, 3]) == ["A verdict was seen with fewer seeds (at 2, 3, now 4):"]
    assert later(looks, seeds=[7, 8, 9]) == []  # fresh ones


def test_one_seed_gave_no_verdict_to_see() -> None:
    looks: list[Look] = []
    assert later(looks, seeds=[0]) == []
    assert later(looks, seeds=[0, 1, 2]) == []


def test_what_decides_a_verdict_is_not_changed_in_silence() -> None:
    looks: list[Look] = []
    primary, margin = (f"Changed after a verdict was seen: {key}" for key in ("primary", "equivalence_margin"))
    assert later(looks, equivalence_margin=0.01) == []
    assert later(looks, equivalence_margin=5.0) == [margin]
    assert later(looks, equivalence_margin=5.0, primary=[]) == [primary, margin]


def test_seeds_taken_away_after_a_verdict_are_told() -> None:
    asked = question(seeds=[0, 1, 2])
    assert list(history(asked, [], range(8))) == []  # nothing was seen
    ((head, _),) = history(asked, [look(asked, [0, 1, 2])], range(5))
    assert head == "Seeds were taken away after a verdict was seen (3, 4):"


def test_an_early_look_at_tuned_arms_is_told() -> None:
    tune = TuneConfig(trials=6, seeds=[900])
    found = [[*early(question(looks=looks, seeds=[*range(8)], tune=tune))] for looks in ([3, 8], [5, 8], [])]
    assert [len(one) for one in found] == [1, 0, 0]
    assert not [*early(question(looks=[3, 8], seeds=[*range(8)]))]
