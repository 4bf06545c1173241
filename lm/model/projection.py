"""Which class a model's projections have (model.linear)."""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial

from torch import nn

from lm.config import BadInput, ModelConfig
from lm.model.linear import Linear
from lm.model.lora import LoRALinear

LINEARS: dict[str, Callable[..., nn.Module]] = {"linear": Linear, "lora": LoRALinear}


def linear_class(name: str, trust: bool = True) -> Callable[..., nn.Module]:
    """The class that `model.linear` names: a key of LINEARS or a dotted path such as `torch.nn.Linear`.

    The class is called as `cls(in_features, out_features, bias=...)`. Pass `trust=False` for a name that was read from
    a file: a class whose module has not been imported already is then refused. Raises BadInput if the name is refused
    or does not lead to such a class.
    """
    if name in LINEARS:
        return LINEARS[name]
    module, _, attribute = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        module = ""
    if module and trust:
        try:
            importlib.import_module(module)
        except Exception as error:  # importing a module runs its code
            raise BadInput(f"model.linear={name}: {type(error).__name__}: {error}") from error
    elif module and module not in sys.modules:
        raise BadInput(f"model.linear={name} is the run's own class: trust=true imports it, if you trust the run")
    found = getattr(sys.modules.get(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        known = ", ".join(LINEARS)
        if module and not hasattr(sys.modules[module], attribute):
            raise BadInput(f"model.linear={name}: {module} has no {attribute}")
        raise BadInput(f"model.linear={name}: expected {known}, or the dotted path of a class like torch.nn.Linear")
    try:
        inspect.signature(found).bind(1, 1, bias=True)
    except TypeError as error:
        raise BadInput(f"model.linear={name}: cannot be called as cls(in, out, bias=...): {error}") from error
    return found


def projection(config: ModelConfig, name: str) -> Callable[..., nn.Module]:
    """What builds the projection `name`, such as q_proj, of a model: it is called as `linear_class` says.

    It is the class that model.linear names; for lora, only where model.lora_targets has the name.
    """
    if config.linear != "lora":
        return linear_class(config.linear)
    return partial(LoRALinear, rank=config.rank, alpha=config.alpha) if name in config.adapted else Linear
