"""Causal self-attention: multi-head, grouped-query or multi-query, according to n_kv_heads."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.model.cache import NoCache
from lm.model.norm import NORMS
from lm.model.position import Rotation
from lm.model.projection import projection


class Context(NamedTuple):
    """What all layers share in one forward pass."""

    positions: Tensor  # (T,) or (B, T)
    rotate: Rotation
    mask: Tensor | None  # (B, 1, T, S), added to the scores; None: causal
    cache: NoCache


class Attention(nn.Module):
    """(B, T, D) to (B, T, D): a token attends to itself and its past (Vaswani et al., 2017; Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.dropout = layer, config.head_dim, config.dropout
        self.grouped = config.kv_heads != config.n_heads
        width, kv_width = config.n_heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.attn_bias
        self.q_proj = projection(config, "q_proj")(config.d_model, width, bias=bias)
        self.k_proj = projection(config, "k_proj")(config.d_model, kv_width, bias=bias)
        self.v_proj = projection(config, "v_proj")(config.d_model, kv_width, bias=bias)
        self.o_proj = projection(config, "o_proj")(width, config.d_model, bias=bias)
        self.q_norm = NORMS[config.norm](config.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = NORMS[config.norm](config.head_dim, config) if config.qk_norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, H*K) to (B, H, T, K)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = context.rotate(self.q_norm(self.heads(self.q_proj(x))))
        k = context.rotate(self.k_norm(self.heads(self.k_proj(x))))
        v = self.heads(self.v_proj(x))
        k, v = context.cache.append(self.layer, context.positions, k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=context.mask,
            is_causal=context.mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.grouped,
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))
