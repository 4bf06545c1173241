"""From hidden states to raw logits: the heads, tied to the embedding and untied.

There is one embedding matrix, owned by `Embedding`. The model passes it to the head, which may use it or not, so no
parameter has two names, and nothing has to be tied again after loading, moving, copying or sharding. Code that needs
to know whether the model is tied inspects `parameters()`, `embed.matrix()` or `head.matrix(embedding)`.

Five classes give the eight variants of configs/head/, which docs/model.md explains: tied_scaled and tied_naive are
`TiedHead`, and untied_chars is `UntiedHead`, with other settings.
"""

import math
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import HeadConfig
from lm.model.linear import Linear, linear

OptimizerState = MutableMapping[Tensor, dict[str, Any]]  # parameter -> its moments, as in torch.optim.Optimizer.state


class Embedding(nn.Module):
    """The embedding matrix (V, D): token ids (B, T) to vectors (B, T, D)."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.std = d_model**-0.5 if config.embedding_std is None else config.embedding_std
        self.multiplier = math.sqrt(d_model) if config.embedding_multiplier is None else config.embedding_multiplier
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_().mul_(self.std)  # scaled after the draw: variants of any scale share one draw

    def matrix(self) -> Tensor:
        """Return the input embeddings (V, D): what each token id becomes."""
        return self._scaled(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self._scaled(F.embedding(tokens, self.weight))  # (B, T, D)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.multiplier == 1 else x * self.multiplier


class Head(nn.Module):
    """Hidden states (B, T, D) and the embedding matrix (V, D) to raw logits (B, T, V): no bias, no softmax."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()

    def matrix(self, embedding: Tensor) -> Tensor:
        """Return the output embeddings (V, D): the matrix whose product with a hidden state gives the logits."""
        raise NotImplementedError("a subclass of Head returns its output embeddings")

    def factors(self, x: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the logits: hidden states shaped like `x`, and a matrix (V, D)."""
        return x, self.matrix(embedding)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Return the product of `factors`. An override returns the same: loss=chunked calls `factors` alone."""
        return linear(*self.factors(x, embedding))  # (B, T, V)

    def init_from_embedding(self, embedding: Tensor) -> None:
        """Set what begins as a copy of the embedding. Called once, after every module has drawn its parameters."""

    def on_train_step(self, progress: float, embedding: Tensor, optimizer_state: OptimizerState) -> None:
        """Called before each training step with the completed fraction of training.

        What it does depends on `progress` and `optimizer_state` alone, so a resumed run continues exactly.
        """

    def saved(self, embedding: Tensor) -> dict[str, Tensor]:
        """Return the parameters that are saved. With the embedding matrix they determine the logits."""
        return self.state_dict()


class TiedHead(Head):
    """The embedding matrix is the output matrix too (Press and Wolf, 2016; Inan et al., 2016): V*D parameters fewer."""

    def matrix(self, embedding: Tensor) -> Tensor:
        return embedding


class TiedProjectedHead(Head):
    """Tied, after a D x D projection of the hidden states that is initialised to the identity.

    It costs D*D parameters. With it the map from input token to output token, E P E^T, need not be symmetric.
    """

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__(config, vocab_size, d_model)
        self.proj = IdentityProjection(d_model, d_model, bias=False)

    def matrix(self, embedding: Tensor) -> Tensor:
        return embedding @ self.proj.weight  # (V, D) @ (D, D)

    def factors(self, x: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        return self.proj(x), embedding  # (B, T, D) and (V, D): cheaper than E P


class UntiedHead(Head):
    """An output matrix of its own, with its own initialisation and learning rate."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__(config, vocab_size, d_model)
        self.proj = OutputMatrix(config, vocab_size, d_model)

    def matrix(self, embedding: Tensor) -> Tensor:
        return self.proj.weight

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.proj(x)  # (B, T, V); a call, so that hooks fire


class UntiedFromEmbeddingHead(UntiedHead):
    """Untied, initialised from the embedding: it separates the effects of initialisation and of untying."""

    @torch.no_grad()
    def init_from_embedding(self, embedding: Tensor) -> None:
        self.proj.weight.copy_(embedding)


class UntiedMidTrainingHead(UntiedFromEmbeddingHead):
    """Tied until the fraction `untie_at` of training, then untied, starting from the embedding's values and moments.

    The output matrix exists from the start, without a gradient, so that checkpoints always have the same layout.
    """

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__(config, vocab_size, d_model)
        assert config.untie_at is not None
        self.untie_at = config.untie_at
        self.tied = False  # as in a loaded model and in an average of weights, which make no training step

    def matrix(self, embedding: Tensor) -> Tensor:
        return embedding if self.tied else self.proj.weight

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return linear(x, embedding) if self.tied else self.proj(x)  # (B, T, V)

    @torch.no_grad()
    def on_train_step(self, progress: float, embedding: Tensor, optimizer_state: OptimizerState) -> None:
        own = self.proj.weight
        self.tied = progress < self.untie_at
        own.requires_grad_(not self.tied)
        unties_now = not self.tied and own not in optimizer_state  # after this step, `own` has moments
        if unties_now:
            own.copy_(embedding)
            if embedding in optimizer_state:
                optimizer_state[own] = {name: value.clone() for name, value in optimizer_state[embedding].items()}

    def saved(self, embedding: Tensor) -> dict[str, Tensor]:
        return {"proj.weight": self.matrix(embedding).detach().clone()}  # safetensors takes no matrix twice


class OutputMatrix(Linear):
    """A Linear (D to V), initialised normal with `head_std`: a small one gives a first loss near ln V."""

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int) -> None:
        # Set first, because Linear's constructor calls reset_parameters. Null: init_from_embedding sets the values.
        self.std = config.head_std or 0.0
        super().__init__(d_model, vocab_size, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_().mul_(self.std)


class IdentityProjection(Linear):
    """A Linear initialised to the identity."""

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
