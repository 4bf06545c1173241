"""The record of an ablation: what is written is what is read, and a mistake is named."""

import json
import math
from dataclasses import asdict
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
from lm.config import BadInput
from lm.config.ablation import Look, TuneConfig

CELL = {"arm": "a", "seed": 0, "budget": "tokens", "run_dir": "cells/a-seed0-0", "steps": 1, "config_hash": ""}
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


def searched(*scores: float, at: float = 1.0) -> dict[str, Any]:
    trials = [TrialRecord(values={"x": at}, score=one, run_dirs=[]) for one in scores]
    return {"a": asdict(SearchRecord(hyperparameters=[], seeds=[], inside={}, trials=trials))}


def read(folder: Path, **changes: Any) -> AblationRecord:
    write_record(record(arms={"a": arm()}), folder)
    content = json.loads((folder / "ablation.json").read_text())
    if changes:
        del content["checksum"]
    (folder / "ablation.json").write_text(json.dumps(content | changes))
    return read_record(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version: no such key"),
        ({"seeds": "0,1"}, "seeds: expected list, found '0,1'"),
        ({"seeds": [0, "1"]}, "seeds[1]: expected int, found '1'"),
        ({"equivalence_margin": None}, "equivalence_margin: expected float, found None"),
        ({"threads": 1.5}, "threads: expected int, found 1.5"),
        ({"arms": {"a": {"words": []}}}, "not what ablate.py wrote (TypeError"),
        ({"cells": [{"arm": "a"}]}, "not what ablate.py wrote (TypeError"),
        ({"tune": {"trials": 99}}, "ablation.tune.trials=99"),
        ({"cautions": [["one word"]]}, "not what ablate.py wrote ("),
        ({"baseline": "zzz"}, "baseline: no such arm as zzz; expected one of a"),
        ({"contrasts": {"a": "zzz"}}, "contrasts: no such arm as zzz; expected one of a"),
        ({"contrasts": {"a": "a"}}, "contrasts: a is compared with itself"),
        ({"budgets": ["zzz"]}, "budgets: zzz; choose among"),
        ({"budgets": ["tokens"] * 2}, "budgets: tokens is given twice"),
        ({"metric": "zzz"}, "metric=zzz: choose one of val_loss"),
        ({"looks": [1, 2]}, "looks=[1, 2]: expected increasing numbers of seeds from 2 on"),
        ({"looks": [*range(2, 23)]}, "looks: 21: expected at most 20"),
        (
            {"arms": {f"a{i}": asdict(arm()) for i in range(301)}},
            "arms: 301 comparisons: expected at most 300, of arms",
        ),
        ({"budgets": ["tokens"] * 301}, "arms: 301 comparisons: expected at most 300"),
        ({"interactions": {f"i{i}": "" for i in range(300)}}, "arms: 301 comparisons: expected at most 300"),
        ({"seeds": [*range(4001)]}, "seeds: 4,001 runs: expected at most 4,000 under all budgets"),
        ({"cells": [CELL] * 4001}, "seeds: 4,001 runs: expected at most 4,000 under all budgets"),
        ({"searches": searched(*[1.0] * 4001)}, "seeds: 4,001 runs: expected at most 4,000 under all budgets"),
        ({"command": "x" * 16_000_000}, "holds 16,001,"),
        ({"plot_over": "\x1b[31m"}, r"plot_over: '\x1b[31m'; expected a printable name"),
        ({"equivalence_margin": 0.0}, "equivalence_margin: 0.0; expected more than 0, less than 1e100"),
        ({"equivalence_margin": 10**30}, f"equivalence_margin: {10**30}; expected more than 0, less"),
        ({"arms": {"a": asdict(arm(steps={}))}}, "arms.a.steps.tokens: is missing"),
        ({"arms": {"a": asdict(arm(matched={"model.d_ff": 1}))}}, "contrasts: has no a, which is matched to"),
        ({"searches": searched()}, "searches.a.trials: is empty"),
        ({"searches": searched(1.0, at=0.0)}, "searches.a.trials: x=0.0; expected a few factors from 0.0"),
        ({"searches": searched(1.0, at=math.nan)}, "searches.a.trials: x=nan; expected a few factors from nan"),
        ({"searches": searched(1.0, at=10**400)}, "not what ablate.py wrote (OverflowError"),
        ({"searches": searched(1e308)}, "searches.a.trials: score=1e+308; expected a number below 1e100"),
        ({"threads": True}, "threads: expected int, found True"),
        ({"begn": "x"}, "begn: no such key"),
        ({"bases": [{"seed": 0, "run_dir": "/", "sha256": None, "val_loss": None}]}, "run_dir=/: leads out of the"),
        (
            {"bases": [{"seed": 0, "run_dir": "a/../..", "sha256": None, "val_loss": None}]},
            "run_dir=a/../..: leads out",
        ),
    ],
)
def test_a_record_that_cannot_be_used_is_named_with_its_key(tmp_path: Path, changes: dict, said: str) -> None:
    with pytest.raises(BadInput) as error:
        read(tmp_path, **changes)
    assert str(error.value).startswith(f"{tmp_path / 'ablation.json'}: {said}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "1"])
def test_another_file_of_this_name_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "ablation.json").write_text(text)
    with pytest.raises(BadInput, match="not what ablate"):
        read_record(tmp_path)
    with pytest.raises(BadInput, match=r"absent: holds no ablation\.json"):
        read_record(tmp_path / "absent")


def test_a_record_that_was_changed_is_refused(tmp_path: Path) -> None:
    write_record(record(), tmp_path)
    path = tmp_path / "ablation.json"
    path.write_text(path.read_text().replace('"threads": 1', '"threads": 2'))
    with pytest.raises(BadInput, match="damaged, its content does not match its checksum"):
        read_record(tmp_path)


@pytest.mark.parametrize("path", sorted(STUDIES.rglob("ablation.json")), ids=lambda path: path.parent.name)
def test_a_record_that_is_read_and_written_stays_the_same(path: Path, tmp_path: Path) -> None:
    before = read_record(path.parent)
    write_record(before, tmp_path)
    assert read_record(tmp_path) == before
