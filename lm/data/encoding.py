"""Text to token ids, streamed from disk: a text of any size passes through little memory."""

import codecs
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from lm.data.split import Part
from lm.data.tokenizer import Tokenizer

PIECE = 1 << 13  # characters that a thread of the tokenizer encodes at a time
GROUP = 1 << 20  # characters that are handed to all its threads: enough for 64, and little memory on any machine
SAMPLE = 1 << 25  # bytes of text from which BPE is trained
STRETCH = 1 << 16  # bytes: the sample of a larger text consists of evenly spaced stretches
# Where no token of byte-level BPE can cross: between a visible character and a space or line break.
CUT = re.compile(r"(?<=\S)[ \n]")
ANYWHERE = re.compile(r"(?s:.)")


def decoded(part: Part) -> Iterator[tuple[str, bool]]:
    """The text of a part in blocks, and whether a document ends with this block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return ((decoder.decode(block), last) for block, last in part.blocks())


def pieces(blocks: Iterable[tuple[str, bool]], cut: re.Pattern[str] | None = CUT) -> Iterator[tuple[str, bool]]:
    """The same text in strings of about PIECE characters, and whether a document begins with this string.

    It is cut before `cut`, where the ids of the parts are those of the whole; a text without such a place stays in one
    string. With None, each document is one string.
    """
    held, searched, first = "", 0, True
    for block, last in blocks:
        held += block
        begin = 0
        while cut and len(held) - begin > PIECE:
            found = cut.search(held, max(begin + PIECE, searched))
            if found is None:
                searched = len(held)
                break
            yield held[begin : found.start()], first
            begin, first = found.start(), False
        held, searched = held[begin:], max(searched - begin, 0)
        if last:
            yield held, first
            held, searched, first = "", 0, True


def encode(tokenizer: Tokenizer, part: Part, label: str = "", quiet: bool = True) -> Iterator[np.ndarray]:
    """Yield the ids of a part in arrays, end of text before each document.

    The tokenizer works on all cores while the ids of the group before are written.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with (
        tqdm(total=part.n_bytes, desc=label, unit="B", unit_scale=True, disable=quiet, leave=False) as bar,
        ThreadPoolExecutor(1) as pool,
    ):

        def ids(group: list[tuple[str, bool]], encoded: Future[list[list[int]]]) -> np.ndarray:
            flat: list[int] = []
            for (text, first), found in zip(group, encoded.result(), strict=True):
                flat += [*tokenizer.separator, *found] if first else found
                bar.update(len(text.encode()))
            return np.array(flat, dtype=dtype)

        cut, waiting = ANYWHERE if tokenizer.divisible else CUT if tokenizer.splittable else None, None
        for group in groups(pieces(decoded(part), cut)):
            begun = group, pool.submit(tokenizer.encode_all, [text for text, _ in group])
            if waiting:
                yield ids(*waiting)
            waiting = begun
        if waiting:
            yield ids(*waiting)


def groups(texts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    group, size = [], 0
    for text, first in texts:
        group.append((text, first))
        size += len(text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def sample(part: Part) -> Iterator[str]:
    """The text from which BPE is trained: all up to SAMPLE bytes, beyond that as many in evenly spaced stretches."""
    total, n, at = part.n_bytes, SAMPLE // STRETCH, 0
    if total <= SAMPLE:
        yield from (text for text, _ in pieces(decoded(part)))
        return
    for block, _ in part.blocks():
        end = at + len(block)
        i = at * n // total
        while (begin := i * total // n) < end:
            found = block[max(begin - at, 0) : max(begin + STRETCH - at, 0)]
            if found:
                yield found.decode(errors="ignore")  # it may begin and end inside a character
            i += 1
        at = end
