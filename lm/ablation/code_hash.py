"""A hash of the code that a run's numbers depend on: without comments, docstrings and layout.

It is the same wherever the code is installed. Another version of Python may give another hash for the same code, since
it may write a syntax tree anew in another way.
"""

import ast
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

from lm.config import UserError
from lm.model.user_class import import_class

HOME = Path(__file__).parents[1]
COVERED = ("data/*.py", "model/*.py", "training/*.py", "inference/evaluate.py")  # the last one scores a run


def code_hash(classes: Mapping[str, str] = MappingProxyType({})) -> str:
    """SHA-256 of the files of lm that decide a run, and of the modules of these classes with their local imports.

    `classes` are those of the user's own, setting -> dotted path. An import is local if it lies neither in the standard
    library nor where packages are installed. Raises UserError if such a class has no source file.
    """
    files = {f"{path.parent.name}/{path.name}": path for pattern in COVERED for path in HOME.glob(pattern)}
    for key, dotted in classes.items():
        module = import_class(key, dotted).__module__
        for name in {module, dotted.rpartition(".")[0]}:
            if _source(name) is None:
                raise UserError(f"{key}={dotted}: {name} has no source file, so its changes could not be noticed")
            files |= _local_imports(name)
    digests = {name: _digest(path, path.stat().st_mtime_ns) for name, path in sorted(files.items())}
    return hashlib.sha256(repr(digests).encode()).hexdigest()


@cache
def _digest(path: Path, modified: int) -> str:
    tree = _parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}: {error}; expected Python") from error


def _local_imports(module: str) -> dict[str, Path]:
    """The source files of a module and of all local modules that it imports, directly or not, by name."""
    ahead, files = [module], dict[str, Path]()
    while ahead:
        name = ahead.pop()
        if name not in files and (path := _source(name)) and (name == module or _is_local(name)):
            files[name] = path
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            ahead += _imported_names(_parse(path), package)
    return files


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules, the packages around them, and what is taken from them, which may be modules too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def _source(module: str) -> Path | None:
    with suppress(ImportError, ValueError, AttributeError):  # also where the name is no module
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
    return None


def _is_local(module: str) -> bool:
    path = _source(module)
    if path is None or path.is_relative_to(sysconfig.get_path("stdlib")) or path.is_relative_to(HOME):
        return False
    return not {"site-packages", "dist-packages"} & {*path.parts}
