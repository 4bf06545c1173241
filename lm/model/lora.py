"""The class of each projection, and low-rank adapters: the only parameters that train in a model that has them."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from lm.config import ModelConfig
from lm.model.linear import Linear
from lm.model.user_class import construct


def projection(config: ModelConfig, name: str) -> Callable[..., nn.Module]:
    """The class of the projection `name`, such as q_proj; it is called as cls(in_features, out_features, bias=...).

    It is the class that model.linear names; for lora, only where model.lora_targets has the name.
    """
    if name in config.adapted:
        return partial(LoRALinear, rank=config.rank, alpha=config.alpha)
    return Linear if config.linear in ("linear", "lora") else partial(construct, "model.linear", config.linear)


class LoRALinear(Linear):
    """Low-rank adaptation (Hu et al., 2021): x W^T + b + alpha/rank x A^T B^T.

    A: (rank, in_features), initialised as every Linear; B: (out_features, rank), zero at first, so that the map begins
    as that of W and b. The names are those of PEFT.

    >>> import torch
    >>> LoRALinear(2, 3, rank=1, alpha=1)(torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5, 3])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, rank: int, alpha: float) -> None:
        super().__init__(in_features, out_features, bias)
        self.scale = alpha / rank
        self.lora_A = Linear(in_features, rank, bias=False)
        self.lora_B = _ZeroLinear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.lora_B(self.lora_A(x))  # (..., in_features) -> (..., rank) -> (..., out_features)
        return super().forward(x) + self.scale * update  # (..., out_features)

    def merged(self) -> Tensor:
        """The one matrix (out_features, in_features) that computes the same."""
        return self.weight + self.scale * self.lora_B.weight @ self.lora_A.weight


class _ZeroLinear(Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is one of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def freeze_base(net: nn.Module) -> None:
    """Let only adapters train, in a model that has some."""
    if any(isinstance(module, LoRALinear) for module in net.modules()):
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(is_adapter(name))
