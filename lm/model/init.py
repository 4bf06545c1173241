"""Initial values: seeds by module name, previous-token heads, and the scale of the residual branches."""

import hashlib
import math
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import UserError

if TYPE_CHECKING:
    from lm.model.transformer import Attention, Transformer

COMMON_NORM = 0.5  # norm of the common component of an embedding, as a fraction of the norm of the embedding
RANDOM_FRACTION = 0.2  # fraction of the random initial values of queries and keys that is kept


def named_seed(seed: int, *names: object) -> int:
    """Return a 63-bit seed that depends on the arguments alone, not on the machine or on earlier draws."""
    digest = hashlib.sha256(repr((seed, *map(str, names))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@torch.no_grad()
def initialise(net: "Transformer", seed: int) -> None:
    """Draw the parameters of every module anew by `reset_parameters`, each module with its own seed.

    A module without `reset_parameters` keeps the values of its constructor.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in net.named_modules():
            if hasattr(module, "reset_parameters") and next(module.parameters(recurse=False), None) is not None:
                torch.default_generator.manual_seed(named_seed(seed, name))
                module.reset_parameters()
    if net.config.previous_token_init:
        generator = torch.Generator().manual_seed(named_seed(seed, "lookback"))  # the old name fixes the draw
        direction = F.normalize(torch.randn(net.config.d_model, generator=generator), dim=0)  # (D,)
        _initialise_previous_token_heads(net, direction)
    net.head.init_from_embedding(net.embed.weight)
    _scale_residual_projections(net)


def _initialise_previous_token_heads(net: "Transformer", direction: Tensor) -> None:
    """Let head i of the first `previous_token_init` blocks attend to the token i positions back, before any training.

    In a short training, small models spend many steps on learning that the last few tokens matter most. Every embedding
    gets a component along one common `direction` (D,), of norm 1. The query and key weights map this direction to one
    vector. The query weight rotates the vector as RoPE does, by -i positions, so that the score is highest i tokens
    back. Only the initial values differ (cf. mimetic initialisation, Trockman and Kolter, 2023): training trains all
    weights as usual.
    """
    net.embed.weight.add_(COMMON_NORM * net.embed.std * math.sqrt(len(direction)) * direction)
    for block in net.blocks[: net.config.previous_token_init]:
        attn = cast("Attention", block.attn)
        queries, keys = _weight(attn.q_proj), _weight(attn.k_proj)  # (H*K, D), (n_kv_heads*K, D)
        key = torch.full((1, 1, 1, attn.head_dim), attn.head_dim**-0.5)
        key[..., ::2] *= -1  # the mean becomes 0: a LayerNorm of queries and keys would remove any other mean
        for lag, weight in enumerate(torch.split(queries, attn.head_dim), 1):
            _map_direction(weight, direction, net.position.rotation(torch.tensor([-lag]))(key).flatten())
        for weight in torch.split(keys, attn.head_dim):
            _map_direction(weight, direction, key.flatten())


def _map_direction(weight: Tensor, direction: Tensor, output: Tensor) -> None:
    """Let the weight (K, D) of a head map `direction` (D,) approximately to `output` (K,) times the weight's norm."""
    weight.copy_(RANDOM_FRACTION * weight + weight.norm() * torch.outer(output, direction))


def _weight(projection: nn.Module) -> Tensor:
    try:
        return projection.get_parameter("weight")
    except AttributeError:
        raise UserError("model.linear: its class has no `weight`; add model.previous_token_init=0") from None


def _scale_residual_projections(net: "Transformer") -> None:
    """Multiply o_proj and down_proj by model.residual_scale.

    The default is 1/sqrt(2 n_layers) as in GPT-2. With this scale, the variance of the residual stream does not grow
    with depth.
    """
    scale = net.config.residual_scale
    if scale is None:
        scale = 1 / math.sqrt(2 * net.config.n_layers)
    for name, module in net.blocks.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            matrix = next((p for p in module.parameters() if p.ndim == 2), None)  # a class may factorise its matrix
            if matrix is not None:
                matrix.mul_(scale)
            elif scale != 1:
                classes = f"model.linear={net.config.linear}, model.ffn={net.config.ffn}"
                raise UserError(f"{classes}: {name} has no matrix; add model.residual_scale=1")
