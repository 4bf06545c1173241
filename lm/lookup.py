"""A guess at what comes next: what followed the last time that the text stood where it stands now.

A model that reads several tokens in one pass costs little more than one that reads one. So decoding lets it read a
guess too and keeps as much of it as the model would have said itself, so that no token changes: speculative decoding
(Leviathan et al., 2023) with the text's own past in place of a second model (Yang et al., 2023).
"""

from itertools import cycle, islice

ORDERS = (3, 2, 1)  # last tokens that have to agree: many rather than few


class Lookup:
    """Over a text that grows at its end.

    >>> text = [5, 6, 7, 8, 5, 6]
    >>> Lookup(text).guess(3), Lookup(text[:4]).guess(3), Lookup([1, 1]).guess(3)
    ([7, 8, 5], [], [1, 1, 1])
    """

    def __init__(self, text: list[int]) -> None:
        self.text, self.known = text, 0
        self.after: dict[tuple[int, ...], int] = {}  # where the text went on after these tokens

    def guess(self, n: int) -> list[int]:
        """The next n ids, or none. A guess that reaches the end of the text goes round."""
        if n <= 0:
            return []
        for end in range(self.known, len(self.text)):
            self.after |= {tuple(self.text[end - order : end]): end for order in ORDERS if order <= end}
        self.known = len(self.text)
        for order in ORDERS:
            if at := self.after.get(tuple(self.text[-order:])):
                return list(islice(cycle(self.text[at : at + n]), n))
        return []
