"""A setting under an earlier name, or under another program's, is refused in one line that gives today's."""

import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, some
from hydra import compose, initialize_config_dir

from lm.cli.compose import register
from lm.cli.errors import CONFIGS
from lm.cli.names import trainer_arguments
from lm.config import ExportConfig, GenerateConfig, RunConfig
from lm.config.ablation import AblateConfig
from lm.config.identity import flat
from lm.config.renamed import CHOICES, CHOICES_ELSEWHERE, ELSEWHERE, KEYS

Refused = Callable[..., str]
OF_RUNS = {old: new for old, new in KEYS.items() if not old.startswith("ablation.")}
OF_ABLATIONS = {old: new for old, new in KEYS.items() if old.startswith("ablation.")}
CHOSEN = [(key, old, new) for key, renamed in CHOICES.items() for old, new in renamed.items()]
CHOSEN_ELSEWHERE = [(key, theirs, ours) for key, found in CHOICES_ELSEWHERE.items() for theirs, ours in found.items()]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command in an empty directory, in this process; give the one line with which it refuses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def run(name: str, *line: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        with pytest.raises(SystemExit) as left:
            import_module(f"lm.cli.{name}").main(list(line))
        error = capsys.readouterr().err
        assert (left.value.code, error.count("\n")) == (2, 1), error
        return error.removeprefix("error: ").strip()

    return run


@pytest.mark.parametrize("plus", ["", *(pytest.param(plus, marks=pytest.mark.slow) for plus in ("+", "++"))])
@pytest.mark.parametrize("old", some(KEYS, 3))
def test_an_earlier_key_is_answered_with_todays(refused: Refused, old: str, plus: str) -> None:
    for name in ("train", "ablate") if old == next(iter(OF_RUNS)) else ("train",) if old in OF_RUNS else ("ablate",):
        assert refused(name, f"{plus}{old}=1") == f"{old} is called {KEYS[old]} now"


@pytest.mark.parametrize("old", some([old for old in KEYS if "." in old], 5))
def test_an_earlier_key_without_its_group_is_answered_too(refused: Refused, old: str) -> None:
    name = "train" if old in OF_RUNS else "ablate"
    word = old.rpartition(".")[2]
    assert refused(name, f"{word}=1") == f"{word}: no such key; did you mean {KEYS[old]}?"


@pytest.mark.parametrize(("key", "old", "new"), some(CHOSEN, 3))
def test_an_earlier_choice_is_answered_with_todays(refused: Refused, key: str, old: str, new: str) -> None:
    said = f"{key}={old} is called {key}={new} now"
    assert refused("train", f"{key}={old}") == refused("ablate", "ablation=ffn", f"{key}={old}") == said


@pytest.mark.parametrize("theirs", some(ELSEWHERE, 8))
def test_another_programs_key_is_answered_with_ours(refused: Refused, theirs: str) -> None:
    """By each of the commands that has one of the settings which are suggested."""
    ours = ELSEWHERE[theirs].split(" or ")
    asked = 0
    for name, schema in {"train": RunConfig, "generate": GenerateConfig, "export": ExportConfig}.items():
        known = {one.partition(".")[0] for one in schema.__slots__}
        found = [one for one in ours if one.partition(".")[0] in known]
        if found and theirs not in known:
            asked += 1
            for plus in ("", "+") if theirs != "model" else ("",):  # +model=... would choose from the group
                assert refused(name, f"{plus}{theirs}=x").endswith(f"; did you mean {' or '.join(found)}?")
    assert asked


@pytest.mark.parametrize("theirs", some(["learning_rate", "device", "epochs", "n_embd"], 4))
def test_an_ablation_answers_them_too(refused: Refused, theirs: str) -> None:
    said = refused("ablate", "ablation=smoke", f"{theirs}=1")
    assert said == f"{theirs}: no such key; did you mean {ELSEWHERE[theirs]}?"


@pytest.mark.parametrize(("key", "theirs", "ours"), some(CHOSEN_ELSEWHERE, 3))
def test_another_programs_choice_is_answered_with_ours(refused: Refused, key: str, theirs: str, ours: str) -> None:
    said = f"{key}={theirs}: no such config; did you mean {key}={ours}?"
    assert refused("train", f"{key}={theirs}") == refused("ablate", "ablation=ffn", f"{key}={theirs}") == said


def test_an_ablation_that_nobody_named_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").touch()
    monkeypatch.setattr(sys, "argv", ["ablate.py"])
    error = f"error: output_dir={tmp_path}: holds no ablation; name a new or an empty folder"
    for words in (["ablation=smoke"], ["ablation.name=mine"]):
        with pytest.raises(SystemExit):
            import_module("lm.cli.ablate").main([*words, f"output_dir={tmp_path}"])
        told = ["ablation=smoke is the default; --help lists the others"] * (words != ["ablation=smoke"])
        assert capsys.readouterr().err.splitlines() == [*told, error]


# --- in a user's own YAML


def write(path: Path, settings: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# @package _global_\n" * (path.parent.name == "experiment") + yaml.safe_dump(settings))


def nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


SMOKE = yaml.safe_load((CONFIGS / "ablation/smoke.yaml").read_text())


@pytest.mark.parametrize("old", some(OF_RUNS, 5))
def test_an_earlier_key_in_an_experiment_is_answered(refused: Refused, tmp_path: Path, old: str) -> None:
    write(tmp_path / "my/experiment/mine.yaml", nested(old, 1))
    said = refused("train", "--config-dir", "my", "experiment=mine")
    assert said == f"In 'experiment/mine': {old} is called {KEYS[old]} now"


@pytest.mark.parametrize("old", some(OF_ABLATIONS, 5))
def test_an_earlier_key_in_an_ablation_is_answered(refused: Refused, tmp_path: Path, old: str) -> None:
    write(tmp_path / "my/ablation/mine.yaml", SMOKE | nested(old.removeprefix("ablation."), 1))
    said = refused("ablate", "--config-dir", "my", "ablation=mine")
    assert said == f"In 'ablation/mine': {old} is called {KEYS[old]} now"


@pytest.mark.parametrize("old", some(OF_RUNS, 5))
def test_an_earlier_key_of_an_arm_is_answered(refused: Refused, tmp_path: Path, old: str) -> None:
    write(tmp_path / "my/ablation/mine.yaml", SMOKE | {"arms": {"tied": [], "other": [f"{old}=1"]}, "primary": []})
    said = refused("ablate", "--config-dir", "my", "ablation=mine")
    assert said == f"ablation.arms.other: {old} is called {KEYS[old]} now"


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("ablation.tune.hyperparameters", {"tune": {"trials": 1, "hyperparameters": ["head.table_lr"]}}),
        ("ablation.plot_over", {"plot_over": "head.table_lr"}),
        ("ablation.match_parameters", {"match_parameters": {"untied": "head.table_lr"}}),
    ],
)
def test_an_earlier_key_as_a_value_is_answered(
    refused: Refused, tmp_path: Path, key: str, settings: dict[str, Any]
) -> None:
    write(tmp_path / "my/ablation/mine.yaml", SMOKE | settings)
    said = refused("ablate", "--config-dir", "my", "ablation=mine")
    assert said == f"{key}: head.table_lr is called {KEYS['head.table_lr']} now"


@pytest.mark.parametrize(("key", "old", "new"), CHOSEN)
def test_an_earlier_choice_in_an_experiment_is_answered(
    refused: Refused, tmp_path: Path, key: str, old: str, new: str
) -> None:
    settings = nested(key, old) if "." in key else {"defaults": [{f"override /{key}": old}]}
    write(tmp_path / "my/experiment/mine.yaml", settings)
    said = refused("train", "--config-dir", "my", "experiment=mine")
    assert said.startswith(f"{key}={old} is called {key}={new} now")


def test_an_unquoted_truth_value_as_the_name_of_an_arm_is_explained(refused: Refused, tmp_path: Path) -> None:
    write(tmp_path / "my/ablation/mine.yaml", SMOKE | {"arms": {"tied": [], False: []}})
    assert "write this name in quotes" in refused("ablate", "--config-dir", "my", "ablation=mine")


# --- the tables themselves


def test_every_name_that_is_suggested_exists() -> None:
    register("ablate", AblateConfig)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        ablation = compose("ablate").ablation
    known = {*flat(asdict(RunConfig())), *(f"trainer.{one}" for one in trainer_arguments())}
    known |= {f"ablation.{key}" for key in ablation} | {f"ablation.tune.{key}" for key in ablation.tune}
    known |= {path.name for path in CONFIGS.iterdir()} | set(GenerateConfig.__slots__) | set(ExportConfig.__slots__)
    suggested = {*KEYS.values(), *(one for found in ELSEWHERE.values() for one in found.split(" or "))}
    assert suggested <= known
    assert not set(KEYS) & known
    for group, found in CHOICES_ELSEWHERE.items():
        assert all((CONFIGS / group / f"{name}.yaml").is_file() for name in found.values())


def test_the_changelog_lists_every_renamed_setting() -> None:
    rows = re.findall(r"^  \| `(.+?)` \| `(.+?)` \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    heads = {f"head={old}": f"head={new}" for old, new in CHOICES["head"].items()}
    assert dict(rows) == KEYS | heads
