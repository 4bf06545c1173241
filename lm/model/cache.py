"""Keys and values that generation has seen. The cache is an argument, so the model itself has no state."""

import torch
import torch.nn.functional as F
from torch import Tensor


class NoCache:
    """Nothing is remembered: each token attends to itself and its past within the call."""

    def mask(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class KVCache(NoCache):
    """Room for `length` positions in each layer; the key of position p lies at index p.

    So rows of unequal length share a batch without padding on the left: a row never looks past its own position,
    and whatever padding left there is overwritten before the row arrives.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def grow(self, length: int) -> None:
        """Make room for `length` positions; what is there stays."""
        more = length - self.length
        self.layers = {i: (F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))) for i, (k, v) in self.layers.items()}
        self.length = length

    def mask(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """positions: (B, T). What is added to scores, (B, 1, T, length): -inf where a query may not look, else 0."""
        hidden = torch.arange(self.length, device=positions.device) > positions[..., None]
        return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, H, T, K) at positions (B, T); return all keys and values, (B, H, length, K)."""
        if layer not in self.layers:
            shape = (k.shape[0], k.shape[1], self.length, k.shape[3])
            self.layers[layer] = (k.new_zeros(shape), v.new_zeros(shape))
        keys, values = self.layers[layer]
        index = positions[:, None, :, None].expand_as(k)
        return keys.scatter_(2, index, k), values.scatter_(2, index, v)


NO_CACHE = NoCache()
