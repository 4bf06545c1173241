"""The house has floors: a module imports only from its own floor or a lower one, and a low floor stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lm

ROOT = Path(lm.__file__).parent.parent
FLOORS = [  # lowest first; a module imports from its own room and from the floors below
    ["lm", "lm.config"],
    ["lm.system"],
    ["lm.report"],
    ["lm.data", "lm.model"],
    ["lm.exchange"],
    ["lm.inference"],
    ["lm.training"],
    ["lm.ablation.versions"],
    ["lm.ablation.checks"],
    ["lm.ablation.record", "lm.ablation.run_files", "lm.ablation.duration"],
    ["lm.ablation.outcomes"],
    ["lm.ablation.seen"],
    ["lm.ablation.plan", "lm.ablation.judge"],
    ["lm.ablation.run", "lm.ablation.report"],
    ["lm.ablation", "lm.runs"],
    ["lm.benchmark", "lm.results"],
    ["lm.cli"],
    ["scripts", "lm.__main__"],
]
SOURCES = sorted([*(ROOT / "lm").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
HEAVY = {"torch", "hydra", "omegaconf", "lightning", "numpy", "datasets", "tokenizers"}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(name: str) -> str:
    """The room that a module stands in: the longest name in FLOORS that its own name begins with."""
    found = [one for rooms in FLOORS for one in rooms if name == one or name.startswith(f"{one}.")]
    if name.startswith("lm."):
        found = [one for one in found if one != "lm"]
    assert found, f"{name} has no room yet: add it to FLOORS"
    return max(found, key=len)


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room(name) in rooms)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions; not what is there for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            modules = [f"{node.module}.{one.name}" for one in node.names] if node.module == "lm" else [str(node.module)]
            found.update(modules)
        elif isinstance(node, ast.Import):
            found.update(one.name for one in node.names)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_a_module_imports_only_from_its_floor_or_below(path: Path) -> None:
    ours, here = {name for name in imports(path) if name.split(".")[0] in ("lm", "scripts")}, module(path)
    assert {name for name in ours if room(name) != room(here) and floor(name) >= floor(here)} == set()


@pytest.mark.parametrize("path", [path for path in SOURCES if room(module(path)) == "lm.model"], ids=module)
def test_the_model_needs_torch_and_nothing_else(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"torch"}
    others = {name for name in imports(path) if name.split(".")[0] not in allowed}
    assert all(name.startswith(("lm.config", "lm.model")) for name in others), others


def test_only_the_command_line_and_the_builders_of_lightnings_objects_know_hydra() -> None:
    knowing = {
        module(path) for path in SOURCES if {"hydra", "omegaconf"} & {one.split(".")[0] for one in imports(path)}
    }
    assert {name for name in knowing if room(name) != "lm.cli"} == {"lm.training.trainer", "lm.training.loggers"}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=module)
def test_a_room_says_in_a_few_lines_what_it_is_for(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text()))
    assert said, "the docstring is missing"
    assert len(said.splitlines()) <= 6


def loaded(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(found.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import lm",
        "import lm.config; lm.config.RunConfig(); from lm import BadInput",
        "import lm.system.files, lm.system.terminal, lm.training.run_directory",
        "import lm.config.ablation",
    ],
)
def test_a_low_floor_loads_nothing_heavy(statement: str) -> None:
    assert HEAVY & loaded(statement) == set()


def test_the_command_line_is_read_before_anything_heavy_is_loaded() -> None:
    commands = ", ".join(f"lm.cli.{path.stem}" for path in (ROOT / "scripts").glob("*.py"))
    assert HEAVY & loaded(f"import {commands}") == {"hydra", "omegaconf"}


def test_a_model_runs_and_an_ablation_is_planned_without_lightning_hydra_or_datasets() -> None:
    found = loaded("import lm.inference.generate, lm.exchange.portable, lm.data.tokens, lm.ablation.summary")
    assert {"hydra", "omegaconf", "lightning", "datasets"} & found == set()
    assert "torch" in found


def test_results_are_read_without_torch() -> None:
    assert HEAVY & loaded("import lm.results") == {"numpy"}


def test_public_names_are_what_they_say() -> None:
    """Whatever else has been imported: a file of the same name as a function would hide it."""
    code = "import lm; [getattr(lm, name) for name in lm.__all__]; import inspect\n"
    code += "assert not [name for name in lm.__all__ if inspect.ismodule(getattr(lm, name))]"
    subprocess.run([sys.executable, "-c", code], check=True)
