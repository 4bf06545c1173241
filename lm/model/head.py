"""From features to raw logits: the only file that knows whether the head is tied to the embedding.

There is one table, owned by `Embedding`. The model hands it to the head, which may use it or not, so no parameter
has two names: nothing to re-tie after loading, moving, copying or sharding. Whoever needs to know asks the
structure: `parameters()`, `embed.matrix()` or `head.matrix(table)`.
"""

import math
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import HeadConfig
from lm.model.linear import Linear, linear

State = MutableMapping[Tensor, dict[str, Any]]  # an optimizer's: parameter -> its moments


class Embedding(nn.Module):
    """The table (V, D): token ids (B, T) to vectors (B, T, D)."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.std = d_model**-0.5 if config.embedding_std is None else config.embedding_std
        self.scale = math.sqrt(d_model) if config.embedding_multiplier is None else config.embedding_multiplier
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_().mul_(self.std)  # scaled after the draw: arms of any scale share one draw

    def matrix(self) -> Tensor:
        """The matrix (V, D) whose rows are looked up."""
        return self.weight if self.scale == 1 else self.weight * self.scale

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) * self.scale


class Head(nn.Module):
    """Features (B, T, D) and the embedding table (V, D) to raw logits (B, T, V): no bias, no softmax."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()

    def matrix(self, table: Tensor) -> Tensor:
        """The matrix (V, D) whose rows score the tokens."""
        raise NotImplementedError("a head regime says which matrix scores the tokens")

    def factors(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """What is multiplied to give the logits: features like `x`, and a matrix (V, D)."""
        return x, self.matrix(table)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return linear(*self.factors(x, table))

    def start(self, table: Tensor) -> None:
        """Called once when the table has been drawn."""

    def advance(self, done: float, table: Tensor, state: State) -> None:
        """Called before each training step with the fraction of training that lies behind; `state` is the optimizer's.

        A pure function of `done`, so a resumed run stands where it stood.
        """

    def settle(self, table: Tensor) -> None:
        """Called before the model is saved for use: from here on the parameters alone say what the head does."""


class TiedHead(Head):
    """The table scores as well as it embeds (Press and Wolf, 2016; Inan et al., 2016): V*D parameters fewer."""

    def matrix(self, table: Tensor) -> Tensor:
        return table


class TiedProjectedHead(Head):
    """The table scores what a D x D projection, the identity at the start, makes of the features.

    For D*D parameters the map from token to token, E P E^T, need no longer be symmetric.
    """

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__(config, vocab_size, d_model)
        self.proj = IdentityProjection(d_model, d_model, bias=False)

    def matrix(self, table: Tensor) -> Tensor:
        return table @ self.proj.weight

    def factors(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return self.proj(x), table


class UntiedHead(Head):
    """A matrix of its own, with a start and a learning rate of its own."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__(config, vocab_size, d_model)
        self.proj = Projection(config, vocab_size, d_model)

    def matrix(self, table: Tensor) -> Tensor:
        return self.proj.weight

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.proj(x)


class UntiedFromEmbeddingHead(UntiedHead):
    """Untied, but equal to the table at the start: it tells what a better start gives from what freedom gives."""

    @torch.no_grad()
    def start(self, table: Tensor) -> None:
        self.proj.weight.copy_(table)


class UntiedMidTrainingHead(UntiedFromEmbeddingHead):
    """Tied until the fraction `split_at` of training, then a matrix of its own that goes on from the table's values.

    The second matrix is there from the start, without a gradient, so that an optimizer's state finds its place.
    """

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__(config, vocab_size, d_model)
        assert config.untie_at is not None
        self.untie_at, self.tied = config.untie_at, False

    def matrix(self, table: Tensor) -> Tensor:
        return table if self.tied else self.proj.weight

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return linear(x, self.matrix(table))

    @torch.no_grad()
    def advance(self, done: float, table: Tensor, state: State) -> None:
        own = self.proj.weight
        self.tied = done < self.untie_at
        own.requires_grad_(not self.tied)
        if not self.tied and own not in state:  # the moment of the split; a resumed run has been through it
            own.copy_(table)
            if table in state:
                state[own] = {name: value.clone() for name, value in state[table].items()}

    def settle(self, table: Tensor) -> None:
        if self.tied:
            self.start(table)


class Projection(Linear):
    """A Linear (D to V) that starts normal with `head_std`: a small head starts the loss near ln V."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        self.std = config.head_std or 0.0  # before Linear's own start, which calls reset_parameters
        super().__init__(d_model, vocab_size, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_().mul_(self.std)


class IdentityProjection(Linear):
    """A Linear that starts by doing nothing."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)


HEADS: dict[str, type[Head]] = {
    "tied": TiedHead,
    "untied": UntiedHead,
    "tied_projected": TiedProjectedHead,
    "untied_from_embedding": UntiedFromEmbeddingHead,
    "untied_midtraining": UntiedMidTrainingHead,
}
