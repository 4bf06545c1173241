"""What a plan and its history say against their own answer."""

from typing import Any

from test_plan import question

from lm.ablation.run.cautions import history, looked


def later(record: dict[str, Any], **changes: Any) -> list[str]:
    """The cautions of an ablation that is asked again; afterwards its verdict has been seen."""
    asked = question(**changes)
    found = [head for head, _ in history(asked, record)]
    record["looks"] = looked(asked, record)
    return found


def test_seeds_added_after_a_verdict_are_told() -> None:
    record: dict[str, Any] = {}
    assert later(record, seeds=[0, 1]) == []
    assert later(record, seeds=[0, 1]) == []  # the same again is no second look
    assert later(record, seeds=[0, 1, 2]) == ["Seeds were added after a verdict was seen (at 2, now 3):"]
    assert later(record, seeds=[0, 1, 2, 3]) == ["Seeds were added after a verdict was seen (at 2, 3, now 4):"]
    assert later(record, seeds=[7, 8, 9]) == []  # fresh ones


def test_one_seed_gave_no_verdict_to_see() -> None:
    record: dict[str, Any] = {}
    assert later(record, seeds=[0]) == []
    assert later(record, seeds=[0, 1, 2]) == []


def test_what_decides_a_verdict_is_not_changed_in_silence() -> None:
    record: dict[str, Any] = {}
    primary, margin = (f"Changed after a verdict was seen: {key}" for key in ("primary", "equivalence_margin"))
    assert later(record, equivalence_margin=0.01) == []
    assert later(record, equivalence_margin=5.0) == [margin]
    assert later(record, equivalence_margin=5.0, primary=[]) == [primary, margin]
