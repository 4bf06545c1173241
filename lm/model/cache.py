"""The key-value cache of generation, and which keys a query may see."""

import torch
from torch import Tensor


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
