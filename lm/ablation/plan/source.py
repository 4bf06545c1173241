"""Which code a run's numbers depend on."""

import ast
import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from lm.model.linear import LINEARS, linear_class

HOME = Path(__file__).parents[3]
NOT_COUNTED = {  # imported by training, but they only record, restore or show; settings are in a run's own hash
    *("lm/config", "lm/system/files", "lm/inference/decode", "lm/exchange/portable", "lm/exchange/find_model"),
    *(f"lm/training/{name}" for name in ("checkpoint", "diagnostics", "metrics", "run_directory")),
}


def source_hash(linear: str = "linear") -> str:
    """Of the code that a run's numbers depend on, without comments, docstrings and layout.

    `linear` is the config's model.linear: a class of the user's own counts with all of its file. Another Python may
    give another hash for the same code, as 3.12 does after 3.11: it writes the tree, and the standard library, anew.
    """
    paths = training_files()
    if linear not in LINEARS:
        paths.append(Path(inspect.getfile(linear_class(linear))))
    digest = hashlib.sha256()
    for path in paths:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        digest.update(f"{path.name}\n{ast.unparse(tree)}".encode())
    return digest.hexdigest()


def training_files() -> list[Path]:
    """lm/training/train.py and every module of this project that it imports, directly or not, but for NOT_COUNTED."""
    found, ahead = set(), [HOME / "lm/training/train.py"]
    while ahead:
        path = ahead.pop()
        if path not in found and path.exists() and not counted_out(path):
            found.add(path)
            ahead += (HOME / f"{name.replace('.', '/')}.py" for name in imported(path))
    return sorted(found)


def counted_out(path: Path) -> bool:
    name = path.relative_to(HOME).with_suffix("").as_posix()
    return any(name == one or name.startswith(f"{one}/") for one in NOT_COUNTED)


def imported(path: Path) -> Iterator[str]:
    """Names of modules, and of what is taken from them, which may be modules too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{one.name}" for one in node.names))
