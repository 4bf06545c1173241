"""What a static n-gram model of bytes makes of a text: the figure beside the bits per byte of a run.

It is an interpolated, modified Kneser-Ney model (Chen and Goodman, 1999), estimated on the training text and scored on
the validation text, as the run is. The figure says what counting gets out of the same training text in a second. The
figure of a compressor would not say so, because a compressor would see the validation text alone.

With c(h, w) the count of byte w after context h, N(h) its sum over w and h' the context without its first byte,

    p(w | h) = (c(h, w) - D(c(h, w)) + sum_v D(c(h, v)) * p(w | h')) / N(h)

and p(w | h') where h has no counts. The count of a longest n-gram is the number of its occurrences. The count of a
shorter n-gram is the number of distinct bytes that precede it. Below the unigrams is the uniform distribution, 1 / 256.
D(1), D(2) and D(3 or more) follow for each length from how many n-grams have the counts 1 to 4.

A context runs on from one document into the next, and from the training into the validation text. A zero byte stands
between documents and is scored, as a run scores its end-of-text token. Zero bytes stand before the first document, as
context alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

TRAIN_BYTES, VAL_BYTES = 10_000_000, 4_000_000  # most bytes of a text: about a second of one core, 150 MB of memory
STRETCH = 1 << 14  # bytes of a stretch: a longer text gives evenly spaced stretches, joined as if they were one text
ORDER = 6  # bytes of an n-gram: contexts of up to five bytes, and n-grams that fit into 64 bits
FALLBACK = (0.5, 1.0, 1.5)  # discounts of the counts 1, 2 and 3 or more if the counts of counts give none, as in KenLM


def bits_per_byte(train: bytes, val: bytes, n_bytes: int | None = None) -> float:
    """Return -log2 p summed over the bytes of `val`, divided by `n_bytes`, by default the length of `val`.

    Return 8 if there is no training text, and 0 for an empty `val`.
    """
    before = bytes(ORDER - 1) + train
    ngrams, repeats = _distinct(_keys(before[1 - ORDER :] + val))
    p = probabilities(_keys(before), ngrams)
    return abs(float(repeats @ np.log2(p))) / max(len(val) if n_bytes is None else n_bytes, 1)


def ngram_figure(result: Mapping[str, Any]) -> str:
    """Return the figure of a result.json in words, or an empty text if an earlier version wrote no figure."""
    if (bits := result.get("baselines_bpb", {}).get("ngram")) is None:
        return ""
    share = result.get("ngram_share", 1.0)
    return f"n-gram {bits:.3f}" + (f" from {100 * share:.2g} % of the training text" if share < 1 else "")


def probabilities(seen: np.ndarray, ngrams: np.ndarray) -> np.ndarray:
    """Return p of the last byte of each n-gram, by the n-grams `seen` (m,) in the training text.

    ngrams: (n,), distinct and in order.
    """
    levels = []
    seen, counts = _distinct(seen)
    for order in range(ORDER, 0, -1):
        own, rest = _interpolation(seen, counts, ngrams)
        shorter = np.uint64((1 << 8 * (order - 1)) - 1)  # without the first byte
        ngrams, lower = np.unique(ngrams & shorter, return_inverse=True)
        levels.append((own, rest, lower))
        seen &= shorter
        seen, counts = _distinct(seen)  # each n-gram was there once for each byte before it
    p = np.full(len(ngrams), 1 / 256)  # p with no context
    for own, rest, lower in reversed(levels):
        p = own + rest * p[lower]
    return p


def _interpolation(seen: np.ndarray, counts: np.ndarray, ngrams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each n-gram, the part of p from its count, and the weight of p with a shorter context."""
    discounts, byte, following = np.array([0.0, *discounts_of(counts)]), np.uint64(8), np.uint64(1)
    begin = np.searchsorted(seen, ngrams >> byte << byte)  # the n-grams with the same context
    end = np.searchsorted(seen, ((ngrams >> byte) + following) << byte)
    n = _sums(counts, begin, end)
    kept_back = sum(discounts[i] * _sums(np.minimum(counts, 3) == i, begin, end) for i in (1, 2, 3))
    own = _sums(counts, np.searchsorted(seen, ngrams), np.searchsorted(seen, ngrams + following))
    divisor = np.maximum(n, 1)
    return (own - discounts[np.minimum(own, 3)]) / divisor, np.where(n > 0, kept_back / divisor, 1.0)


def _sums(values: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the sum of values[begin:end] for each pair of places; 0 for an empty range."""
    sums = np.zeros(len(values) + 1, np.int32)
    np.cumsum(values, out=sums[1:])
    return sums[end] - sums[begin]


def discounts_of(counts: np.ndarray) -> list[float]:
    """Return D(1), D(2) and D(3 or more). Replace a discount that is not above 0 by its FALLBACK."""
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == i)) for i in range(1, 5))
    y = n1 / (n1 + 2 * n2) if n1 else 0.0
    pairs = enumerate(((n1, n2), (n2, n3), (n3, n4)), 1)
    raw = [i - (i + 1) * y * higher / lower if y and lower else 0.0 for i, (lower, higher) in pairs]
    return [discount if discount > 0 else fallback for discount, fallback in zip(raw, FALLBACK, strict=True)]


def _keys(text: bytes) -> np.ndarray:
    """Return the n-gram that ends at each byte after the first ORDER - 1: a number whose lowest byte is the last."""
    codes = np.frombuffer(text, np.uint8)
    keys = np.zeros(len(codes) - ORDER + 1, np.uint64)
    for i in range(ORDER):
        keys <<= np.uint64(8)
        keys |= codes[i : i + len(keys)]
    return keys


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys in order, and how often each key occurs. Sort `keys` in place."""
    keys.sort()
    is_last = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=is_last[:-1])
    return keys[is_last], np.diff(np.flatnonzero(is_last).astype(np.int32), prepend=np.int32(-1))
