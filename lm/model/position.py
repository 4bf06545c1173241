"""Position encodings.

An encoding has two methods: `embed` adds to the input of the first block, and `rotation` gives the function that
rotates queries and keys in every layer. Learned positions use the first, RoPE uses the second, and none uses neither.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import BadInput, ModelConfig

Rotation = Callable[[Tensor], Tensor]  # (B, H, T, K) -> (B, H, T, K)


class NoPosition(nn.Module):
    """No position encoding: the causal mask is the only source of order (Haviv et al., 2022)."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: (B, T, D); positions: (B, T) or (T,), from 0."""
        return x

    def rotation(self, positions: Tensor) -> Rotation:
        return lambda heads: heads

    def load_from(self, other: "NoPosition") -> None:
        """Take over, without gradients, the weights of one for another seq_len; BadInput if it has too few of them."""


class Learned(NoPosition):
    """A learned vector for each position, added to the input embedding (GPT-2)."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__(config, seq_len)
        self.weight = nn.Parameter(torch.empty(seq_len, config.d_model))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + F.embedding(positions, self.weight)

    def load_from(self, other: NoPosition) -> None:
        assert isinstance(other, Learned)
        wanted, there = len(self.weight), len(other.weight)
        if wanted > there:
            raise BadInput(
                f"data.seq_len={wanted}: the loaded model has {there} learned positions; choose that or less"
            )
        self.weight.copy_(other.weight[:wanted])


class RoPE(NoPosition):
    """Rotary position embedding (Su et al., 2021): rotates coordinates (i, i + K/2) by position * theta^(-2i/K).

    rope_scaling=[factor, low, high, context] extends a model trained on windows of `context` tokens as Llama 3 does
    (Grattafiori et al., 2024): frequencies of fewer than `low` periods in such a window are divided by `factor`, those
    of more than `high` stay, and those between are interpolated.
    """

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__(config, seq_len)
        self.head_dim, self.theta, self.scaling = config.head_dim, config.rope_theta, config.rope_scaling

    def frequencies(self, device: torch.device) -> Tensor:
        """In radians per position: (K/2,)."""
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / self.theta ** (steps / self.head_dim)
        if self.scaling is None:
            return frequencies
        factor, low, high, context = self.scaling
        kept = ((frequencies * (context / (2 * math.pi)) - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor)

    def rotation(self, positions: Tensor) -> Rotation:
        frequencies = self.frequencies(positions.device)
        angles = positions[..., None, :, None] * torch.cat((-frequencies, frequencies))  # (..., 1, T, K), for all heads
        cos, sin = angles.cos(), angles.sin()

        def rotate(heads: Tensor) -> Tensor:
            partner = heads.roll(self.head_dim // 2, dims=-1)  # the other coordinate of each pair
            return torch.addcmul(heads * cos, partner, sin).to(heads.dtype)

        return rotate


POSITIONS: dict[str, type[NoPosition]] = {"rope": RoPE, "learned": Learned, "none": NoPosition}
