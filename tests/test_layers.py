"""The layers of the package: what may import what, and what stays light."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lm

ROOT = Path(lm.__file__).parent
LAYERS = [  # a package imports from those before it
    {"config"},
    {"system"},
    {"data", "model", "report"},
    {"formats"},
    {"inference"},
    {"training"},
    {"ablation"},
    {"results", "runs"},
    {"look"},
    {"cli"},
]


@cache
def imports(path: Path) -> set[str]:
    """The modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_a_package_imports_only_from_the_layers_below() -> None:
    for path in sorted(ROOT.glob("*/**/*.py")):
        package = path.relative_to(ROOT).parts[0]
        level = next(i for i, layer in enumerate(LAYERS) if package in layer)
        below = {package}.union(*LAYERS[:level])
        names = {name.split(".")[1] for name in imports(path) if name.startswith("lm.")}
        assert names <= below, f"{path}: {names - below} are not below {package}"
        if package == "model":
            outside = {name.partition(".")[0] for name in imports(path)} - sys.stdlib_module_names
            assert outside <= {"torch", "lm"}, path


def test_no_modules_import_each_other() -> None:
    """Also not inside functions."""
    for package in ("config", "system", "data", "report", "formats", "inference", "training", "look"):
        modules = {f"lm.{package}.{path.stem}": imports(path) for path in (ROOT / package).glob("*.py")}
        TopologicalSorter({name: names & modules.keys() for name, names in modules.items()}).prepare()


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        {
            "lm, lm.lab.ablation.settings, lm.training.run_directory": "torch hydra lightning numpy datasets",
            "lm.lab.commands.runs": "torch lightning numpy matplotlib scipy datasets",
            "lm.lab.results, lm.lab.runs.listing, lm.lab.ablation.rows": "torch hydra lightning datasets",
            "lm.cli.train, lm.cli.generate, lm.lab.commands.ablate": "torch lightning datasets",
        },
        {"lm.decoding, lm.formats.folder, lm.lab.ablation.report": "hydra lightning datasets"},
    ],
)
def test_what_is_light_stays_light(steps: dict[str, str]) -> None:
    """Modules that a process imports one after the other -> what it has not imported after each."""
    code = "import sys\n" + "".join(f"import {modules}\nprint(*sys.modules)\n" for modules in steps)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for (modules, absent), imported in zip(steps.items(), answer.stdout.splitlines(), strict=True):
        assert {*absent.split()} & {*imported.split()} == set(), modules


def test_public_names_are_no_modules() -> None:
    """A file of the same name as a function would hide it."""
    assert {path.stem for path in ROOT.iterdir()} & {*lm.__all__} == set()


def test_sizes_are_at_most_ten_per_cent_above_the_table_in_contributing() -> None:
    def lines(path: Path) -> int:
        return len(path.read_text().splitlines())

    sources = sorted(ROOT.rglob("*.py"))
    functions = (node for path in sources for node in ast.walk(ast.parse(path.read_text())))
    top = ROOT.parent
    sizes = {
        "`lm/`": sum(map(lines, sources)),
        "`lm/model/`": sum(map(lines, ROOT.glob("model/*.py"))),
        "a file in `lm/`": max(map(lines, sources)),
        "a function in `lm/`": max(
            (node.end_lineno or 0) - node.lineno + 1 for node in functions if isinstance(node, ast.FunctionDef)
        ),
        "`tests/`": sum(map(lines, (top / "tests").rglob("*.py"))),
        "`docs/` without studies": sum(map(lines, (top / "docs").glob("*.md"))),
    }
    print(*(f"{name}: {size:,}" for name, size in sizes.items()), sep="\n")
    rows = re.findall(r"^\| (.+) \| ([\d,]+) \|$", (top / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    limits = {name: int(limit.replace(",", "")) for name, limit in rows}
    assert limits.keys() == sizes.keys()
    assert [name for name, size in sizes.items() if size > 1.1 * limits[name]] == []
