"""Normalisation over the last dimension."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig

EPS = 1e-5


class RMSNorm(nn.RMSNorm):
    """Scale to unit root mean square (Zhang and Sennrich, 2019); no mean is taken off, no bias."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)  # one dtype, or torch's fused kernel steps aside under autocast
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


def rms_norm(width: int, config: ModelConfig) -> nn.Module:
    return RMSNorm(width, eps=EPS)


def layer_norm(width: int, config: ModelConfig) -> nn.Module:
    """Zero mean, unit variance (Ba et al., 2016)."""
    return nn.LayerNorm(width, eps=EPS, bias=config.bias)


NORMS: dict[str, Callable[[int, ModelConfig], nn.Module]] = {"rmsnorm": rms_norm, "layernorm": layer_norm}
