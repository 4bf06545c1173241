"""Classes of the user's own, which a setting of the model names by their dotted path."""

import importlib
import inspect
import sys
from typing import Any

from torch import nn

from lm.config import UserError

_Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # how a class is called, and an example of the arguments
_CALLS: dict[str, _Call] = {
    "model.linear": ("cls(in_features, out_features, bias=...)", (1, 1), {"bias": True}),
    "model.norm": ("cls(width, eps=...)", (1,), {"eps": 1e-5}),
    "model.ffn": ("cls(config)", (None,), {}),
    "model.position": ("cls(config, seq_len)", (None, 1), {}),
}


def import_class(key: str, path: str, trust: bool = True) -> Any:
    """The class at a dotted path such as `torch.nn.Linear`, for the setting `key`, such as `model.linear`.

    Pass `trust=False` for a path that was read from a file: a class whose module has not been imported already is then
    refused. Raises UserError if the path is refused or does not lead to an nn.Module that can be called as `key` needs.
    """
    module, _, name = path.rpartition(".")
    call, args, options = _CALLS[key]
    if trust:
        try:
            importlib.import_module(module)
        except Exception as error:  # importing a module runs its code
            raise UserError(f"{key}={path}: {type(error).__name__}: {error}") from error
    elif module not in sys.modules:
        raise UserError(f"{key}={path} is the run's own class: trust=true imports it, if you trust the run")
    if not hasattr(sys.modules[module], name):
        raise UserError(f"{key}={path}: {module} has no {name}")
    cls = getattr(sys.modules[module], name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f"{key}={path}: is no class of modules; expected one that is called as {call}")
    try:
        inspect.signature(cls).bind(*args, **options)
    except TypeError as error:
        raise UserError(f"{key}={path}: cannot be called as {call}: {error}") from error
    return cls
