"""Which tokens of a row attend to each other when several documents share the row: a class with and one without a mask.

A row of training tokens is cut from joined documents, each preceded by the end-of-text token, the separator.
"""

import torch
from torch import Tensor

from lm.model.cache import NoCache, additive_mask


class JoinedDocuments:
    """A row is one text: each token attends to all earlier tokens of its row, whatever document they belong to."""

    separator: int | None = None

    def layout(
        self, tokens: Tensor, positions: Tensor, cache: NoCache, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """The positions that are encoded, and the additive attention mask (B, 1, T, S); None: causal.

        tokens: (B, T) ids; positions: (B, T) or (T,), their places in the row; dtype: of the mask.
        """
        return positions, cache.mask(positions, dtype)


class SeparateDocuments(JoinedDocuments):
    """Each token attends to the earlier tokens of its own document alone, and positions start anew at each document.

    A document begins with its separator. If a row begins inside a document, the rest of that document has the positions
    of a row's beginning.
    """

    def __init__(self, separator: int) -> None:
        self.separator = separator

    def layout(self, tokens: Tensor, positions: Tensor, cache: NoCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions = positions.expand_as(tokens)
        starts = cache.document_starts(positions * (tokens == self.separator), positions)
        keys = cache.keys(positions)
        hidden = (keys > positions[..., None]) | (keys < starts[..., None])
        return positions - starts, additive_mask(hidden, dtype)


def documents(separator: int | None) -> JoinedDocuments:
    """None: documents are joined; else they are separate, and this token id begins each."""
    return JoinedDocuments() if separator is None else SeparateDocuments(separator)
