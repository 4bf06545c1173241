"""A text on disk, its split into training and validation text, and both in pieces: no text is in memory whole."""

import codecs
import hashlib
import mmap
import re
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import xxhash
from tqdm import tqdm

from lm.data.paths import BLOCK
from lm.data.sources import Source
from lm.errors import UserError
from lm.system.terminal import is_first_process

CHARACTER = 4  # bytes of the longest character
MIN_COPIED = 0.05  # least share of places of the validation text in the training text that gives a warning
# Bytes of a document, and the hash of its name as a number in [0, 2**64), which decides its side of the split.
RECORD = np.dtype([("size", "<u8"), ("name_hash", "<u8")])
CHUNK = 1 << 13  # characters that a thread of the tokenizer encodes at a time
# Where no token of byte-level BPE can cross: between a visible character and a space or line break.
SAFE_CUT = re.compile(r"(?<=\S)[ \n]")
ANYWHERE = re.compile(r"(?s:.)")


def progress(total: int | None, label: str) -> "tqdm[NoReturn]":
    """Return a progress bar of bytes, of the first process and on a terminal. The bar leaves nothing behind."""
    is_off = None if is_first_process() else True  # None: tqdm asks for a terminal
    return tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=is_off, leave=False)


@dataclass(slots=True, frozen=True, eq=False)
class Text:
    """Documents one after the other in a file. The text itself is not in memory."""

    path: Path
    hash: str  # of the names and texts of all documents, in order
    records: np.ndarray  # (n_documents,) of RECORD
    n_empty: int = 0  # number of documents without text, which are left out

    @property
    def size(self) -> int:
        return int(self.records["size"].sum())

    @property
    def spans(self) -> np.ndarray:
        """Return where each document begins and ends, (n_documents, 2) bytes."""
        ends = np.cumsum(self.records["size"].astype(np.int64))
        return np.stack([ends - np.diff(ends, prepend=0), ends], axis=1)

    def counts(self, words: Collection[bytes]) -> Counter[bytes]:
        """Return how often each word occurs in the text."""
        pattern = re.compile(b"|".join(map(re.escape, sorted(words, key=len, reverse=True))))
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return Counter(match[0] for match in pattern.finditer(text))

    def joined(self) -> "Text":
        """Return the same text as one document."""
        text_hash = derived(self.hash, "joined")
        return replace(self, hash=text_hash, records=np.array([(self.size, 0)], RECORD))

    def whole(self) -> "Part":
        return Part(self, self.spans)


@dataclass(slots=True, frozen=True, eq=False)
class Part:
    """Some documents of a text. A document that the split cuts has pieces in both parts."""

    text: Text
    spans: np.ndarray  # (n, 2) the bytes of the text where each document begins and ends

    @property
    def n_bytes(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Yield the bytes of the documents in blocks, and whether a document ends with this block."""
        with open(self.text.path, "rb", buffering=BLOCK) as file:
            for begin, end in self.spans.tolist():
                for start in range(begin, end, BLOCK):
                    file.seek(start)
                    yield file.read(min(BLOCK, end - start)), start + BLOCK >= end


def derived(text_hash: str, change: str) -> str:
    return hashlib.sha256(f"{text_hash} {change}".encode()).hexdigest()


def read(source: Source, path: Path, *, max_bytes: int | None = None) -> Text:
    """Write the text of a source to a file, up to `max_bytes`. Return the text.

    Leave out documents without text, and count them. Raises UserError.
    """
    records, end, n_empty, most = array("Q"), 0, 0, sys.maxsize if max_bytes is None else max_bytes
    with progress(max_bytes, "reading") as bar, open(path, "w+b", buffering=BLOCK) as file:
        for name, blocks in source.documents():
            begin = end
            for block in filter(None, blocks):
                file.write(block)
                bar.update(len(block))
                end += len(block)
                if end > most:
                    break
            is_last = end >= most
            if end > most:
                file.flush()
                starts = _characters_around(path, most)
                end = int(starts[starts <= most][-1])  # no character is cut
                file.truncate(end)
            if end > begin:
                name_hash = hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8]
                records.extend((end - begin, int.from_bytes(name_hash, "big")))
            elif not is_last:
                n_empty += 1
            if is_last:
                break
        file.seek(0)
        content = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    if not end:
        raise UserError(f"{source.place}: the text is empty")
    text_hash = derived(content, hashlib.sha256(records).hexdigest())
    return Text(path, text_hash, np.frombuffer(records, RECORD), n_empty)


# --- the split


def split(
    text: Text, val_fraction: float, val_max_bytes: int | None, fold: float | None = None
) -> tuple[Part, Part, str, float]:
    """Return training part, validation part, the hash that identifies both, and the share that was rejected.

    Hold out the end of a single document, counted in characters. Of several documents, hold out the
    documents whose names have the lowest hashes, so that a new document moves no other document. Hold
    out at most `val_max_bytes`. A few documents may have such sizes that more than twice or less than half of
    `val_fraction` of the text would be held out. Hold out `val_fraction` then, and return the share that would have
    been held out. Otherwise the returned share is 0. A limit cuts a document: its end is held out.

    With a fold, hold out part number `fold` of round(1/val_fraction) parts instead: another range of
    characters, or of hashes. Raises UserError if a fold leaves a side empty.
    """
    hold_out = _characters_of_one if len(text.records) == 1 else _documents_by_hash
    held_out, change, rejected_share = hold_out(text, val_fraction, val_max_bytes or text.size, fold)
    rest = np.stack([text.spans[:, 0], held_out[:, 0], held_out[:, 1], text.spans[:, 1]], axis=1).reshape(-1, 2)
    train, val = (Part(text, pieces[pieces[:, 0] < pieces[:, 1]]) for pieces in (rest, held_out))  # no empty pieces
    if fold is not None and not (train.n_bytes and val.n_bytes):
        reason = "leaves no text for training or validation, because there are too few documents"
        raise UserError(f"data.fold={fold:g}: {reason}; choose another fold, or in an ablation folds=false")
    return train, val, derived(text.hash, change) if change else text.hash, rejected_share


def _characters_of_one(
    text: Text, val_fraction: float, limit: int, fold: float | None
) -> tuple[np.ndarray, str, float]:
    """Return the held-out bytes (1, 2) of the document, how the split differs from the default, and 0.

    The second value is words that enter the hash, and is empty for the default split.
    """
    n_folds = round(1 / val_fraction)
    n_after = 0 if fold is None else n_folds - 1 - fold  # folds behind this one
    part = val_fraction if fold is None else 1 / n_folds
    begin = 0 if fold == 0 else _place_of(text, 1 - (n_after + 1) * part)
    end = _place_of(text, 1 - n_after * part) if n_after else text.size
    change = "" if fold is None else f"fold={fold:g} of {n_folds}"
    if end - begin > limit:
        starts = _characters_around(text.path, end - limit)
        begin, change = int(starts[starts >= end - limit][0]), f"{change} val_max_bytes={limit}".lstrip()
    return np.array([(begin, end)]), change, 0.0


def _documents_by_hash(
    text: Text, val_fraction: float, limit: int, fold: float | None
) -> tuple[np.ndarray, str, float]:
    """Return the held-out bytes (n, 2) of each document, how the split differs from the default, and a share.

    The second value is words that enter the hash, and is empty for the default split. The share is the part of the text
    that whole documents would hold out, if that is too much or too little; else 0.
    """
    n_folds = round(1 / val_fraction)
    low, high = (0.0, val_fraction) if fold is None else (fold / n_folds, (fold + 1) / n_folds)
    distances = text.records["name_hash"] - np.uint64(low * 2**64)  # distances from the range of hashes, modulo 2**64
    order = np.argsort(distances, kind="stable")
    ends = np.cumsum(text.records["size"][order].astype(np.int64))
    # n_usual documents have their hashes in the range; n_whole of them are held out whole, where a limit cuts.
    n_whole = n_usual = int(np.count_nonzero(distances / 2.0**64 < high - low))
    if fold is None:  # no side is left empty
        n_whole = n_usual = min(max(n_usual, 1), len(order) - 1)
    n_bytes = min(limit, int(ends[n_usual - 1])) if n_usual else 0
    wanted, rejected_share = val_fraction * text.size, 0.0
    is_too_little = wanted >= CHARACTER and n_bytes < min(limit, wanted) / 2
    if fold is None and (is_too_little or n_bytes > 2 * wanted):
        rejected_share, limit = n_bytes / text.size, min(limit, max(int(wanted), CHARACTER))
        if is_too_little:
            n_usual = int(np.searchsorted(ends, limit, "right")) + 1  # the last of these documents is cut
    held_out = np.repeat(text.spans[:, 1:], 2, axis=1)  # an empty end of each document
    change = "" if fold is None else f"fold={fold:g} of {n_folds}"
    if n_usual and ends[n_usual - 1] > limit:
        n_whole = int(np.searchsorted(ends, limit, "right"))
        last, rest = order[n_whole], limit - int(ends[n_whole - 1] if n_whole else 0)
        if CHARACTER <= rest < text.records["size"][last]:
            place = int(text.spans[last, 1]) - rest
            starts = _characters_around(text.path, place)
            held_out[last, 0] = starts[starts >= place][0]
            change = f"{change} val_from={held_out[last, 0]}".lstrip()
        else:  # too small to cut
            n_whole = max(n_whole, 1)
            change = f"{change} val_documents={n_whole}".lstrip() if n_whole < n_usual else change
    held_out[order[:n_whole], 0] = text.spans[order[:n_whole], 0]
    return held_out, change, rejected_share


def _characters(path: Path, start: int, n_bytes: int) -> np.ndarray:
    """Return where the characters begin in some bytes of a file of UTF-8, (n,)."""
    return start + np.flatnonzero(np.fromfile(path, np.int8, n_bytes, offset=start) >= -64)


def _characters_around(path: Path, place: int) -> np.ndarray:
    """Return where the characters around a byte of a file begin, (n,)."""
    return _characters(path, max(place - CHARACTER, 0), 2 * CHARACTER)


def _place_of(text: Text, share: float) -> int:
    """Return the byte at which the character after this share of the characters of a text begins."""
    starts = range(0, text.size, BLOCK)
    counts = np.cumsum([0, *(len(_characters(text.path, start, BLOCK)) for start in starts)])
    chosen = min(int(counts[-1] * share), int(counts[-1]) - 1)
    block = int(np.searchsorted(counts, chosen, "right")) - 1
    return int(_characters(text.path, starts[block], BLOCK)[chosen - counts[block]])


def overlap(train: Part, val: Part) -> float:
    """Return what share of the validation part, in bytes, is training documents as well."""
    trained, scored = (np.fromiter(_digests(part), np.uint64) for part in (train, val))
    sizes = val.spans[:, 1] - val.spans[:, 0]
    return float(sizes[np.isin(scored, trained)].sum() / sizes.sum())


def _digests(part: Part) -> Iterator[int]:
    digest = xxhash.xxh3_64()
    for block, last in part.blocks():
        digest.update(block)
        if last:
            yield digest.intdigest()
            digest.reset()


# --- a part in pieces


def chunks(part: Part, cut: re.Pattern[str] | None = SAFE_CUT) -> Iterator[tuple[str, bool]]:
    """Yield the same text in strings of about CHUNK characters, and whether a document begins with this string.

    Cut the text before a match of `cut`, because there the ids of the pieces are the ids of the whole text. A document
    without such a place stays in one string. With None as `cut`, each document is one string.
    """
    held, searched, first, decoder = "", 0, True, codecs.getincrementaldecoder("utf-8")()
    for block, last in part.blocks():
        held += decoder.decode(block)
        begin = 0
        while cut and (match := cut.search(held, max(begin + CHUNK, searched))):
            yield held[begin : match.start()], first
            begin, first = match.start(), False
        held = held[begin:]
        searched = len(held)
        if last:
            yield held, first
            held, searched, first = "", 0, True


def stretches(part: Part, n_bytes: int, size: int) -> Iterator[list[bytes]]:
    """Yield about `n_bytes` of a part as lists of pieces of documents.

    Yield all documents in one list if they have at most `n_bytes`, else evenly spaced stretches of `size` bytes.
    """
    lengths = part.spans[:, 1] - part.spans[:, 0]
    total, ends = int(lengths.sum()), np.cumsum(lengths)  # where each document ends in the part
    whole, n = total <= n_bytes, n_bytes // size
    with open(part.text.path, "rb") as file:
        for start in [0] if whole else [i * total // n for i in range(n)]:
            end = total if whole else min(start + size, total)
            pieces = []
            document = int(np.searchsorted(ends, start, "right"))
            while start < end:
                length = min(end, int(ends[document])) - start
                file.seek(int(part.spans[document, 1] - (ends[document] - start)))
                pieces.append(file.read(length))
                start, document = start + length, document + 1
            yield pieces
