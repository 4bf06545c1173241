"""Text to token ids, streamed from disk: a text of any size passes through little memory."""

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from lm.config import UserError
from lm.data.text import Part, progress
from lm.data.tokenizer import Tokenizer

CHUNK = 1 << 13  # characters that a thread of the tokenizer encodes at a time
GROUP = 1 << 20  # characters that are handed to all its threads: enough for 64, and little memory on any machine
IDS = 1 << 16  # ids that are decoded at a time
SAMPLE = 1 << 25  # bytes of text from which BPE is trained
SAMPLE_CHUNK = 1 << 16  # bytes: the sample of a larger text consists of evenly spaced chunks
# Where no token of byte-level BPE can cross: between a visible character and a space or line break.
SAFE_CUT = re.compile(r"(?<=\S)[ \n]")
# Where a word of ByteLevel ends as well: between letter and digit, or before a sign, in ASCII and ideographs.
WORD_END = re.compile(
    SAFE_CUT.pattern + r"|(?<=[A-Za-z\u4e00-\u9fa5])(?=[!-@\[-`{-~\u3001\u3002\uff0c])"
    r"|(?<=[0-9])(?=[!-/:-~\u4e00-\u9fa5])"
)
ANYWHERE = re.compile(r"(?s:.)")
PROBES = ("A", "a  b", "a\n\tb", "e\u0301", "\ufb01")  # which a lossy tokenizer does not give back


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

    Raises UserError where the tokenizer loses text: bits per byte would be wrong.
    """
    splittable = WORD_END if tokenizer.has_plain_words else SAFE_CUT if tokenizer.splittable else None
    cut = ANYWHERE if tokenizer.divisible else splittable
    with progress(part.n_bytes, label, quiet) as bar:
        for group in _groups(chunks(decoded(part), cut)):
            texts = [text for text, _ in group]
            ids = tokenizer.encode_all(texts)
            if not tokenizer.is_lossless:
                _compare(texts, tokenizer.decode_all(ids))
            flat: list[int] = []
            for (text, first), chunk in zip(group, ids, strict=True):
                flat += [*tokenizer.separator, *chunk] if first else chunk
                bar.update(len(text.encode()))
            yield np.array(flat, dtype=tokenizer.dtype)


def decoded_documents(tokenizer: Tokenizer, ids: np.ndarray) -> Iterator[str]:
    """The text of ids that were made elsewhere, in pieces of bounded size.

    Each document is decoded by itself, because a decoder may drop a space where a text begins.
    """
    stops = list(tokenizer.stops)
    blocks = ((i, np.isin(ids[i : i + GROUP], stops)) for i in range(0, len(ids), GROUP))
    starts = itertools.chain.from_iterable((i + np.flatnonzero(is_stop)).tolist() for i, is_stop in blocks)
    for begin, end in itertools.pairwise(itertools.chain([0], starts, [len(ids)])):
        yield from tokenizer.stream_chunks(ids[i : min(i + IDS, end)].tolist() for i in range(begin, end, IDS))


def lost(tokenizer: Tokenizer) -> str | None:
    """A short text that the tokenizer does not give back, though its vocabulary has all of it."""
    for probe in PROBES:
        with suppress(UserError):  # a character that the vocabulary lacks
            ids = tokenizer.encode(probe)
            if tokenizer.unknown not in ids and tokenizer.decode(ids) != probe:
                return probe
    return None


def _compare(texts: list[str], decoded_texts: list[str]) -> None:
    for text, other in zip(texts, decoded_texts, strict=True):
        if text != other:
            pairs = enumerate(zip(text, other, strict=False))
            at = next((i for i, (before, after) in pairs if before != after), min(len(text), len(other)))
            around = slice(max(at - 10, 0), at + 10)
            advice = "; give the validation text by data.val_path if this is where it was cut off"
            raise UserError(
                "tokenizer: loses part of the text, so bits per byte would be wrong:"
                f" {text[around]!r} comes back as {other[around]!r}"
                f"{advice if text.startswith(' ') and text.endswith(other) else ''}"
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
