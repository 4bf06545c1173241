"""Classes of the user, each named by its dotted path in a setting of the model.

`construct` makes an object of a class. `check_classes` asks for consent before a model folder imports a class, and
warns of another version of the class. `try_classes` tries a class before training, `computes_tokens_alone` before
decoding. `sources_of` is for a hash of the code.
"""

import ast
import importlib
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lm.config import ModelConfig, RunConfig, user_classes
from lm.decoding import prefill
from lm.errors import UserError
from lm.model.transformer import KVCache, Transformer
from lm.system.code import code_of
from lm.training.resolve import build_model
from lm.training.run_directory import RunDirectory, code_of_run

log = logging.getLogger(__name__)


def import_class(key: str, path: str) -> type[nn.Module]:
    """Return the class at the dotted path that the setting `key` names, such as `torch.nn.Linear`.

    Search the current folder last. Raises UserError if the path leads to no subclass of nn.Module, or if another file
    hides the module of this name in the current folder.
    """
    module, _, name = path.rpartition(".")
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    try:
        file = getattr(importlib.import_module(module), "__file__", None)
        for own_file in (Path(*module.split("."), "__init__.py"), Path(*module.split(".")).with_suffix(".py")):
            if file and own_file.exists() and not own_file.samefile(file):
                raise ImportError(f"{file} hides {own_file} of the current folder; rename one of the two files")
        cls = getattr(sys.modules[module], name)
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
    return ", ".join(f"{key}={path}" for key, path in user_classes(config).items())


@contextmanager
def blaming_classes(config: ModelConfig) -> Iterator[None]:
    """Turn an error of a model with classes of the user into a UserError that names these classes."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if not user_classes(config):
            raise
        raise UserError(f"{named_classes(config)}: {type(error).__name__}: {error}") from error


def check_classes(config: ModelConfig, classes: Sequence[str], run_dir: Path) -> None:
    """Raise UserError if the settings of a model folder name a class that is not among `classes`, dotted paths.

    Import nothing before this check, because the import of a module runs its code. Warn of a class that has changed
    since the run of the model, because the model now computes something else.
    """
    paths = user_classes(config).values()
    if not {*paths} <= {*classes}:
        advice = f"'classes=[{','.join(dict.fromkeys(paths))}]' imports it, if you trust it"
        raise UserError(f"{named_classes(config)}: is code of the model's author; {advice}")
    with suppress(UserError):  # a run of an earlier version; a class that is gone is named where it is constructed
        trained = RunDirectory(run_dir).read_config().get("code", {}).get("classes")
        if trained not in (None, code_of_run(config)["classes"]):
            log.warning("%s: was trained with another version of %s", run_dir, named_classes(config))


# --- what is tried before training and before decoding


def try_classes(run: RunConfig, vocab_size: int) -> None:
    """Try the classes of the user on the CPU, in a model whose weights are moved away from their initial values.

    Raises UserError if the logits depend on later tokens, which no loss would tell, if a model that is saved and loaded
    computes other logits, or if activation checkpointing would change buffers twice.
    """
    named = named_classes(run.model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), blaming_classes(run.model):
        net = build_model(run, vocab_size)
        torch.manual_seed(0)  # the same answer for each run
        for parameter in net.parameters():  # a gate that begins at zero would hide what a class does
            parameter.add_(torch.randn_like(parameter).sign() * (0.05 + 0.1 * torch.rand_like(parameter)))
        tokens = torch.arange(run.data.seq_len)[None] % vocab_size  # (1, T)
        before = [buffer.clone() for buffer in net.buffers()]
        with torch.enable_grad():
            net(tokens).sum().backward()  # in training mode, in which a class may change its buffers
        changes = not all(map(torch.equal, before, net.buffers()))
        if changes and run.activation_checkpointing:
            reason = f"{named} changes a buffer in training, and would do so twice in a repeated forward pass"
            raise UserError(f"activation_checkpointing=true: {reason}; choose false")

        def logits_of(net: Transformer) -> Tensor:  # (1, T, V)
            torch.manual_seed(0)  # for a class that draws numbers
            logits: Tensor = net.eval()(tokens)
            return logits

        logits = logits_of(net)
        scale = float(logits.nan_to_num().abs().max())
        is_close = partial(torch.allclose, rtol=0.0, atol=1e-5 * scale, equal_nan=True)

        tokens[:, -1] = (tokens[:, -1] + 1) % vocab_size
        if not is_close(logits_of(net)[:, :-1], logits[:, :-1]):
            raise UserError(f"{named}: the logits depend on later tokens, which the model is to predict")
        loaded = build_model(replace(run, seed=run.seed + 1), vocab_size)
        loaded.load_state_dict(net.state_dict())
        if not is_close(logits_of(loaded), logits_of(net)):
            advice = "a buffer that is random, or that training changes, needs persistent=True"
            raise UserError(f"{named}: a model that is saved and loaded has other logits; {advice}")


@torch.inference_mode()
def computes_tokens_alone(net: Transformer) -> bool:
    """Return whether the last token of a context has the same logits with a cache of the tokens before.

    A class of the user may look at earlier tokens, such as a convolution, which a cache of keys and values lacks.
    """
    if net.seq_len == 1:
        return True
    text = [i % net.vocab_size for i in range(net.seq_len)]
    whole = prefill(net, [text], KVCache(len(text)))  # (1, 1, V)
    cache = KVCache(len(text))
    prefill(net, [text[:-1]], cache)
    last = torch.tensor([[text[-1]], [len(text) - 1]], device=whole.device)  # the token and its position
    logits = net(last[:1], last[1:], cache)  # (1, 1, V)
    return torch.allclose(logits, whole, rtol=0.0, atol=1e-4 * float(whole.abs().max()))


# --- the code of the user's classes, with what it imports from the user's own files


def sources_of(classes: Mapping[str, str]) -> dict[str, str | None]:
    """Return, by module, the code of classes of the user (setting -> dotted path) and of their local imports.

    The code is without comments, docstrings and layout. It is None for a module without a source file.
    """
    files: dict[str, str | None] = {}
    for key, dotted in classes.items():
        for module in {import_class(key, dotted).__module__, dotted.rpartition(".")[0]}:
            source = str(getattr(sys.modules[module], "__file__", None))
            if not Path(source).is_file():  # of a notebook, or <stdin>: a change of the class would not be seen
                raise UserError(f"{key}={dotted}: is in no file; write the class into a .py file")
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
