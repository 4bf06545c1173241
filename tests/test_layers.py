"""The two layers: the core imports nothing of the lab, runs without it, and starts light."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lm
from tests.helpers.tiny import TEXT, TINY_RUN

ROOT = Path(lm.__file__).parent
# A package of the core imports the packages in front of it, and what stands in the same set.
CORE = [
    {"errors", "registry"},
    {"config"},
    {"system"},
    {"data", "model"},
    {"folder"},
    {"decoding", "scoring"},
    {"training"},
    {"cli"},
]


def imported_modules(path):
    """Return the modules that a file imports, also inside of functions; not for the type checker alone."""
    tree, names = ast.parse(path.read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_a_package_of_the_core_imports_only_the_packages_in_front_of_it_and_nothing_of_the_lab():
    for path in sorted(ROOT.rglob("*.py")):
        if path.is_relative_to(ROOT / "lab"):
            continue
        imported = imported_modules(path)
        assert not [name for name in imported if name.startswith("lm.lab")], path
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        level = next((i for i, names in enumerate(CORE) if package in names), None)
        if level is None:  # __init__, __main__ and results are indexes
            continue
        allowed = set().union(*CORE[: level + 1])
        named = {name.split(".")[1] for name in imported if name.startswith("lm.")}
        assert named <= allowed, f"{path}: {named - allowed}"
        if package == "model":
            assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names <= {"torch", "lm"}, path


@pytest.mark.slow
def test_the_core_trains_generates_and_evaluates_without_the_lab(tmp_path):
    for name in ("lm", "configs", "scripts"):
        shutil.copytree(ROOT.parent / name, tmp_path / name, ignore=shutil.ignore_patterns("lab", "__pycache__"))
    (tmp_path / "my.txt").write_text(TEXT)
    for command, *words in (
        ["train", *TINY_RUN, "prompts=null", "data.path=my.txt", "run_dir=run"],
        ["generate", "run", "def f", "max_new_tokens=4"],
        ["evaluate", "run", "my.txt"],
    ):
        subprocess.run([sys.executable, f"scripts/{command}.py", *words], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        {
            "lm, lm.lab.ablation.question, lm.training.run_directory": "torch hydra lightning_fabric numpy datasets",
            "lm.lab.commands.runs": "torch lightning_fabric numpy matplotlib scipy datasets",
            "lm.lab.results, lm.lab.runs.listing, lm.lab.ablation.rows": "torch hydra lightning_fabric datasets",
            "lm.cli.train, lm.cli.generate, lm.lab.commands.ablate": "torch lightning_fabric datasets",
        },
        {"lm.decoding, lm.folder, lm.lab.ablation.report": "hydra lightning_fabric datasets"},
    ],
)
def test_what_is_light_stays_light(steps):
    """Modules that a process imports one after the other -> what the process has not imported after each."""
    code = "import sys\n" + "".join(f"import {modules}\nprint(*sys.modules)\n" for modules in steps)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for (modules, absent), imported in zip(steps.items(), answer.stdout.splitlines(), strict=True):
        assert {*absent.split()} & {*imported.split()} == set(), modules
