"""Previous-token-head initialisation: before any training, each attention head attends a fixed number of tokens back.

In a short training, small models spend many steps on learning that the last few tokens matter most. With this
initialisation they know it from the first step: every embedding gets a component along one common direction, the query
and key weights map that direction to one vector, and the query's copy is rotated as by RoPE, by -lag positions, so that
the score is highest `lag` tokens back. Head i has lag i. Only the initial values differ (cf. mimetic initialisation,
Trockman and Kolter, 2023): all weights are trained as usual.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lm.config import BadInput
from lm.model.attention import Attention
from lm.model.head import Embedding
from lm.model.position import NoPosition

COMMON_NORM = 0.5  # the common component of an embedding, as a fraction of the embedding's norm
RANDOM_FRACTION = 0.2  # of the random initial values of queries and keys that is kept


def initialise_previous_token_heads(
    embed: Embedding, blocks: Iterable[nn.Module], position: NoPosition, direction: Tensor
) -> None:
    """Let the heads of these blocks attend 1, 2, ... tokens back. direction: (D,), of norm 1."""
    embed.weight.add_(COMMON_NORM * embed.std * math.sqrt(len(direction)) * direction)
    for attn in (block.attn for block in blocks):
        assert isinstance(attn, Attention)
        queries, keys = weight_of(attn.q_proj), weight_of(attn.k_proj)
        key = torch.full((1, 1, 1, attn.head_dim), attn.head_dim**-0.5)
        key[..., ::2] *= -1  # so that its mean is 0: a LayerNorm of queries and keys would remove any other mean
        for lag, weight in enumerate(queries.chunk(len(queries) // attn.head_dim), 1):
            map_direction(weight, direction, position.rotation(torch.tensor([-lag]))(key).flatten())
        for weight in keys.chunk(len(keys) // attn.head_dim):
            map_direction(weight, direction, key.flatten())


def map_direction(weight: Tensor, direction: Tensor, output: Tensor) -> None:
    """Let a head's weight (K, D) map `direction` (D,) approximately to `output` (K,) times the norm of the weight."""
    weight.copy_(RANDOM_FRACTION * weight + weight.norm() * torch.outer(output, direction))


def weight_of(projection: nn.Module) -> Tensor:
    try:
        return projection.get_parameter("weight")
    except AttributeError:
        raise BadInput("model.linear: its class has no `weight`; add model.previous_token_init=0") from None
