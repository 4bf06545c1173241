"""How a model knows where a token stands.

A scheme has two hooks: `embed` adds something to the stream once, `rotation` says how queries and keys are turned
in every layer. Learned positions use the first, RoPE the second, none neither; nobody asks which.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig

Rotation = Callable[[Tensor], Tensor]  # (B, H, T, K) -> (B, H, T, K)


class NoPosition(nn.Module):
    """No position at all: the causal mask alone tells early from late (Haviv et al., 2022)."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: (B, T, D); positions: (B, T) or (T,), from 0."""
        return x

    def rotation(self, positions: Tensor) -> Rotation:
        return lambda heads: heads


class Learned(NoPosition):
    """A trained vector for each position, added to the embedding (GPT-2)."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__(config, seq_len)
        self.weight = nn.Parameter(torch.empty(seq_len, config.d_model))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + F.embedding(positions, self.weight)


class RoPE(NoPosition):
    """Rotary embedding (Su et al., 2021): coordinate pairs (i, i + K/2) turn by position * theta^(-2i/K)."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__(config, seq_len)
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def rotation(self, positions: Tensor) -> Rotation:
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device)
        rates = 1.0 / self.theta ** (steps / self.head_dim)
        angles = positions[..., None, :, None] * torch.cat((-rates, rates))  # (..., 1, T, K): the same for all heads
        cos, sin = angles.cos(), angles.sin()

        def rotate(heads: Tensor) -> Tensor:
            other = heads.roll(self.head_dim // 2, dims=-1)  # of each coordinate, the one it is turned with
            return torch.addcmul(heads * cos, other, sin).to(heads.dtype)

        return rotate


POSITIONS: dict[str, type[NoPosition]] = {"rope": RoPE, "learned": Learned, "none": NoPosition}
