"""Which code a run's numbers depend on: a hash of each file, without comments, docstrings and layout.

The hashes are the same wherever the code is installed. Another Python may give others for the same code, as 3.12 does
after 3.11: it writes the syntax tree anew.
"""

import ast
import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType

from lm.config import UserError
from lm.model.user_class import import_class

HOME = Path(__file__).parents[3]
NAMES = "names, checks and hashes of settings; their values are in the hash of a run's configuration"
FILES = "writes and reads what a run leaves; no number of a later step comes from it"
TEXT = "continues prompts, which leaves weights and random numbers as they are"
NOT_COUNTED = {  # modules that training imports and that cannot change its numbers -> why
    "lm": "names of the package",
    **dict.fromkeys(("lm.config", "lm.config.checks", "lm.config.commands", "lm.config.identity"), NAMES),
    "lm.config.typed": NAMES,
    "lm.system.files": FILES,
    **dict.fromkeys(("lm.training.metrics", "lm.training.run_directory"), FILES),
    **dict.fromkeys(("lm.inference.decode", "lm.inference.generate", "lm.inference.prompt_lookup"), TEXT),
    **dict.fromkeys(("lm.inference.sampling", "lm.training.samples"), TEXT),
}
VERSIONED = {"torch"}  # its version stands in every result


def source_hash(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def source_files(classes: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """File -> hash: lm/training/train.py and every module of this project that it imports, directly or not.

    `classes` are the classes of the user's own, setting -> dotted path: their modules count too, and every module that
    these import from their own packages or from where nothing is installed, such as the current directory. Files are
    named as they are imported, as in lm/model/head.py. Raises UserError if such a class has no source file.
    """
    found = reached(["lm.training.train"], lambda top: top == "lm")
    modules = {}
    for key, path in classes.items():
        for module in (import_class(key, path).__module__, path.rpartition(".")[0]):
            if file_of(module) is None:
                raise UserError(f"{key}={path}: {module} has no source file, so its changes could not be noticed")
            modules[module] = module.partition(".")[0]
    packages = {*modules.values(), "lm"}
    found |= reached(modules, lambda top: top not in VERSIONED and (top in packages or not installed(top)))
    return {name: digest(path, path.stat().st_mtime_ns) for name, path in sorted(found.items())}


def reached(modules: Iterable[str], counts: Callable[[str], bool]) -> dict[str, Path]:
    """The files of these modules and of all that they import, directly or not, from packages that count, by name."""
    ahead, seen, found = [*modules], {*NOT_COUNTED}, dict[str, Path]()
    while ahead:
        if (module := ahead.pop()) not in seen and (path := file_of(module)):
            is_package = path.stem == "__init__"
            found[module.replace(".", "/") + "/__init__" * is_package + path.suffix] = path
            package = module if is_package else module.rpartition(".")[0]
            named = imported(path, package, path.stat().st_mtime_ns) if path.suffix == ".py" else set()
            ahead += [name for name in named if counts(name.partition(".")[0])]
        seen.add(module)
    return found


def file_of(module: str) -> Path | None:
    """Where a module lies; None if there is none, or no file. It is not imported."""
    spec = place(module)
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def place(module: str) -> ModuleSpec | None:
    top, *names = module.split(".")
    try:
        spec = PathFinder.find_spec(top, [str(HOME)]) if top == "lm" else importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module that was made by hand
        return None
    for name in names:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    return spec


def installed(top: str) -> bool:
    """Whether a package or module is of Python itself, or lies where a package manager puts what has a version."""
    spec = place(top)
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        return True
    first = [*(spec.submodule_search_locations or []), spec.origin][0]
    folder = Path(str(first)).parent
    return (
        folder.is_relative_to(sysconfig.get_path("stdlib"))
        or not {"site-packages", "dist-packages"}.isdisjoint(folder.parts)
        or any(folder.glob("*.dist-info"))
    )


@cache
def digest(path: Path, changed: int) -> str:
    if path.suffix != ".py":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    tree = parsed(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


@cache
def imported(path: Path, package: str, changed: int) -> set[str]:
    """Names of modules, of the packages around them, and of what is taken from them, which may be modules too."""
    split = [name.split(".") for node in ast.walk(parsed(path)) for name in names_in(node, package)]
    return {".".join(parts[:n]) for parts in split for n in range(1, len(parts) + 1)}


def parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}: {error}; expected Python") from error


def names_in(node: ast.AST, package: str) -> Iterator[str]:
    """Of import a, from .a import b, import_module("a") and __import__("a")."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = absolute("." * node.level + (node.module or ""), package)
        yield from (f"{module}.{one.name}".lstrip(".") for one in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.args[0].value
        if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__") and isinstance(name, str):
            yield absolute(name, package)


def absolute(name: str, package: str) -> str:
    """
    >>> absolute(".scale", "kit.layers"), absolute("..scale", "kit.layers"), absolute(".scale", "")
    ('kit.layers.scale', 'kit.scale', 'scale')
    """
    level = len(name) - len(name.lstrip("."))
    above = package.split(".")[: package.count(".") + 2 - level] if level else []
    return ".".join([*above, name[level:]]).strip(".")
