"""Text to token ids, streamed from disk: a text of any size passes through little memory."""

import codecs
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lm.config import UserError
from lm.data.text import Part, progress
from lm.data.tokenizer import Tokenizer

CHUNK = 1 << 13  # characters that a thread of the tokenizer encodes at a time
GROUP = 1 << 20  # characters that are handed to all its threads: enough for 64, and little memory on any machine
SAMPLE = 1 << 25  # bytes of text from which BPE is trained
SAMPLE_CHUNK = 1 << 16  # bytes: the sample of a larger text consists of evenly spaced chunks
# Where no token of byte-level BPE can cross: between a visible character and a space or line break.
SAFE_CUT = re.compile(r"(?<=\S)[ \n]")
ANYWHERE = re.compile(r"(?s:.)")


def decoded(part: Part) -> Iterator[tuple[str, bool]]:
    """The text of a part in blocks, and whether a document ends with this block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return ((decoder.decode(block), last) for block, last in part.blocks())


def chunks(blocks: Iterable[tuple[str, bool]], cut: re.Pattern[str] | None = SAFE_CUT) -> Iterator[tuple[str, bool]]:
    """The same text in strings of about CHUNK characters, and whether a document begins with this string.

    It is cut before `cut`, where the ids of the parts are those of the whole; a text without such a place stays in one
    string. With None, each document is one string.
    """
    held, searched, first = "", 0, True
    for block, last in blocks:
        held += block
        begin = 0
        while cut and len(held) - begin > CHUNK:
            match = cut.search(held, max(begin + CHUNK, searched))
            if match is None:
                searched = len(held)
                break
            yield held[begin : match.start()], first
            begin, first = match.start(), False
        held, searched = held[begin:], max(searched - begin, 0)
        if last:
            yield held, first
            held, searched, first = "", 0, True


def encode(tokenizer: Tokenizer, part: Part, label: str = "", quiet: bool = True) -> Iterator[np.ndarray]:
    """Yield the ids of a part in arrays, end of text before each document.

    The tokenizer works on all cores while the ids of the group before are written. Raises UserError where it loses
    text: bits per byte would be wrong.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    cut = ANYWHERE if tokenizer.divisible else SAFE_CUT if tokenizer.splittable else None

    def checked_ids(texts: list[str]) -> list[list[int]]:
        ids = tokenizer.encode_all(texts)
        if not tokenizer.is_lossless:
            _compare(texts, tokenizer.decode_all(ids))
        return ids

    def joined(group: list[tuple[str, bool]], ids: list[list[int]]) -> np.ndarray:
        flat: list[int] = []
        for (text, first), chunk in zip(group, ids, strict=True):
            flat += [*tokenizer.separator, *chunk] if first else chunk
            bar.update(len(text.encode()))
        return np.array(flat, dtype=dtype)

    with (
        progress(part.n_bytes, label, quiet) as bar,
        ThreadPoolExecutor(2) as pool,  # the ids of a group are taken out while the next one is encoded
    ):
        waiting = deque[tuple[list[tuple[str, bool]], Future[list[list[int]]]]]()
        for group in _groups(chunks(decoded(part), cut)):
            waiting.append((group, pool.submit(checked_ids, [text for text, _ in group])))
            if len(waiting) > 2:
                first, ids = waiting.popleft()
                yield joined(first, ids.result())
        for first, ids in waiting:
            yield joined(first, ids.result())


def _compare(texts: list[str], decoded_texts: list[str]) -> None:
    for text, other in zip(texts, decoded_texts, strict=True):
        if text != other:
            pairs = enumerate(zip(text, other, strict=False))
            at = next((i for i, (before, after) in pairs if before != after), min(len(text), len(other)))
            around = slice(max(at - 10, 0), at + 10)
            raise UserError(
                "tokenizer: loses part of the text, so bits per byte would be wrong:"
                f" {text[around]!r} comes back as {other[around]!r}"
            )


def _groups(texts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
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
    """The text from which BPE is trained: all up to SAMPLE bytes, beyond that as many in evenly spaced chunks."""
    if part.n_bytes <= SAMPLE:
        yield from (text for text, _ in chunks(decoded(part)))
    else:  # a chunk may begin and end inside a character
        yield from (piece.decode(errors="ignore") for piece in stretches(part, SAMPLE, SAMPLE_CHUNK))


def stretches(part: Part, n_bytes: int, size: int) -> Iterator[bytes]:
    """About `n_bytes` of a part: all of it if it has no more, else evenly spaced stretches of `size` bytes.

    One that reaches beyond a block comes in several pieces.
    """
    total, n, at = part.n_bytes, n_bytes // size, 0
    if total <= n_bytes:
        yield from (block for block, _ in part.blocks())
        return
    with open(part.text.path, "rb") as file:
        for begin, end, _ in part.places():
            length = end - begin
            i = at * n // total
            while (chunk := i * total // n - at) < length:  # where it begins in this block
                low, high = max(chunk, 0), min(chunk + size, length)
                if low < high:
                    file.seek(begin + low)
                    yield file.read(high - low)
                i += 1
            at += length
