"""Which code a run's numbers depend on: a hash of each file, without comments, docstrings and layout.

Another Python may give other hashes for the same code, as 3.12 does after 3.11: it writes the syntax tree anew.
"""

import ast
import hashlib
import inspect
import json
import sysconfig
from functools import cache
from pathlib import Path

from lm.model.projection import LINEARS, linear_class

HOME = Path(__file__).parents[3]
NOT_COUNTED = {  # imported by training, but they only record, restore or show; settings are in a run's own hash
    *("lm/__init__", "lm/config", "lm/system/files", "lm/exchange"),
    *(f"lm/inference/{name}" for name in ("decode", "details", "generate")),
    *(f"lm/training/{name}" for name in ("checkpoint", "diagnostics", "metrics", "run_directory", "samples")),
}


def source_hash(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def source_files(linear: str = "linear") -> dict[str, str]:
    """File -> hash: lm/training/train.py and every module of this project that it imports, directly or not.

    `linear` is the config's model.linear: for a class of the user's own, its module counts too, and every module in
    its folder, or in its package, that it imports. Files are named as they are imported, as in lm/model/ffn.py.
    """
    found = {path.relative_to(HOME).as_posix(): path for path in reached([HOME / "lm/training/train.py"], HOME)}
    if linear not in LINEARS:
        module, file = linear_class(linear).__module__, Path(inspect.getfile(linear_class(linear)))
        root = file.parents[module.count(".") + (file.stem == "__init__")]
        own = [file, *files_of(linear.rpartition(".")[0], root)]
        if "site-packages" not in file.parts and not file.is_relative_to(sysconfig.get_path("stdlib")):
            own = reached(own, root)  # what is installed has a version instead
        found |= {path.relative_to(root).as_posix(): path for path in own}
    return {name: digest(path, path.stat().st_mtime_ns) for name, path in sorted(found.items())}


@cache
def digest(path: Path, changed: int) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def reached(ahead: list[Path], root: Path) -> list[Path]:
    """These files and all that they import from below `root`, directly or not, but for NOT_COUNTED."""
    found: set[Path] = set()
    while ahead:
        path = ahead.pop()
        if path not in found and not counted_out(path):
            found.add(path)
            ahead += [file for name in imported(path, root, path.stat().st_mtime_ns) for file in files_of(name, root)]
    return sorted(found)


def files_of(module: str, root: Path) -> list[Path]:
    place = root / module.replace(".", "/")
    return [path for path in (place.with_name(f"{place.name}.py"), place / "__init__.py") if path.exists()]


def counted_out(path: Path) -> bool:
    name = path.relative_to(HOME).with_suffix("").as_posix() if path.is_relative_to(HOME) else ""
    return any(name == one or name.startswith(f"{one}/") for one in NOT_COUNTED)


@cache
def imported(path: Path, root: Path, changed: int) -> set[str]:
    """Names of modules, of the packages around them, and of what is taken from them, which may be modules too."""
    package, names = path.relative_to(root).parent.parts, []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{one.name}".lstrip(".") for one in node.names)]
    split = [name.split(".") for name in names if name]
    return {".".join(parts[:n]) for parts in split for n in range(1, len(parts) + 1)}
