"""Classes of the user, each named by its dotted path in a setting of the model."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from lm.config import ModelConfig, foreign_classes
from lm.errors import UserError


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


def check_classes(config: ModelConfig, classes: Sequence[type | str]) -> None:
    """Raise UserError if the settings of a model folder name a class that is not among `classes`.

    Import nothing, because the import of a module runs its code. A path matches a class by the module and qualified
    name of the class, or by the name under which an imported module holds the class.
    """
    named = foreign_classes(config)
    if any(not _is_among(path, classes) for path in named.values()):
        what = ", ".join(f"{key}={path}" for key, path in named.items())
        wanted = ",".join(dict.fromkeys(named.values()))
        raise UserError(f"{what}: is code of the model's author; 'classes=[{wanted}]' imports it, if you trust it")


def _is_among(path: str, classes: Sequence[type | str]) -> bool:
    module, _, name = path.rpartition(".")
    held = vars(sys.modules.get(module, nn)).get(name)
    names = [item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}" for item in classes]
    return path in names or (held is not None and any(held is item for item in classes))
