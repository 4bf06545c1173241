"""The house has floors: a module imports only from its own floor or a lower one, and a low floor stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lm

ROOT = Path(lm.__file__).parent.parent
FLOORS = [  # lowest first
    {"lm", "lm.config"},
    {"lm.model"},
    {
        "lm.bare",
        "lm.batches",
        "lm.corpus",
        "lm.data",
        "lm.device",
        "lm.files",
        "lm.decode",
        "lm.lookup",
        "lm.documents",
        "lm.loss",
        "lm.muon",
        "lm.optim",
        "lm.portable",
        "lm.run",
    }
    | {"lm.rows", "lm.table", "lm.tokenizer"},
    {
        "lm.architectures",
        "lm.callbacks",
        "lm.checkpoint",
        "lm.diagnostics",
        "lm.evaluate",
        "lm.export",
        "lm.metrics",
        "lm.task",
        "lm.train",
        "lm.trainer",
    },
    {"lm.ablation", "lm.benchmark"},
    {"lm.cli", "lm.errors", "lm.imports"},
    {"scripts"},
]
SOURCES = sorted([*(ROOT / "lm").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
HEAVY = {"torch", "hydra", "omegaconf", "lightning", "numpy", "datasets", "tokenizers"}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(name: str) -> int:
    """The floor of a module; the modules of a package stand on the package's."""
    place = ".".join(name.split(".")[: 1 if name.startswith("scripts") else 2])
    found = [i for i, names in enumerate(FLOORS) if place in names]
    assert found, f"{name} has no floor yet: add it to FLOORS"
    return found[0]


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
    ours = {name for name in imports(path) if name.split(".")[0] in ("lm", "scripts")}
    assert {name for name in ours if floor(name) > floor(module(path))} == set()


@pytest.mark.parametrize("path", [path for path in SOURCES if floor(module(path)) == 1], ids=module)
def test_the_model_needs_torch_and_nothing_else(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"torch"}
    others = {name for name in imports(path) if name.split(".")[0] not in allowed}
    assert all(name == "lm.config" or name.startswith("lm.model") for name in others), others


def test_only_the_command_line_and_the_composition_root_know_hydra() -> None:
    knowing = {
        module(path) for path in SOURCES if {"hydra", "omegaconf"} & {one.split(".")[0] for one in imports(path)}
    }
    assert knowing == {"lm.cli", "lm.errors", "lm.trainer"}


def loaded(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(found.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import lm",
        "import lm.config; lm.config.RunConfig()",
        "import lm.files, lm.table, lm.run",
        "import lm.ablation.config",
        "from lm import BadInput",
    ],
)
def test_a_low_floor_loads_nothing_heavy(statement: str) -> None:
    assert HEAVY & loaded(statement) == set()


def test_the_command_line_is_read_before_anything_heavy_is_loaded() -> None:
    assert HEAVY & loaded("import lm.cli, lm.corpus") == {"hydra", "omegaconf"}


def test_a_model_runs_without_lightning_hydra_or_datasets() -> None:
    found = loaded("import lm.decode, lm.portable, lm.data, lm.optim")
    assert {"hydra", "omegaconf", "lightning", "datasets"} & found == set()
    assert "torch" in found


def test_public_names_are_what_they_say() -> None:
    """Whatever else has been imported: a file of the same name as a function would hide it."""
    code = "import lm; [getattr(lm, name) for name in lm.__all__]; import inspect\n"
    code += "assert not [name for name in lm.__all__ if inspect.ismodule(getattr(lm, name))]"
    subprocess.run([sys.executable, "-c", code], check=True)
