"""The linear map: every projection, every FFN matrix and the LM head compute their matmul here."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import LINEARS, ModelConfig
from lm.registry import construct, from_lab


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` on the last dimension: (..., out_features).

    x: (..., in_features); weight: (out_features, in_features); bias: (out_features,).
    Raises ValueError if the last dimension of `x` is not in_features.

    >>> linear(torch.tensor([1.0, 2, 3, 4]), torch.tensor([[1.0, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]))
    tensor([30., 40., 50.])
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear: the last dimension of x is {x.shape[-1]}, the weight expects {weight.shape[-1]}")
    return F.linear(x, weight, bias)


class Linear(nn.Module):
    """An affine map of the last dimension, with the parameters of `torch.nn.Linear` from the same random state.

    The weight has the shape (out_features, in_features). Weight and bias begin uniformly in +-1/sqrt(in_features):
    Kaiming's formula with a = sqrt(5). The bound of He's initialisation for ReLU is wider by sqrt(6).

    >>> Linear(2, 3)(torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)  # (..., out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def projection(config: ModelConfig, name: str) -> Callable[..., nn.Module]:
    """Return the class of the projection `name`, such as q_proj, called as cls(in, out, bias=...).

    With linear=lora a projection has an adapter only where model.lora_targets names the projection.
    """
    if name in config.adapted:
        return partial(from_lab("lm.lab.lora.LoRALinear"), rank=config.rank, alpha=config.alpha)
    if config.linear in LINEARS:
        return Linear
    return partial(construct, "model.linear", config.linear)


def is_adapter(name: str) -> bool:
    """Return whether the parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name
