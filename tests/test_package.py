"""The wheel does what the checkout does, in a folder where the checkout is not."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from conftest import ROOT, TEXT, TINY_RUN
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lm

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def lab(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run the installed lm-lab in a folder of its own: its standard output."""
    site, cwd = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("cwd")
    install = ["pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    (cwd / "my file.txt").write_text(TEXT)
    env = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}

    def run(*words: str, program: str = "lm-lab") -> str:
        done = subprocess.run([program, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import lm; print(lm.__file__)", program=sys.executable) == f"{site}/lm/__init__.py\n"
    return run


@pytest.mark.slow
def test_the_wheel_holds_the_configurations_the_types_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(info).decode())
    files = (path for suffix in ("yaml", "py") for path in (ROOT / "configs").rglob(f"*.{suffix}"))
    configs = {path.relative_to(ROOT).as_posix() for path in files}
    assert {f"lm/{name}" for name in configs} | {"lm/py.typed"} <= names
    assert {name for name in names if name.endswith("/licenses/LICENSE")}
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], lm.__version__)
    assert metadata["License-Expression"] == "MIT"
    assert not {name for name in names if name.startswith(("tests/", "scripts/", "docs/"))}


def test_torch_is_capped() -> None:
    """An open range would pull a newer CUDA build of several gigabytes."""
    (torch,) = (name for name in PROJECT["dependencies"] if name.startswith("torch"))
    assert ",<" in torch


def test_the_tested_versions_are_in_the_ranges_of_the_project() -> None:
    tested = dict(line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines())
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    for requirement in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]):
        assert tested[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.slow
def test_the_installed_command_finds_its_configurations_outside_of_the_checkout(lab: Callable[..., str]) -> None:
    assert "lm-lab train [group=choice]" in lab("train", "--help")
    assert "name: untied" in lab("train", "head=untied", "--cfg", "job")


@pytest.mark.nightly
def test_every_command_runs_outside_of_the_checkout(lab: Callable[..., str]) -> None:
    small = [*TINY_RUN, "data.path=my file.txt"]
    assert "Samples" not in lab("train", *small, "run_dir=run")
    assert "validation loss" in lab("train", "run_dir=run")
    assert lab("generate", "run_dir=run", "prompt=def f", "max_new_tokens=3").startswith("def f")
    assert "loss" in json.loads(lab("evaluate", "run_dir=run"))
    few = [*small, "tokenizer.vocab_size=null", "trainer.max_steps=4", "ablation.seeds=[0,1]"]
    lab("ablate", "ablation=smoke", *few, "output_dir=out")
    read = "import pathlib, sys; print(pathlib.Path(sys.argv[1]).read_text())"
    record = json.loads(lab("-c", read, "out/ablation.json", program=sys.executable))
    assert record["command"].startswith("lm-lab ablate ablation=smoke")
    lab("report", "output_dir=out")
    assert "lm-lab report output_dir=out" in lab("-c", read, "out/report.html", program=sys.executable)
    assert "AutoModelForCausalLM" in lab("export", "run_dir=run", "output_dir=exported")
    assert "run" in lab("runs", "folder=.")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv, which resolves to the lowest versions")
def test_the_lowest_versions_that_are_allowed_suffice(tmp_path: Path) -> None:
    """Set UV_TORCH_BACKEND=cpu, or a constraint, to do without the CUDA build of torch."""

    def run(*words: str | Path) -> str:
        done = subprocess.run([*map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python = tmp_path / "venv/bin/python"
    run("uv", "venv", "--python", sys.executable, tmp_path / "venv")
    run("uv", "pip", "install", "--python", python, "--resolution", "lowest-direct", ROOT)
    (tmp_path / "my file.txt").write_text(TEXT)
    run(python, "-m", "lm", "train", *TINY_RUN, "data.path=my file.txt", "run_dir=run")
    assert run(python, "-m", "lm", "generate", "run_dir=run", "prompt=def f", "max_new_tokens=3").startswith("def f")
    run(python, "-m", "lm", "ablate", "ablation=smoke", *TINY_RUN, "data.path=my file.txt", "tokenizer.vocab_size=null",
        "ablation.seeds=[0,1]", "output_dir=out")  # fmt: skip
    run(python, "-m", "lm", "export", "run_dir=run", "output_dir=exported")
