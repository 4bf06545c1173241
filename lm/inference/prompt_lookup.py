"""Prompt lookup: draft tokens for speculative decoding, copied from what followed the last occurrence of an n-gram.

A forward pass over several tokens costs little more than one over a single token. The model therefore reads draft
tokens as well, and decoding accepts those that the model itself would have chosen, so the output is unchanged. This is
speculative decoding (Leviathan et al., 2023), with the text so far in place of a draft model (Yang et al., 2023).
"""

from itertools import cycle, islice

NGRAM_SIZES = (5, 4, 3, 2, 1)
MAX_DRAFT_TOKENS = 2 ** max(NGRAM_SIZES)


class PromptLookup:
    """An index of the n-grams of a text that grows at its end.

    >>> text = [5, 6, 7, 8, 5, 6]
    >>> PromptLookup(text).draft(), PromptLookup(text[:4]).draft(), PromptLookup([1, 1]).draft()
    ([7, 8, 5, 6], [], [1, 1])
    """

    def __init__(self, text: list[int]) -> None:
        self.text, self.n_indexed = text, 0
        self.after: dict[tuple[int, ...], int] = {}  # n-gram -> the index after its last occurrence

    def draft(self, max_tokens: int = MAX_DRAFT_TOKENS) -> list[int]:
        """The tokens that followed the last occurrence of the text's last n tokens, for the largest n that has one.

        There are up to 2^n of them, and at most `max_tokens`; a draft that reaches the end of the text repeats itself.
        """
        if max_tokens <= 0:
            return []
        for end in range(self.n_indexed, len(self.text)):
            self.after |= {tuple(self.text[end - n : end]): end for n in NGRAM_SIZES if n <= end}
        self.n_indexed = len(self.text)
        for n in NGRAM_SIZES:
            if start := self.after.get(tuple(self.text[-n:])):
                length = min(max_tokens, 2**n)
                return list(islice(cycle(self.text[start : start + length]), length))
        return []
