"""Normalisation over the last dimension."""

from collections.abc import Callable

from torch import nn

from lm.config import ModelConfig

EPS = 1e-5


def rms_norm(width: int, config: ModelConfig) -> nn.Module:
    """Scale to unit root mean square (Zhang and Sennrich, 2019); no mean is taken off, no bias."""
    return nn.RMSNorm(width, eps=EPS)


def layer_norm(width: int, config: ModelConfig) -> nn.Module:
    """Zero mean, unit variance (Ba et al., 2016)."""
    return nn.LayerNorm(width, eps=EPS, bias=config.bias)


NORMS: dict[str, Callable[[int, ModelConfig], nn.Module]] = {"rmsnorm": rms_norm, "layernorm": layer_norm}
