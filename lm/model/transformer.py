"""A decoder-only transformer: token ids in, raw logits out.

In order: norms, positions, cache, attention, FFN, block, model.

Shapes, here and in the files beside this one: B batch size, T sequence length, S number of keys, D d_model, H number of
heads (n_kv_heads for keys and values), K head_dim, V vocabulary size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.config import GATED, HeadConfig, ModelConfig
from lm.model.head import HEADS, Embedding
from lm.model.init import initialise, named_seed
from lm.model.kernels import Dropout, attention, rms_norm  # as torch's, faster on a CPU
from lm.model.linear import is_adapter, projection
from lm.registry import construct  # an object of a class of the user

# --- norms


class RMSNorm(nn.RMSNorm):
    """The norm x / sqrt(mean(x²) + eps) times a weight (Zhang and Sennrich, 2019): unit root mean square, no bias."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)  # (..., D)


NORMS: dict[str, Callable[[int, ModelConfig], nn.Module]] = {
    "rmsnorm": lambda width, config: RMSNorm(width, config.norm_eps),
    "layernorm": lambda width, config: nn.LayerNorm(width, config.norm_eps, bias=config.bias),  # Ba et al., 2016
    "none": lambda width, config: nn.Identity(),
}


def build_norm(width: int, config: ModelConfig) -> nn.Module:
    """Return the norm that model.norm names. Call a class of the user as cls(width, eps=...)."""
    if config.norm in NORMS:
        return NORMS[config.norm](width, config)
    return construct("model.norm", config.norm, width, eps=config.norm_eps)


# --- positions

Rotation = Callable[[Tensor], Tensor]  # (B, H, T, K) to (B, H, T, K)


class Position(nn.Module):
    """No position encoding: the causal mask is the only source of order (Haviv et al., 2022).

    An encoding is a subclass. The subclass defines `embed` to add to the input of the first block, or `rotation` to
    give the function that rotates queries and keys in every layer. `seq_len` is the longest context.
    """

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first block, (B, T, D). x: (B, T, D); positions: (B, T) or (T,), from 0."""
        return x

    def rotation(self, positions: Tensor) -> Rotation:
        return lambda heads: heads


class Learned(Position):
    """A learned vector for each position, added to the input embedding (GPT-2)."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__(config, seq_len)
        self.weight = nn.Parameter(torch.empty(seq_len, config.d_model))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)  # as GPT-2

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + F.embedding(positions, self.weight)  # (B, T, D)


class RoPE(Position):
    """Rotary position embedding (Su et al., 2021): a rotation of coordinates (i, i + K/2) by position * theta^(-2i/K).

    rope_scaling=[factor, low, high, context] extends a model trained on windows of `context` tokens as Llama 3 does
    (Grattafiori et al., 2024). This divides frequencies of fewer than `low` periods in such a window by `factor`, keeps
    frequencies of more than `high` periods, and interpolates the frequencies between.
    """

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__(config, seq_len)
        self.head_dim, self.theta, self.scaling = config.head_dim, config.rope_theta, config.rope_scaling

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies in radians per position: (K/2,)."""
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)  # (K/2,)
        frequencies = 1.0 / self.theta ** (steps / self.head_dim)
        if self.scaling is None:
            return frequencies
        factor, low, high, context = self.scaling
        kept = ((frequencies * (context / (2 * math.pi)) - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor)

    def rotation(self, positions: Tensor) -> Rotation:
        frequencies = self.frequencies(positions.device)
        angles = positions[..., None, :, None] * torch.cat((-frequencies, frequencies))  # (..., 1, T, K), for all heads
        cos, sin = angles.cos(), angles.sin()  # (..., 1, T, K)

        def rotate(heads: Tensor) -> Tensor:
            rotated = heads.roll(self.head_dim // 2, dims=-1)  # (B, H, T, K): the other coordinate of each pair
            return torch.addcmul(heads * cos, rotated, sin).to(heads.dtype)  # (B, H, T, K)

        return rotate


POSITIONS: dict[str, type[Position]] = {"rope": RoPE, "learned": Learned, "none": Position}


# --- the cache of generation, and which keys a query may see


class KVCache:
    """Keys and values of up to `length` positions in each layer. Index p holds the key and value of position p.

    The cache is an argument of the model, so the model has no state. Rows of different lengths can share a batch
    without padding on the left, because a row attends to no index beyond its position. When the row reaches the
    position of some padding, the row overwrites what the padding has written there.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, H, T, K) at positions (B, T). Return all keys and values, each (B, H, length, K)."""
        if layer not in self.layers:
            shape = (k.shape[0], k.shape[1], self.length, k.shape[3])
            self.layers[layer] = (k.new_zeros(shape), v.new_zeros(shape))
        keys, values = self.layers[layer]
        index = positions[:, None, :, None].expand_as(k)  # (B, H, T, K)
        return keys.scatter_(2, index, k), values.scatter_(2, index, v)


def attention_inputs(
    tokens: Tensor, positions: Tensor, cache: KVCache | None, separator: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the positions to encode, and the additive attention mask (B, 1, T, S) in `dtype`.

    tokens: (B, T) ids; positions: (B, T), or (T,) without a cache, the places of the tokens in their row; separator:
    the id of the token that begins each document.

    Without a separator, a token attends to itself and to all earlier tokens of its row. With a separator, a token
    attends to itself and to the earlier tokens of its document alone, and positions start anew at each document. The
    rest of a document counts positions from the beginning of the row, if the row begins inside the document. A row with
    a cache is one document, because a generation ends at end of text.
    """
    keys = positions[..., None, :] if cache is None else torch.arange(cache.length, device=positions.device)  # (..., S)
    if separator is None or cache is not None:
        return positions, _additive_mask(keys > positions[..., None], dtype)
    positions = positions.expand_as(tokens)  # (B, T)
    starts = (positions * (tokens == separator)).cummax(1).values  # (B, T), where the document of a token begins
    hidden = (keys > positions[..., None]) | (keys < starts[..., None])  # (B, T, S)
    return positions - starts, _additive_mask(hidden, dtype)


def _additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return -inf where a key is hidden from a query, else 0: (B, 1, T, S). hidden: (B, T, S), of truth values."""
    return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)


# --- attention


class Context(NamedTuple):
    """Values that all layers share in one forward pass."""

    positions: Tensor  # (T,) or (B, T), in the row: where the cache stores keys
    rotate: Rotation  # by the encoded positions, which begin anew at each document
    mask: Tensor | None  # (B, 1, T, S), added to the scores; None: causal
    cache: KVCache | None


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) to (B, T, D) (Vaswani et al., 2017).

    n_kv_heads makes the attention multi-head, grouped-query (Ainslie et al., 2023) or multi-query.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.dropout = layer, config.head_dim, config.dropout
        width, kv_width = config.n_heads * config.head_dim, config.kv_heads * config.head_dim
        bias = bool(config.attn_bias)
        self.q_proj = projection(config, "q_proj")(config.d_model, width, bias=bias)
        self.k_proj = projection(config, "k_proj")(config.d_model, kv_width, bias=bias)
        self.v_proj = projection(config, "v_proj")(config.d_model, kv_width, bias=bias)
        self.o_proj = projection(config, "o_proj")(width, config.d_model, bias=config.attn_bias is True)
        self.q_norm = build_norm(config.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = build_norm(config.head_dim, config) if config.qk_norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # (B, T, H*K) -> (B, H, T, K)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = context.rotate(self.q_norm(self.heads(self.q_proj(x))))  # (B, H, T, K)
        k = context.rotate(self.k_norm(self.heads(self.k_proj(x))))  # (B, n_kv_heads, T, K)
        v = self.heads(self.v_proj(x))  # (B, n_kv_heads, T, K)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, context.positions, k, v)  # (B, n_kv_heads, S, K)
        y = attention(q, k, v, context.mask, self.dropout if self.training else 0.0)  # (B, H, T, K)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, D)


# --- feed-forward network


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": _relu2,  # So et al., Primer, 2021
    "gelu": F.gelu,  # the exact form, with erf (Hendrycks and Gimpel, 2016)
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # as GPT-2 has it
    "silu": F.silu,  # x times sigmoid(x) (Elfwing et al., 2017)
    "swiglu": F.silu,  # activation of the gate (Shazeer, 2020)
}


class FFN(nn.Module):
    """A network up to d_ff and down: down(activation(up(x))), or down(activation(gate(x)) * up(x)) with a gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.ffn]
        self.up_proj = projection(config, "up_proj")(config.d_model, config.d_ff, bias=config.bias)
        self.down_proj = projection(config, "down_proj")(config.d_ff, config.d_model, bias=config.bias)
        self.gate_proj = None
        if config.ffn in GATED:
            self.gate_proj = projection(config, "gate_proj")(config.d_model, config.d_ff, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            hidden = self.activation(self.up_proj(x))  # (B, T, d_ff)
        else:
            hidden = self.activation(self.gate_proj(x)) * self.up_proj(x)  # (B, T, d_ff)
        return self.down_proj(hidden)  # (B, T, D)


# --- the model


def _dropout(config: ModelConfig) -> nn.Module:
    """Return Dropout, or nn.Identity at p = 0, because module calls cost more than arithmetic in decoding."""
    return Dropout(config.dropout) if config.dropout else nn.Identity()


class Block(nn.Module):
    """A pre-norm block (Xiong et al., 2020), (B, T, D) to (B, T, D): x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = build_norm(config.d_model, config)
        self.attn = Attention(config, layer)
        self.ffn_norm = build_norm(config.d_model, config)
        self.ffn = FFN(config) if config.ffn in ACTIVATIONS else construct("model.ffn", config.ffn, config)
        self.dropout = _dropout(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), context))  # (B, T, D)
        return x + self.dropout(self.ffn(self.ffn_norm(x)))  # (B, T, D)


class PostNormBlock(Block):
    """A post-norm block (Vaswani et al., 2017), (B, T, D) to (B, T, D): norm(x + attention(x)), then norm(x + ffn(x)).

    The model keeps its final norm, so both orders have the same parameters. Initially the final norm changes nothing.
    """

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.attn_norm(x + self.dropout(self.attn(x, context)))  # (B, T, D)
        return self.ffn_norm(x + self.dropout(self.ffn(x)))  # (B, T, D)


BLOCKS: dict[str, type[Block]] = {"pre": Block, "post": PostNormBlock}


class Transformer(nn.Module):
    """The whole model. `vocab_size`, `seq_len` (the longest context) and `document_separator` come from the data.

    `document_separator` is the id of the token that begins each document, if attention must not cross documents.

    A generator with a seed of (seed, module name) draws every parameter, so two models that differ in one part have
    equal values in all other parts. For example, the blocks of a model are equal bit for bit with a tied and with an
    untied head.

    >>> net = Transformer(ModelConfig(d_model=32, n_heads=2, d_ff=64), HeadConfig(), vocab_size=97, seq_len=16)
    >>> net(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 97])
    """

    def __init__(
        self,
        config: ModelConfig,
        head: HeadConfig,
        *,
        vocab_size: int,
        seq_len: int,
        document_separator: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.head_config = config, head
        self.vocab_size = vocab_size = max(vocab_size, config.vocab_rows or 0)
        self.seq_len, self.document_separator = seq_len, document_separator

        def build(name: str, cls: Callable[..., Any], *args: object) -> Any:
            # For the constructor of a class of the user, which may draw. `initialise` draws all else anew.
            torch.default_generator.manual_seed(named_seed(seed, name))
            return cls(*args)

        position = POSITIONS.get(config.position) or partial(construct, "model.position", config.position)
        block = BLOCKS[config.norm_order]
        # On the CPU, so that all devices have the same draws. A model on the meta device has shapes alone.
        device = "meta" if torch.get_default_device().type == "meta" else "cpu"
        with torch.device(device), torch.random.fork_rng(devices=[]):
            self.embed = build("embed", Embedding, head, vocab_size, config.d_model)
            self.position = build("position", position, config, seq_len)
            self.dropout = _dropout(config)
            self.blocks = nn.ModuleList(build(f"blocks.{i}", block, config, i) for i in range(config.n_layers))
            self.norm = build("norm", build_norm, config.d_model, config)
            self.head = build("head", HEADS[head.kind], head, vocab_size, config.d_model)
        if device != "meta":
            initialise(self, seed)
        if config.adapted:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))  # only adapters train

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Return the final hidden states (B, T, D) of tokens (B, T). The head turns hidden states into logits.

        With a cache, `positions` (B, T) are the positions of the tokens in their rows, and the tokens also attend to
        the content of the cache. Raises ValueError if T is more than the seq_len of the model.
        """
        if tokens.shape[1] > self.seq_len:
            raise ValueError(f"{tokens.shape[1]} tokens: this model's context holds {self.seq_len}")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.embed(tokens)  # (B, T, D)
        encoded, mask = positions, None  # the positions that are encoded, (T,); no mask: causal
        if cache is not None or self.document_separator is not None:
            # Positions from the beginning of the document on, (B, T), and the mask (B, 1, T, S).
            encoded, mask = attention_inputs(tokens, positions, cache, self.document_separator, x.dtype)
        x = self.dropout(self.position.embed(x, encoded))  # (B, T, D)
        context = Context(positions, self.position.rotation(encoded), mask, cache)
        for block in self.blocks:
            x = block(x, context)  # (B, T, D)
        return self.norm(x)  # (B, T, D)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Return the raw logits (B, T, V) of tokens (B, T). `hidden_states` has the same arguments."""
        return self.head(self.hidden_states(tokens, positions, cache), self.embed.weight)  # (B, T, V)


def enable_activation_checkpointing(net: Transformer) -> None:
    """Let each block keep only its input and recompute the rest in the backward pass (Chen et al., 2016).

    The gradients are equal, dropout included. A training step takes a third more FLOPs.
    """
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
