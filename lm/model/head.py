"""From features to raw logits: the only file that knows whether the head is tied to the embedding.

There is one table, owned by `Embedding`. The model hands it to the head, which may use it or not, so no parameter
has two names: nothing to re-tie after loading, moving, copying or sharding. Whoever needs to know asks the
structure: `parameters()` or `head.matrix(table)`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import HeadConfig
from lm.model.linear import Linear, linear


class Embedding(nn.Module):
    """The table (V, D): token ids (B, T) to vectors (B, T, D)."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.std = d_model**-0.5 if config.table_std is None else config.table_std
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_().mul_(self.std)  # scaled after the draw: arms of any scale share one draw

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """Features (B, T, D) and the embedding table (V, D) to raw logits (B, T, V): no bias, no softmax."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()

    def matrix(self, table: Tensor) -> Tensor:
        """The matrix (V, D) whose rows score the tokens."""
        raise NotImplementedError("a head regime says which matrix scores the tokens")

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return linear(x, self.matrix(table))


class TiedHead(Head):
    """The table scores as well as it embeds (Press and Wolf, 2016; Inan et al., 2016): V*D parameters fewer."""

    def matrix(self, table: Tensor) -> Tensor:
        return table


class UntiedHead(Head):
    """A matrix of its own, with a start and a learning rate of its own."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__(config, vocab_size, d_model)
        self.proj = Projection(config, vocab_size, d_model)

    def matrix(self, table: Tensor) -> Tensor:
        return self.proj.weight

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.proj(x)


class Projection(Linear):
    """A Linear (D to V) that starts normal with `head_std`: a small head starts the loss near ln V."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        assert config.head_std is not None
        self.std = config.head_std  # before Linear's own start, which calls reset_parameters
        super().__init__(d_model, vocab_size, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_().mul_(self.std)


HEADS: dict[str, type[Head]] = {"tied": TiedHead, "untied": UntiedHead}
