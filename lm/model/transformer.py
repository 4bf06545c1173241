"""A decoder-only transformer: token ids in, raw logits out.

Shapes, here and in the files beside this one: B batch, T time, D d_model, H heads, K head_dim, V vocabulary.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.model.attention import Attention, Context
from lm.model.cache import NO_CACHE, NoCache
from lm.model.ffn import FFNS
from lm.model.head import HEADS, Embedding
from lm.model.norm import NORMS
from lm.model.position import POSITIONS
from lm.model.previous_token import aim_at_previous_tokens


def dropout(config: ModelConfig) -> nn.Module:
    """Nothing at p = 0: decoding spends more time on calls than on numbers."""
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)): the pre-norm order (Xiong et al., 2020)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = NORMS[config.norm](config.d_model, config)
        self.attn = Attention(config, layer)
        self.ffn_norm = NORMS[config.norm](config.d_model, config)
        self.ffn = FFNS[config.ffn](config)
        self.dropout = dropout(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), context))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """The whole model. `vocab_size` and `seq_len` (the longest context) come from the data.

    The seed decides every draw through the name of its module, so two models that differ in one part start equal
    in all others: with a tied and with an untied head, say, the blocks are the same bit for bit.

    >>> net = Transformer(ModelConfig(d_model=32, n_heads=2, d_ff=64), HeadConfig(), vocab_size=97, seq_len=16)
    >>> net(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 97])
    """

    def __init__(self, config: ModelConfig, head: HeadConfig, *, vocab_size: int, seq_len: int, seed: int = 0) -> None:
        super().__init__()
        self.config, self.head_config = config, head
        self.vocab_size, self.seq_len = vocab_size, seq_len
        with torch.device("meta"):  # shapes only; the values are drawn once, by name, below
            self.embed = Embedding(head, vocab_size, config.d_model)
            self.position = POSITIONS[config.position](config, seq_len)
            self.dropout = dropout(config)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
            self.norm = NORMS[config.norm](config.d_model, config)
            self.head = HEADS[head.kind](head, vocab_size, config.d_model)
        if buffer := next((name for name, _ in self.named_buffers()), None):
            raise BadInput(f"model.linear={config.linear}: has a buffer ({buffer}), which is not initialised by name")
        if torch.get_default_device().type != "meta":
            self.to_empty(device="cpu")
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every parameter from a generator keyed by (seed, module name)."""
        with torch.random.fork_rng(devices=[]):
            for name, module in self.named_modules():
                if next(module.parameters(recurse=False), None) is not None:
                    torch.default_generator.manual_seed(named_seed(seed, name))
                    module.reset_parameters()
        if self.config.previous_token_init:
            generator = torch.Generator().manual_seed(named_seed(seed, "lookback"))
            direction = F.normalize(torch.randn(self.config.d_model, generator=generator), dim=0)
            aim_at_previous_tokens(self.embed, self.blocks[: self.config.previous_token_init], self.position, direction)
        self.head.start(self.embed.weight)
        scale = self.config.residual_scale
        if scale is None:
            scale = 1 / math.sqrt(2 * self.config.n_layers)  # GPT-2: the stream's variance stays flat over depth
        for name, module in self.blocks.named_modules():
            if name.endswith(("o_proj", "down_proj")):  # a user's class may hold two factors: scale the last alone
                [p for p in module.parameters() if p.ndim == 2][-1].mul_(scale)

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None, cache: NoCache = NO_CACHE) -> Tensor:
        """tokens: (B, T) ids; returns what the head scores, (B, T, D).

        With a cache, `positions` (B, T) says where the tokens stand, and they also see what the cache holds.
        Raises ValueError if T is more than the model's seq_len.
        """
        if tokens.shape[1] > self.seq_len:
            raise ValueError(f"{tokens.shape[1]} tokens: this model's context holds {self.seq_len}")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.position.embed(self.embed(tokens), positions))
        context = Context(positions, self.position.rotation(positions), cache.mask(positions, x.dtype), cache)
        for block in self.blocks:
            x = block(x, context)
        return self.norm(x)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: NoCache = NO_CACHE) -> Tensor:
        """tokens: (B, T) ids; returns raw logits (B, T, V). See `features` for the rest."""
        return self.head(self.hidden_states(tokens, positions, cache), self.embed.weight)


def named_seed(seed: int, *names: object) -> int:
    """A 63-bit seed from a seed and names: the same everywhere, whatever was drawn before."""
    digest = hashlib.sha256(repr((seed, *map(str, names))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
