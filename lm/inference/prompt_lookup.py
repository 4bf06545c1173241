"""A guess at what comes next: what followed the last time that the text stood where it stands now.

A model that reads several tokens in one pass costs little more than one that reads one. So decoding lets it read a
guess too and keeps as much of it as the model would have said itself, so that no token changes: speculative decoding
(Leviathan et al., 2023) with the text's own past in place of a second model (Yang et al., 2023).
"""

from itertools import cycle, islice

ORDERS = (5, 4, 3, 2, 1)  # last tokens that agree: the more they are, the longer the guess
LONGEST = 2 ** max(ORDERS)


class PromptLookup:
    """Over a text that grows at its end.

    >>> text = [5, 6, 7, 8, 5, 6]
    >>> PromptLookup(text).guess(), PromptLookup(text[:4]).guess(), PromptLookup([1, 1]).guess()
    ([7, 8, 5, 6], [], [1, 1])
    """

    def __init__(self, text: list[int]) -> None:
        self.text, self.known = text, 0
        self.after: dict[tuple[int, ...], int] = {}  # where the text went on after these tokens

    def guess(self, most: int = LONGEST) -> list[int]:
        """The next ids: twice as many for each further token that agrees, at most `most`; none where none agrees.

        A guess that reaches the end of the text goes round.
        """
        if most <= 0:
            return []
        for end in range(self.known, len(self.text)):
            self.after |= {tuple(self.text[end - order : end]): end for order in ORDERS if order <= end}
        self.known = len(self.text)
        for order in ORDERS:
            if at := self.after.get(tuple(self.text[-order:])):
                n = min(most, 2**order)
                return list(islice(cycle(self.text[at : at + n]), n))
        return []
