"""Finished runs that no longer count: the plan names them, and what has changed since."""

import json
from pathlib import Path
from typing import Any

import pytest
import test_record
from conftest import WHOLE_RESULT
from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.cells import cells
from lm.ablation.plan.changes import set_aside
from test_plan import Build, build, question

from lm.ablation.record import AblationRecord
from lm.ablation.summary import no_longer_count

__all__ = ["build"]  # the fixture


@pytest.fixture
def before(build: Build, tmp_path: Path) -> AblationRecord:
    """An ablation of two arms and two seeds, of which all is finished."""
    config, arms = question(), build(question())
    for arm in arms.values():
        arm.steps["tokens"] = 30
    record = test_record.record(
        arms={name: arm.record() for name, arm in arms.items()},
        cells=[one for one, _ in cells(config, arms)],
        sources=arms["tied"].sources,
    )
    for one in record.cells:
        (tmp_path / one.run_dir).mkdir(parents=True)
        (tmp_path / one.run_dir / "result.json").write_text(json.dumps(WHOLE_RESULT | {"seed": one.seed}))
    return record


@pytest.fixture
def asked(build: Build, before: AblationRecord, tmp_path: Path) -> Any:
    def reasons(
        *words: str,
        record: AblationRecord = before,
        steps: int = 30,
        tuned: dict[str, float] | None = None,
        **changes: Any,
    ) -> dict[str, str]:
        config = question(**changes)
        arms = build(config, *words)
        for arm in arms.values():
            arm.steps["tokens"], arm.tuned = steps, tuned or {}
        return set_aside(record, [one for one, _ in cells(config, arms)], arms, Outcomes(tmp_path))

    return reasons


def test_what_still_counts_is_not_named(asked: Any) -> None:
    assert asked() == asked(record=test_record.record()) == {}
    assert asked(seeds=[0, 1, 2]) == {}


def test_a_changed_setting_is_named(asked: Any) -> None:
    found = asked("model.d_ff=48", "optim.adam_lr=0.01")
    assert len(found) == 4
    assert set(found.values()) == {"settings changed (model.d_ff, optim.adam_lr)"}
    assert no_longer_count(found) == [
        "4 finished runs in this folder no longer count: settings changed (model.d_ff, optim.adam_lr)"
    ]
    many = [f"model.{word}" for word in ("d_ff=48", "dropout=0.1", "norm=layernorm", "bias=true", "ffn=relu2")]
    assert set(asked(*many).values()) == {"settings changed (model.bias, model.d_ff, model.dropout and 2 more)"}


@pytest.mark.slow
def test_a_changed_file_of_the_training_code_is_named(
    asked: Any, before: AblationRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = before.sources | {"lm/model/head.py": "other", "lm/model/new.py": "new"}
    del files["lm/model/cache.py"]
    monkeypatch.setattr("lm.ablation.plan.arms.source_files", lambda classes: files)
    said = "the training code changed (lm/model/cache.py, lm/model/head.py, lm/model/new.py)"
    assert set(asked().values()) == {said}
    before.sources = {}
    assert set(asked().values()) == {"the training code changed"}


@pytest.mark.slow
def test_a_changed_text_is_named(asked: Any, corpus: Path) -> None:
    corpus.write_text(corpus.read_text() + "another line\n" * 9)
    assert set(asked().values()) == {"the text changed"}


@pytest.mark.slow
def test_an_arm_and_a_seed_that_are_left_out_are_named(asked: Any) -> None:
    assert list(asked(seeds=[0, 2]).values()) == ["the seed is no longer asked for"] * 2
    arms = {"tied": ["head=tied"], "other": ["head=tied_naive"]}
    assert list(asked(arms=arms, primary=[]).values()) == ["the arm is no longer asked for"] * 2


@pytest.mark.slow
def test_what_the_program_chose_otherwise_is_named(asked: Any) -> None:
    assert set(asked(steps=31).values()) == {"the number of steps changed"}
    assert set(asked(tuned={"optim.lr": 0.1}).values()) == {"the tuned settings changed (optim.lr)"}


@pytest.mark.slow
def test_why_a_run_does_not_count_is_remembered(asked: Any, before: AblationRecord) -> None:
    """The plan that asked for it is overwritten by the next."""
    first = asked("model.d_ff=48")
    before.set_aside, before.cells = first, []
    assert asked("model.d_ff=48") == first
    before.set_aside = {}
    assert set(asked("model.d_ff=48").values()) == {"an earlier plan asked for them"}


@pytest.mark.slow
def test_a_run_whose_settings_had_other_names_is_told(asked: Any, before: AblationRecord, tmp_path: Path) -> None:
    for one in before.cells:
        (tmp_path / one.run_dir).rename(tmp_path / f"{one.run_dir[:-10]}0123456789")
        one.run_dir = f"{one.run_dir[:-10]}0123456789"
    assert set(asked().values()) == {"its settings had other names"}
