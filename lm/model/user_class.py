"""Classes of the user's own, which a setting of the model names by their dotted path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lm.config import UserError

_Shape = tuple[int, ...]
_Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # how a class is called, and an example of the arguments
_CALLS: dict[str, _Call] = {
    "model.linear": ("cls(in_features, out_features, bias=...)", (1, 1), {"bias": True}),
    "model.norm": ("cls(width, eps=...)", (1,), {"eps": 1e-5}),
    "model.ffn": ("cls(config)", (None,), {}),
    "model.position": ("cls(config, seq_len)", (None, 1), {}),
}


def import_class(key: str, path: str, trust: bool = True) -> Any:
    """The class at a dotted path such as `torch.nn.Linear`, for the setting `key`, such as `model.linear`.

    Its module may also lie in the current folder, however the program was started. Pass `trust=False` for a path that
    was read from a file: a class whose module has not been imported already is then refused. Raises UserError if the
    path is refused or does not lead to an nn.Module that can be called as `key` needs.
    """
    module, _, name = path.rpartition(".")
    call, args, options = _CALLS[key]
    if trust:
        if module not in sys.modules and not {"", os.getcwd()} & {*sys.path}:
            sys.path.append(os.getcwd())  # last: what is installed comes first
        try:
            importlib.import_module(module)
        except Exception as error:  # importing a module runs its code
            is_absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            place = f" in {os.getcwd()} or on the path of Python" if is_absent else ""
            raise UserError(f"{key}={path}: {type(error).__name__}: {error}{place}") from error
    elif module not in sys.modules:
        raise UserError(f"{key}={path} is the run's own class: trust=true imports it, if you trust the run")
    if not hasattr(sys.modules[module], name):
        folders = [*getattr(sys.modules[module], "__path__", ["a part of Python"])]
        place = getattr(sys.modules[module], "__file__", None) or folders[0]
        raise UserError(f"{key}={path}: {module}, which is {place}, has no {name}")
    cls = getattr(sys.modules[module], name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f"{key}={path}: is no class of modules; expected one that is called as {call}")
    try:
        inspect.signature(cls).bind(*args, **options)
    except TypeError as error:
        raise UserError(f"{key}={path}: cannot be called as {call}: {error}") from error
    return cls


def construct(key: str, path: str, *args: Any, **options: Any) -> Any:
    """An object of that class, which has given the right output for an input of ones. Raises UserError."""
    cls = import_class(key, path)
    with _named(f"{key}={path}: cannot be built"):
        module = cls(*args, **options)
    module.eval()  # nothing is counted or averaged
    for method, call, size, expected in _calls(key, module, args):
        x, setting = torch.ones(size), f"{key}={path}{'.' * bool(method)}{method}"
        failure = _named(f"{key}={path}: {method or 'forward'} fails on {size}")
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), failure:
                output = call(x)
        except UserError:
            if x.is_meta:  # it may look at values; on the CPU it is asked again
                continue
            raise
        result = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if result != expected:
            raise UserError(f"{setting} returned {result}; expected a tensor {expected}")
        if output.dtype != x.dtype:
            raise UserError(f"{setting} returned {output.dtype}; expected {x.dtype}, as its input has")
    return module.train()


def _calls(key: str, module: Any, args: Any) -> Iterator[tuple[str, Callable[[Tensor], Any], _Shape, _Shape]]:
    """How the model calls such an object: the method, the call, the shapes of an input and of the output."""
    if key != "model.position":
        n_in, n_out = args if key == "model.linear" else [getattr(args[0], "d_model", args[0])] * 2
        yield "", module, (1, 2, n_in), (1, 2, n_out)
        return
    config, length = args
    stream, heads = (1, length, config.d_model), (1, config.n_heads, length, config.head_dim)
    for positions in (torch.arange(length), torch.arange(length)[None]):  # in training, and with a cache
        yield "embed", lambda x: module.embed(x, positions), stream, stream  # noqa: B023  called at once
        yield "rotation", lambda x: module.rotation(positions)(x), heads, heads  # noqa: B023


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """Turn what a class raises into a UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{setting} ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})") from error
