"""What a command says of names that it was not given, or that YAML has read as something else."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.cli.errors import CONFIGS

Refused = Callable[..., str]


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


def write(path: Path, settings: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# @package _global_\n" * (path.parent.name == "experiment") + yaml.safe_dump(settings))


SMOKE = yaml.safe_load((CONFIGS / "ablation/smoke.yaml").read_text())


def test_an_unquoted_truth_value_as_the_name_of_an_arm_is_explained(refused: Refused, tmp_path: Path) -> None:
    write(tmp_path / "my/ablation/mine.yaml", SMOKE | {"arms": {"tied": [], False: []}})
    assert "write this name in quotes" in refused("ablate", "--config-dir", "my", "ablation=mine")
