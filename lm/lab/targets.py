"""Training targets that an n-gram model smooths: what ngram_smoothing mixes into each target."""

import numpy as np

from lm.data.ngram import discounts_of
from lm.errors import UserError

TOKEN_ORDER = 5  # tokens of an n-gram: contexts of up to four tokens
MOST_TOKENS = 10_000_000  # of a training text: the model keeps 50 to 100 bytes for each


class ExpectedTokens:
    """What the same kind of model, of tokens in place of bytes, expects at each place of its own training text.

    In place of the one token that stands there, that is a target for a model which reads its text so often that it
    would memorise its text (Malagutti et al., 2024). `n_rows`: the rows of the model's logits, which may be more than
    the tokens.
    """

    def __init__(
        self, tokens: np.ndarray, vocab_size: int, order: int = TOKEN_ORDER, n_rows: int | None = None
    ) -> None:
        n = len(tokens)
        if n > MOST_TOKENS:
            raise UserError(f"ngram_smoothing: is for a text of at most {MOST_TOKENS:,} tokens; this one has {n:,}")
        text = np.concatenate([np.full(order - 1, vocab_size), tokens]).astype(np.int64)
        contexts = [np.zeros(n, np.int32)]  # for each length, the number of the context of each place (n,)
        for length in range(1, order):
            longer = contexts[-1] * np.int64(vocab_size + 1) + text[order - 1 - length :][:n]
            contexts.append(np.unique(longer, return_inverse=True)[1].astype(np.int32))
        levels, places = list[tuple[np.ndarray, ...]](), np.arange(n)
        for context in reversed(contexts):  # `places` has one place of each distinct n-gram of the length above
            keys = context[places] * np.int64(vocab_size) + tokens[places]
            keys, first, counts = np.unique(keys, return_index=True, return_counts=True)
            places, (of, token) = places[first], np.divmod(keys, vocab_size)
            discount, total = np.array([0.0, *discounts_of(counts)])[np.minimum(counts, 3)], np.bincount(of, counts)
            begin = np.searchsorted(of, np.arange(len(total) + 1))  # of the tokens after each context, in order
            own, rest = (counts - discount) / total[of], np.bincount(of, discount) / total
            levels.append((context, begin, token, own.astype(np.float32), rest.astype(np.float32)))
        (_, _, token, own, rest), *self.levels = reversed(levels)
        self.unigrams = np.zeros(n_rows or vocab_size, np.float32)
        self.unigrams[:vocab_size] = np.float32(1 / vocab_size) * rest
        self.unigrams[token] += own

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the probabilities (n, V) of the token at each of the places (n,)."""
        p = np.tile(self.unigrams, (len(places), 1))
        for context, begin, token, own, rest in self.levels:
            at = context[places]
            n_tokens = begin[at + 1] - begin[at]
            row = np.repeat(np.arange(len(places)), n_tokens)
            entry = np.arange(len(row)) + np.repeat(begin[at] - np.cumsum(n_tokens) + n_tokens, n_tokens)
            p *= rest[at, None]
            p[row, token[entry]] += own[entry]
        return p
