"""The record of an ablation: what is written is what is read, and a mistake is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from lm.ablation.record import (
    AblationRecord,
    ArmRecord,
    Caution,
    CellRecord,
    SearchRecord,
    TrialRecord,
    read_record,
    write_record,
)
from lm.config import UserError
from lm.config.ablation import Look, TuneConfig

STUDIES = Path(__file__).parents[1] / "docs/studies"


def arm(**changes: Any) -> ArmRecord:
    settings: dict[str, Any] = {
        "words": [],
        "settings": {},
        "n_params": 7,
        "flops_per_token": 42,
        "steps": {"own": 10, "tokens": 10},
    }
    settings |= {"tokens_per_step": 128, "vocab_size": 257, "train_tokens": 900, "val_tokens": 100}
    settings["identity"] = dict.fromkeys(("data_hash", "tokenizer_hash", "source_hash"), "")
    return ArmRecord(**settings | changes)


def record(**changes: Any) -> AblationRecord:
    settings: dict[str, Any] = {"name": "test", "question": "?", "baseline": "a", "seeds": [0, 1]}
    settings |= {"equivalence_margin": 0.01, "overrides": [], "common": [], "contrasts": {}, "cells": []}
    settings |= {"arms": {"a": arm(), "b": arm()}, "cautions": [], "begun": "2026-01-31", "tuning_done": True}
    settings |= {"untuned": {}, "command": "the command", "machine": "here", "threads": 1, "workers": 2}
    return AblationRecord(**settings | {"python": "3.11", "versions": {}} | changes)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    search = SearchRecord(
        hyperparameters=["optim.lr"],
        seeds=[77],
        inside={"optim.lr": None},
        trials=[TrialRecord(values={"optim.lr": 0.1}, score=None, run_dirs=["trials/a-seed77-x"])],
    )
    look = Look(seeds=[0], baseline="a", primary=[], baselines={}, equivalence_margin=0.1, budgets=["tokens"])
    cell = CellRecord(arm="a", seed=0, budget="tokens", run_dir="cells/a-seed0-x", steps=10, config_hash="c")
    whole = record(
        tune=TuneConfig(trials=3, seeds=[77]),
        arms={"a": arm(settings={"optim.betas": [0.8, 0.9], "head.head_std": None}, tuned={"optim.lr": 1})},
        cells=[cell],
        cautions=[Caution("A few words:", "and what they mean.")],
        searches={"a": search},
        looks=[2, 3],  # the first has decided
        verdicts_seen=[look],
        trials_made=3,
        ended="2026-02-01",
    )
    write_record(whole, tmp_path)
    assert read_record(tmp_path) == whole


def read(folder: Path, **changes: Any) -> AblationRecord:
    write_record(record(arms={"a": arm()}), folder)
    content = json.loads((folder / "ablation.json").read_text())
    (folder / "ablation.json").write_text(json.dumps(content | changes))
    return read_record(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"begn": "x"}, "begn: no such key"),
        ({"seeds": "0,1"}, "seeds: expected list, found '0,1'"),
        ({"seeds": [0, "1"]}, "seeds[1]: expected int, found '1'"),
        ({"equivalence_margin": None}, "equivalence_margin: expected float, found None"),
        ({"threads": True}, "threads: expected int, found True"),
        ({"arms": {"a": {"words": []}}}, "not what lm wrote (TypeError"),
        ({"cells": [{"arm": "a"}]}, "not what lm wrote (TypeError"),
        ({"tune": {"factor": 99.0}}, "ablation.tune.factor=99"),
        ({"cautions": [["one word"]]}, "not what lm wrote ("),
    ],
)
def test_a_record_that_cannot_be_used_is_named_with_its_key(tmp_path: Path, changes: dict, said: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, **changes)
    assert str(error.value).startswith(f"{tmp_path / 'ablation.json'}: {said}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "1"])
def test_another_file_of_this_name_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "ablation.json").write_text(text)
    with pytest.raises(UserError, match="not what lm wrote"):
        read_record(tmp_path)
    with pytest.raises(UserError, match=r"absent: holds no ablation\.json"):
        read_record(tmp_path / "absent")


@pytest.mark.parametrize("path", sorted(STUDIES.rglob("ablation.json")), ids=lambda path: path.parent.name)
def test_a_record_that_is_read_and_written_stays_the_same(path: Path, tmp_path: Path) -> None:
    before = read_record(path.parent)
    write_record(before, tmp_path)
    assert read_record(tmp_path) == before
