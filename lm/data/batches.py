"""Batches: an endless stream for training, one pass over the text for validation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # the target that CrossEntropyLoss ignores
Batch = tuple[Tensor, Tensor]


def shift(windows: np.ndarray) -> Batch:
    """Return tokens (B, T) and targets (B, T), the next tokens, of windows (B, T+1): the only shift of the project."""
    whole = torch.from_numpy(windows.astype(np.int64))
    return whole[:, :-1], whole[:, 1:]


@dataclass(eq=False)
class TrainingStream:
    """An endless stream of batches. Batch k is a pure function of (seed, k), so a resume needs no state.

    Each epoch divides the text into windows from a random offset and visits the windows in random order, so every token
    is a target about once an epoch. With `document_starts`, the places where documents begin, each epoch first puts the
    documents into a new order. A window that reaches beyond the end of a document then goes on with another document
    in each epoch.
    """

    tokens: np.ndarray
    _: KW_ONLY
    seq_len: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    overfit_batches: int = 0
    document_starts: np.ndarray | None = None  # (n,) increasing, from 0 on
    expected: Callable[[np.ndarray], np.ndarray] | None = None  # places (n,) to probabilities (n, V)
    smoothing: float = 0.0  # the part of each target that `expected` decides

    def __post_init__(self) -> None:
        last = len(self.tokens) - 1
        self.max_offset = min(self.seq_len - 1, last - self.seq_len)  # the largest offset that leaves a whole window
        self.windows_per_epoch = (last - self.max_offset) // self.seq_len
        self.epoch = -1  # none has begun

    def windows(self, numbers: Iterable[int]) -> np.ndarray:
        """Return the places in `tokens` of numbered windows, (B, T+1). The numbers count on from epoch to epoch."""
        return np.stack([self._window(*divmod(number, self.windows_per_epoch)) for number in numbers])

    def _window(self, epoch: int, index: int) -> np.ndarray:
        if epoch != self.epoch:
            self._begin(epoch)
        window = self.offset + int(self.order[index]) * self.seq_len + np.arange(self.seq_len + 1)
        if self.document_starts is None:
            return window
        return window + self.shifts[np.searchsorted(self.ends, window, side="right")]

    def _begin(self, epoch: int) -> None:
        generator = np.random.default_rng([self.seed, epoch])
        self.epoch, self.offset = epoch, int(generator.integers(self.max_offset + 1))
        self.order = np.arange(self.windows_per_epoch, dtype=np.uint32)
        generator.shuffle(self.order)
        if self.document_starts is not None:
            chosen = generator.permutation(len(self.document_starts))
            lengths = np.diff(self.document_starts, append=len(self.tokens))[chosen]
            self.ends = np.cumsum(lengths)  # ends of the documents of this epoch, one after the other
            self.shifts = self.document_starts[chosen] - (self.ends - lengths)  # from places in the epoch to the text

    def batch(self, k: int) -> Batch:
        """Return batch k of this rank: tokens (B, T), and targets (B, T), or probabilities (B, T, V)."""
        if self.overfit_batches:
            k %= self.overfit_batches
        first = (k * self.world_size + self.rank) * self.batch_size
        places = self.windows(range(first, first + self.batch_size))
        tokens, targets = shift(self.tokens[places])
        if self.expected is None:
            return tokens, targets
        probabilities = self.smoothing * torch.from_numpy(self.expected(places[:, 1:].flatten()))  # (B*T, V)
        probabilities[torch.arange(len(probabilities)), targets.flatten()] += 1 - self.smoothing
        return tokens, probabilities.view(*targets.shape, -1)


def validation_windows(n_tokens: int, seq_len: int, max_windows: int | None = None) -> np.ndarray:
    """Return the numbers of the windows to score, in order: all windows, or at most `max_windows`, evenly spaced.

    The numbers are the middles of k equal stretches of n windows, so the numbers do not depend on the seed. Window i
    holds the targets from token i * seq_len + 1 on.
    """
    n = -(-(n_tokens - 1) // seq_len)
    k = n if max_windows is None else min(n, max_windows)
    return (2 * np.arange(k) + 1) * n // (2 * k)


def validation_batches(
    tokens: np.ndarray, seq_len: int, batch_size: int, max_windows: int | None = None
) -> Iterator[Batch]:
    """Yield batches of windows without overlap: tokens and targets, each (B, T).

    All windows of a text together make every token except the first a target exactly once. Padding fills the last
    window of the text. Targets in the padding are IGNORED.
    """
    windows = validation_windows(len(tokens), seq_len, max_windows)
    for first in range(0, len(windows), batch_size):
        places = windows[first : first + batch_size, None] * seq_len + np.arange(seq_len + 1)
        ids = tokens[np.minimum(places, len(tokens) - 1)].astype(np.int64)
        inputs, targets = shift(np.where(places < len(tokens), ids, IGNORED))
        yield inputs.clamp(min=0), targets
