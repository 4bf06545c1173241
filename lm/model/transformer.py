"""A decoder-only transformer: token ids in, raw logits out.

Shapes, here and in the files beside this one: B batch size, T sequence length, S number of keys, D d_model, H number of
heads, K head_dim, V vocabulary size.
"""

import hashlib
import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.model.attention import Attention, Context
from lm.model.cache import NO_CACHE, NoCache
from lm.model.documents import documents
from lm.model.ffn import FFNS
from lm.model.head import HEADS, Embedding
from lm.model.lora import freeze_base
from lm.model.norm import NORMS
from lm.model.position import POSITIONS
from lm.model.previous_token import initialise_previous_token_heads

Part = TypeVar("Part", bound=nn.Module)


def dropout(config: ModelConfig) -> nn.Module:
    """nn.Dropout, or nn.Identity at p = 0: when decoding, module calls cost more than arithmetic."""
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)): pre-norm (Xiong et al., 2020). (B, T, D) to (B, T, D)."""

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
    """The whole model. `vocab_size`, `seq_len` (the longest context) and `document_separator` come from the data.

    `document_separator` is the id of the token that begins each document, if attention must not cross documents.

    Every parameter is drawn from a generator keyed by (seed, module name), so two models that differ in one part have
    equal values in all others: with a tied and with an untied head, for example, the blocks are equal bit for bit.

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
        self.seq_len = seq_len
        self.documents = documents(document_separator)

        def part(name: str, make: Callable[..., Part], *args: object) -> Part:
            torch.default_generator.manual_seed(named_seed(seed, name))  # for what the constructor draws
            return make(*args)

        device = "meta" if torch.get_default_device().type == "meta" else "cpu"
        with torch.device(device), torch.random.fork_rng(devices=[]):
            self.embed = part("embed", Embedding, head, vocab_size, config.d_model)
            self.position = part("position", POSITIONS[config.position], config, seq_len)
            self.dropout = dropout(config)
            self.blocks = nn.ModuleList(part(f"blocks.{i}", Block, config, i) for i in range(config.n_layers))
            self.norm = part("norm", NORMS[config.norm], config.d_model, config)
            self.head = part("head", HEADS[head.kind], head, vocab_size, config.d_model)
        if device != "meta":
            self.initialise(seed, constructed=True)
        freeze_base(self)

    @torch.no_grad()
    def initialise(self, seed: int, constructed: bool = False) -> None:
        """Draw the parameters of every module anew, by its `reset_parameters`.

        `constructed` says that the parameters hold the values that the constructors drew; a module without
        `reset_parameters` then keeps them. After `to_empty` there are no such values: with `constructed=False`, such
        a module raises BadInput, which names its class.
        """
        with torch.random.fork_rng(devices=[]):
            for name, module in self.named_modules():
                if next(module.parameters(recurse=False), None) is None:
                    continue
                if hasattr(module, "reset_parameters"):
                    torch.default_generator.manual_seed(named_seed(seed, name))
                    module.reset_parameters()
                elif not constructed:
                    raise BadInput(
                        f"{type(module).__name__}: has no reset_parameters() to initialise it after to_empty"
                    )
        if self.config.previous_token_init:
            generator = torch.Generator().manual_seed(named_seed(seed, "lookback"))  # the old name fixes the draw
            direction = F.normalize(torch.randn(self.config.d_model, generator=generator), dim=0)
            blocks = self.blocks[: self.config.previous_token_init]
            initialise_previous_token_heads(self.embed, blocks, self.position, direction)
        self.head.initialise_from(self.embed.weight)
        self.scale_residual_projections()

    @torch.no_grad()
    def load_from(self, other: "Transformer", tied_matrix: str | None = None) -> None:
        """Take over the weights of a model with the same ModelConfig; its head and its seq_len may differ.

        Adapters, which a finished model does not have, keep their values.
        `tied_matrix` is the rule of `Head.convert`. Raises BadInput for a seq_len or a head that cannot be had.
        """
        self.blocks.load_state_dict(self.blocks.state_dict() | other.blocks.state_dict())
        self.norm.load_state_dict(other.norm.state_dict())
        self.position.load_from(other.position)
        self.head.convert(self.embed, other.head, other.embed, tied_matrix)

    def scale_residual_projections(self) -> None:
        """Multiply o_proj and down_proj by model.residual_scale.

        The default is 1/sqrt(2 n_layers) as in GPT-2: the residual stream's variance then does not grow with depth.
        """
        scale = self.config.residual_scale
        if scale is None:
            scale = 1 / math.sqrt(2 * self.config.n_layers)
        for name, module in self.blocks.named_modules():
            if name.endswith(("o_proj", "down_proj")):
                own, every = (list(module.parameters(recurse)) for recurse in (False, True))
                # the matrix of an adapter is one of a part
                matrices = [one for one in own if one.ndim == 2] or [one for one in every if one.ndim == 2]
                if not matrices and scale != 1:
                    raise BadInput(f"model.linear={self.config.linear}: has no matrix; add model.residual_scale=1")
                for matrix in matrices[-1:]:  # a class may factorise its matrix: scaling the last factor scales it
                    matrix.mul_(scale)

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None, cache: NoCache = NO_CACHE) -> Tensor:
        """tokens: (B, T) ids; returns the final hidden states (B, T, D), which the head turns into logits.

        With a cache, `positions` (B, T) are the tokens' positions in their rows, and the tokens also attend to what the
        cache holds. Raises ValueError if T is more than the model's seq_len.
        """
        if tokens.shape[1] > self.seq_len:
            raise ValueError(f"{tokens.shape[1]} tokens: this model's context holds {self.seq_len}")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        encoded, mask = self.documents.layout(tokens, positions, cache, x.dtype)
        x = self.dropout(self.position.embed(x, encoded))
        context = Context(positions, self.position.rotation(encoded), mask, cache)
        for block in self.blocks:
            x = block(x, context)
        return self.norm(x)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: NoCache = NO_CACHE) -> Tensor:
        """tokens: (B, T) ids; returns raw logits (B, T, V). The arguments are those of `hidden_states`."""
        return self.head(self.hidden_states(tokens, positions, cache), self.embed.weight)


def named_seed(seed: int, *names: object) -> int:
    """A 63-bit seed that depends on its arguments alone, not on the machine or on earlier draws."""
    digest = hashlib.sha256(repr((seed, *map(str, names))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
