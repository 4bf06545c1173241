"""Normalisation over the last dimension: (..., D) to (..., D)."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lm.config import ModelConfig


class RMSNorm(nn.RMSNorm):
    """Scale to unit root mean square (Zhang and Sennrich, 2019): x / sqrt(mean(x²) + eps), times a weight; no bias."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)
        constants = math.sqrt(width), math.sqrt(width * eps)
        self.root, self.floor = (torch.tensor(one, dtype=torch.float32, device="cpu") for one in constants)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu or x.dtype == torch.float64 or torch.compiler.is_compiling():
            weight = self.weight.to(x.dtype)  # torch's fused kernel needs one dtype, also under autocast
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        if torch.is_grad_enabled():
            y: Tensor = RMSNormOnCPU.apply(x, self.weight, self.root, self.floor)  # type: ignore[no-untyped-call]
            return y
        return scaled(x, inverse_rms(x, self.root, self.floor), self.weight)


def inverse_rms(x: Tensor, root: Tensor, floor: Tensor) -> Tensor:
    """(..., D) to (..., 1). root is sqrt(D) and floor sqrt(D eps); as tensors they need no conversion in each call."""
    return root / torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(floor)


def scaled(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    y = (x * inverse).mul_(weight)
    return y if y.dtype == x.dtype else y.to(x.dtype)


class RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm with an explicit backward pass: torch has no CPU kernel, and autograd takes two to three times as long.

    y = w u, where u = r x and r is the inverse RMS. With g = dL/dy: dL/dw = sum(g u) over all rows, and in each row
    dL/dx = r (g w - u mean(g w u)). It has no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, root: Tensor, floor: Tensor) -> Tensor:
        inverse = inverse_rms(x, root, floor)
        ctx.save_for_backward(x, inverse, weight)
        return scaled(x, inverse, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, inverse, weight = ctx.saved_tensors
        unit = x * inverse
        y, rows = g * unit, tuple(range(x.ndim - 1))
        grad_weight = y.sum(rows) if rows else y.clone()
        along = y.mul_(weight).mean(-1, keepdim=True)
        torch.mul(g, weight.to(y.dtype), out=y)
        return y.addcmul_(unit, along, value=-1).mul_(inverse), grad_weight, None, None


def rms_norm(width: int, config: ModelConfig) -> nn.Module:
    return RMSNorm(width, config.norm_eps)


def layer_norm(width: int, config: ModelConfig) -> nn.Module:
    """Zero mean, unit variance (Ba et al., 2016)."""
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)


NORMS: dict[str, Callable[[int, ModelConfig], nn.Module]] = {"rmsnorm": rms_norm, "layernorm": layer_norm}
