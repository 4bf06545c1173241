"""The wheel does what the checkout does, in a folder where the checkout is not."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from conftest import ROOT, TEXT, TINY_RUN
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lm

pytestmark = pytest.mark.slow
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install = ["pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    return folder


def test_the_wheel_holds_the_configurations_the_types_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
        info = next(name for name in there if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(info).decode())
    found = (path for suffix in ("yaml", "py") for path in (ROOT / "configs").rglob(f"*.{suffix}"))
    configs = {path.relative_to(ROOT).as_posix() for path in found}
    assert {f"lm/{name}" for name in configs} | {"lm/py.typed"} <= there
    assert {name for name in there if name.endswith("/licenses/LICENSE")}
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], lm.__version__)
    assert metadata["License-Expression"] == "MIT"
    assert not {name for name in there if name.startswith(("tests/", "scripts/", "docs/"))}


def test_torch_is_capped() -> None:
    """An open range would pull a newer CUDA build of several gigabytes."""
    (torch,) = (one for one in PROJECT["dependencies"] if one.startswith("torch"))
    assert ",<" in torch


def test_the_tested_versions_are_in_the_ranges_of_the_project() -> None:
    tested = dict(line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines())
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    for one in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]):
        assert tested[canonicalize_name(one.name)] in one.specifier, one


def test_every_command_runs_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my file.txt").write_text(TEXT)
    env = {**os.environ, "PYTHONPATH": str(installed), "PATH": f"{installed / 'bin'}:{os.environ['PATH']}"}

    def lab(*words: str) -> subprocess.CompletedProcess[str]:
        found = subprocess.run(
            ["lm-lab", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert found.returncode == 0, found.stderr
        return found

    where = "import lm, lm.cli.mistakes; print(lm.__file__, lm.cli.mistakes.CONFIGS)"
    asked = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert asked.stdout.split() == [str(installed / "lm/__init__.py"), str(installed / "lm/configs")]
    small = [*TINY_RUN, "data.path=my file.txt"]
    assert "Samples" not in lab("train", *small, "run_dir=run").stdout
    assert "validation loss" in lab("train", "run_dir=run").stdout
    assert lab("generate", "run_dir=run", "prompt=def f", "max_new_tokens=3").stdout.startswith("def f")
    assert "loss" in json.loads(lab("evaluate", "run_dir=run").stdout)
    few = [*small, "tokenizer.vocab_size=null", "trainer.max_steps=4", "ablation.seeds=[0,1]"]
    lab("ablate", "ablation=smoke", *few, "output_dir=out")
    assert json.loads((tmp_path / "out/ablation.json").read_text())["command"].startswith(
        "lm-lab ablate ablation=smoke"
    )
    (tmp_path / "out/report.md").unlink()
    lab("report", "output_dir=out")
    assert "lm-lab report output_dir=out" in (tmp_path / "out/report.html").read_text()
    lab("export", "run_dir=run", "output_dir=exported")
    left = {"run/result.json", "run/model/model.safetensors", "out/report.md", "out/report.html", "out/results.csv"}
    left |= {"out/report.json", "exported/config.json", "exported/model.safetensors"}
    assert {name for name in left if not (tmp_path / name).is_file()} == set()
    assert "lm-lab train [group=choice]" in lab("train", "--help").stdout
