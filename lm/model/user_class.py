"""Classes of the user's own, which a setting of the model names by their dotted path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lm.config import UserError, foreign_classes

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
    """An object of that class. Raises UserError, also for what its constructor raises."""
    cls = import_class(key, path)
    with _named(f"{key}={path}: cannot be built"):
        return cls(*args, **options)


@torch.no_grad()
def check_classes(net: Any) -> None:
    """Give each class of the user's own in a Transformer an input of ones, and raise UserError for a wrong output.

    On the meta device, what a class raises is ignored: it may look at values. On the CPU it is asked again.
    """
    if not (paths := foreign_classes(net.config)):
        return
    modes = {module: module.training for module in net.modules()}
    net.eval()  # nothing is counted or averaged
    for key, method, call, size, expected in _calls(net, paths):
        setting, x = f"{key}={paths[key]}", torch.ones(size, device=net.embed.weight.device)
        try:
            with torch.random.fork_rng(devices=[]), _named(f"{setting}: {method or 'forward'} fails on {size}"):
                output = call(x)
        except UserError:
            if x.is_meta:
                continue
            raise
        returned = f"{setting}{'.' * bool(method)}{method} returned"
        if not isinstance(output, Tensor):
            raise UserError(f"{returned} {type(output).__name__}; expected a tensor {expected}")
        if output.dtype != x.dtype:
            raise UserError(f"{returned} {output.dtype}; expected {x.dtype}, as its input has")
        if output.shape != expected:
            raise UserError(f"{returned} {tuple(output.shape)}; expected {expected}")
    for module, mode in modes.items():
        module.training = mode


def _calls(net: Any, paths: dict[str, str]) -> Iterator[tuple[str, str, Callable[[Tensor], Any], _Shape, _Shape]]:
    """Of each place in the first block where such a class stands: key, method, call, shapes of input and output."""
    config, attn, ffn, length = net.config, net.blocks[0].attn, net.blocks[0].ffn, net.seq_len
    stream, heads = (1, length, config.d_model), (1, config.n_heads, length, config.head_dim)
    if "model.linear" in paths:
        n_q, n_kv, n_ff = config.n_heads * config.head_dim, config.kv_heads * config.head_dim, config.d_ff
        sizes = {"q": (config.d_model, n_q), "k": (config.d_model, n_kv), "v": (config.d_model, n_kv)}
        sizes |= {"o": (n_q, config.d_model), "up": (config.d_model, n_ff), "down": (n_ff, config.d_model)}
        for name, (n_in, n_out) in sizes.items():
            owner = attn if name in "qkvo" else ffn
            if owner is attn or "model.ffn" not in paths:
                yield "model.linear", "", getattr(owner, f"{name}_proj"), (1, length, n_in), (1, length, n_out)
    if "model.norm" in paths:
        yield "model.norm", "", net.norm, stream, stream
    if "model.norm" in paths and config.qk_norm:
        yield "model.norm", "", attn.q_norm, heads, heads
    if "model.ffn" in paths:
        yield "model.ffn", "", ffn, stream, stream
    positions = torch.arange(length, device=net.embed.weight.device)
    for at in (positions, positions[None]) if "model.position" in paths else ():  # in training, and with a cache
        yield "model.position", "embed", partial(_embed, net.position, at), stream, stream
        yield "model.position", "rotation", partial(_rotate, net.position, at), heads, heads


def _embed(position: Any, positions: Tensor, x: Tensor) -> Any:
    return position.embed(x, positions)


def _rotate(position: Any, positions: Tensor, x: Tensor) -> Any:
    return position.rotation(positions)(x)


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """Turn what a class raises into a UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{setting} ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})") from error
