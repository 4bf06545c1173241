"""A start for attention: heads that look a fixed number of tokens back, from the first step on.

Small models spend much of a short training on finding out that the last few tokens matter most. These start with it:
every embedding gets a share of one direction, queries and keys read it, and RoPE turns the queries so that the score
is highest `lag` tokens back. It is nothing but a start (cf. mimetic initialisation, Trockman and Kolter, 2023): all
weights go on learning, and the architecture is the same.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lm.config import BadInput
from lm.model.attention import Attention
from lm.model.head import Embedding
from lm.model.position import NoPosition

SHARED = 0.5  # of an embedding's length, in the common direction
RANDOM = 0.2  # what is left of the random start of queries and keys


def aim_at_previous_tokens(
    embed: Embedding, blocks: Iterable[nn.Module], position: NoPosition, direction: Tensor
) -> None:
    """Let the heads of these blocks look 1, 2, ... tokens back. direction: (D,), of length 1."""
    embed.weight.add_(SHARED * embed.std * math.sqrt(len(direction)) * direction)
    for attn in (block.attn for block in blocks):
        assert isinstance(attn, Attention)
        queries, keys = weight_of(attn.q_proj), weight_of(attn.k_proj)
        key = torch.full((1, 1, 1, attn.head_dim), attn.head_dim**-0.5)
        key[..., ::2] *= -1  # no mean that a LayerNorm of queries and keys could take away
        for lag, rows in enumerate(queries.chunk(len(queries) // attn.head_dim), 1):
            aim(rows, position.rotation(torch.tensor([-lag]))(key).flatten(), direction)
        for rows in keys.chunk(len(keys) // attn.head_dim):
            aim(rows, key.flatten(), direction)


def aim(rows: Tensor, out: Tensor, direction: Tensor) -> None:
    """Make the rows (K, D) of a head answer the direction (D,) with the vector `out` (K,), as strong as they were."""
    rows.copy_(RANDOM * rows + rows.norm() * torch.outer(out, direction))


def weight_of(projection: nn.Module) -> Tensor:
    try:
        return projection.get_parameter("weight")
    except AttributeError:
        raise BadInput(
            "model.linear: a class without `weight` cannot look back; add model.previous_token_init=0"
        ) from None
