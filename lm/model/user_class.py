"""Classes of the user, each named by its dotted path in a setting of the model."""

import ast
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from torch import nn

from lm.config import ModelConfig, foreign_classes
from lm.errors import UserError
from lm.system.code import code_of


def import_class(key: str, path: str) -> type[nn.Module]:
    """Return the class at the dotted path that the setting `key` names, such as `torch.nn.Linear`.

    Search the current folder last. Raises UserError if the path leads to no subclass of nn.Module.
    """
    module, _, name = path.rpartition(".")
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a module runs its code
        raise UserError(f"{key}={path}: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f"{key}={path}: is no class of modules; expected a subclass of torch.nn.Module")
    return cls


def construct(key: str, path: str, *args: Any, **options: Any) -> nn.Module:
    """Return an object of the class that the setting `key` names. Raises UserError with the error of the class."""
    cls = import_class(key, path)
    try:
        return cls(*args, **options)
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"{key}={path}: {type(error).__name__}: {error}") from error


def named_classes(config: ModelConfig) -> str:
    """Return the classes of the user as settings, such as `model.ffn=mine.ReGLU`."""
    return ", ".join(f"{key}={path}" for key, path in foreign_classes(config).items())


@contextmanager
def blaming_classes(config: ModelConfig) -> Iterator[None]:
    """Turn an error of a model with classes of the user into a UserError that names these classes."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if not foreign_classes(config):
            raise
        raise UserError(f"{named_classes(config)}: {type(error).__name__}: {error}") from error


def check_classes(config: ModelConfig, classes: Sequence[str]) -> None:
    """Raise UserError if the settings of a model folder name a class that is not among `classes`, dotted paths.

    Import nothing, because the import of a module runs its code.
    """
    paths = foreign_classes(config).values()
    if not {*paths} <= {*classes}:
        advice = f"'classes=[{','.join(dict.fromkeys(paths))}]' imports it, if you trust it"
        raise UserError(f"{named_classes(config)}: is code of the model's author; {advice}")


# --- the code of the user's classes, with what it imports from the user's own files


def sources_of(classes: Mapping[str, str]) -> dict[str, str | None]:
    """Return, by module, the code of classes of the user (setting -> dotted path) and of their local imports.

    The code is without comments, docstrings and layout. It is None for a module without a source file.
    """
    files: dict[str, str | None] = {}
    for key, dotted in classes.items():
        for module in {import_class(key, dotted).__module__, dotted.rpartition(".")[0]}:
            source = str(getattr(sys.modules[module], "__file__", None))
            is_source = source.endswith(".py")
            files |= {module: source, **_local_imports(module)} if is_source else {module: None}
    return {name: file and code_of(Path(file).read_text(encoding="utf-8")) for name, file in sorted(files.items())}


def _local_imports(module: str) -> dict[str, str]:
    """Return, by name, the files of a module and of all that it imports, outside of installed packages and of lm."""
    files, names = dict[str, str](), [module]
    while names:
        name = names.pop()
        if name in files or not _is_local(name.partition(".")[0]):
            continue
        spec = _spec_of(name)
        if spec and spec.origin and spec.origin.endswith(".py"):
            files[name] = spec.origin
            names += _imported(Path(spec.origin), spec.parent or "")
            names += [spec.parent] if spec.parent else []
    return files


def _spec_of(name: str) -> ModuleSpec | None:
    """Return where a module comes from, or None if a name is no module. Imports the packages that hold the module."""
    try:
        return find_spec(name)
    except (ImportError, ValueError):
        return None


def _is_local(package: str) -> bool:
    """Return whether a package is neither lm nor installed. Imports nothing: an installed package may be large."""
    spec = _spec_of(package)
    if package == "lm" or spec is None:
        return False
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places = [Path(place).absolute() for place in (spec.submodule_search_locations or [str(spec.origin)])]
    return not any(place.is_relative_to(folder) for place in places for folder in installed)


def _imported(source: Path, package: str) -> Iterator[str]:
    """Yield what a file may import: modules, and names that may be modules."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
