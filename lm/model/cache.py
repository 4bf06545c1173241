"""The key-value cache of generation. It is passed to the model as an argument, so the model itself has no state."""

import torch
import torch.nn.functional as F
from torch import Tensor


class NoCache:
    """No cache: each token attends to itself and to the earlier tokens of the same call."""

    def mask(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None

    def keys(self, positions: Tensor) -> Tensor:
        """positions: (B, T), of the queries. Returns the positions of the keys, (B, 1, S) or (S,)."""
        return positions[:, None, :]

    def document_starts(self, marks: Tensor, positions: Tensor) -> Tensor:
        """The positions (B, T) at which the documents of the tokens at `positions` (B, T) begin.

        marks: (B, T), the position of each token that begins a document, and 0 for all other tokens.
        """
        return marks.cummax(1).values

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class KVCache(NoCache):
    """Keys and values of up to `length` positions in each layer; those of position p are at index p.

    Rows of different lengths can therefore share a batch without padding on the left: a row attends to no index beyond
    its own position, and what padding has written there is overwritten when the row reaches that position.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.starts: Tensor | None = None  # (B, length), of the document at each position

    def grow(self, length: int) -> None:
        """Extend the cache to `length` positions, keeping its content."""
        more = length - self.length
        self.layers = {i: (F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))) for i, (k, v) in self.layers.items()}
        self.starts = None if self.starts is None else F.pad(self.starts, (0, more))
        self.length = length

    def mask(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """positions: (B, T). Returns the additive mask (B, 1, T, length): 0 where a query may attend, else -inf."""
        return additive_mask(self.keys(positions) > positions[..., None], dtype)

    def keys(self, positions: Tensor) -> Tensor:
        return torch.arange(self.length, device=positions.device)

    def document_starts(self, marks: Tensor, positions: Tensor) -> Tensor:
        if self.starts is None:
            self.starts = marks.new_zeros(len(marks), self.length)
        before = self.starts.gather(1, (positions[:, :1] - 1).clamp(min=0))
        starts = torch.cat((before, marks), 1).cummax(1).values[:, 1:]
        self.starts.scatter_(1, positions, starts)
        return starts

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, H, T, K) at positions (B, T); returns all keys and values (B, H, length, K)."""
        if layer not in self.layers:
            shape = (k.shape[0], k.shape[1], self.length, k.shape[3])
            self.layers[layer] = (k.new_zeros(shape), v.new_zeros(shape))
        keys, values = self.layers[layer]
        index = positions[:, None, :, None].expand_as(k)
        return keys.scatter_(2, index, k), values.scatter_(2, index, v)


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden: (B, T, S), whether a key is hidden from a query. Returns (B, 1, T, S): -inf where it is, else 0."""
    return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)


NO_CACHE = NoCache()
