"""A text on disk, its split into training and validation text, and either in pieces: it never is in memory whole."""

import codecs
import hashlib
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn

import numpy as np
import xxhash
from tqdm import tqdm

from lm.data.paths import BLOCK
from lm.data.sources import Source
from lm.errors import UserError

CHARACTER = 4  # bytes of the longest one
# Bytes of a document, the hash of its name as a number in [0, 2**64), and a hash of its text.
RECORD = np.dtype([("size", "<u8"), ("position", "<u8"), ("digest", "<u8")])
PACKED = struct.Struct("<QQQ")  # the same
CHUNK = 1 << 13  # characters that a thread of the tokenizer encodes at a time
SAMPLE = 1 << 25  # bytes of text from which BPE is trained
SAMPLE_CHUNK = 1 << 16  # bytes: the sample of a larger text consists of evenly spaced chunks
# Where no token of byte-level BPE can cross: between a visible character and a space or line break.
SAFE_CUT = re.compile(r"(?<=\S)[ \n]")
ANYWHERE = re.compile(r"(?s:.)")


def progress(total: int | None, label: str, quiet: bool) -> "tqdm[NoReturn]":
    """A progress bar of bytes, which leaves nothing behind."""
    return tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=quiet, leave=False)


@dataclass(slots=True, frozen=True, eq=False)
class Text:
    """Documents one after the other in a file. Of the text itself nothing is held in memory."""

    path: Path
    hash: str  # of the names and texts of all documents, in order
    records: np.ndarray  # (n_documents,) of RECORD
    n_empty: int = 0  # documents without text, which are none of these

    @property
    def size(self) -> int:
        return int(self.records["size"].sum())

    def count(self, word: bytes) -> int:
        """How often a word occurs in the text."""
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return sum(1 for _ in re.finditer(re.escape(word), content))

    def joined(self) -> "Text":
        """The same text as one document."""
        text_hash = derived(self.hash, "joined")
        return replace(self, hash=text_hash, records=np.array([(self.size, 0, int(text_hash[:16], 16))], RECORD))

    def whole(self) -> "Part":
        ends = np.cumsum(self.records["size"].astype(np.int64))
        return Part(self, np.arange(len(ends)), np.stack([ends - np.diff(ends, prepend=0), ends], axis=1))


@dataclass(slots=True, frozen=True, eq=False)
class Part:
    """Some documents of a text, one of which may be cut."""

    text: Text
    documents: np.ndarray  # (n,) indices
    spans: np.ndarray  # (n, 2) the bytes of the text where each begins and ends

    @property
    def n_bytes(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def places(self) -> Iterator[tuple[int, int, bool]]:
        """Where blocks of the documents begin and end in the text, and whether a document ends with this block."""
        for first in range(0, len(self.spans), 1 << 16):
            for begin, end in self.spans[first : first + (1 << 16)].tolist():
                for start in range(begin, end, BLOCK):
                    yield start, min(start + BLOCK, end), start + BLOCK >= end

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """The bytes of the documents in blocks, and whether a document ends with this block."""
        with open(self.text.path, "rb", buffering=BLOCK) as file:
            for begin, end, last in self.places():
                file.seek(begin)
                yield file.read(end - begin), last


def read(source: Source, path: Path, *, max_bytes: int | None = None, quiet: bool = True) -> Text:
    """Write the text of a source to a file, up to `max_bytes`; nothing beyond them is read. Raises UserError.

    Empty documents are skipped.
    """
    content, records, size, n_empty = hashlib.sha256(), bytearray(), 0, 0
    with progress(max_bytes, "reading", quiet) as bar, open(path, "w+b", buffering=BLOCK) as file:
        for name, blocks in source.documents(max_bytes):
            n_bytes, block = 0, b""
            for block in blocks:
                file.write(block)
                bar.update(len(block))
                n_bytes += len(block)
            is_last = max_bytes is not None and size + n_bytes >= max_bytes
            is_single_block = n_bytes == len(block)
            if max_bytes is not None and size + n_bytes > max_bytes:
                n_bytes = _whole_characters(file, size, max_bytes - size)
                file.seek(size + n_bytes)
                file.truncate()
            if n_bytes:
                encoded, digest = name.encode(errors="surrogateescape"), xxhash.xxh3_64()
                content.update(len(encoded).to_bytes(8, "big") + encoded + n_bytes.to_bytes(8, "big"))
                for part in [block[:n_bytes]] if is_single_block else _read_again(file, size, n_bytes):
                    content.update(part)
                    digest.update(part)
                position = int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big")
                records += PACKED.pack(n_bytes, position, digest.intdigest())
            size, n_empty = size + n_bytes, n_empty + (not n_bytes and not is_last)
            if is_last:
                break
    if not size:
        raise UserError(f"{source.place}: the text is empty")
    return Text(path, content.hexdigest(), np.frombuffer(records, RECORD), n_empty)


def _whole_characters(file: IO[bytes], begin: int, size: int) -> int:
    """The first `size` bytes after `begin`, less those of a character that would be cut."""
    low = max(size - 3, 0)
    file.seek(begin + low)
    around = file.read(size + 1 - low)
    while around[size - low] & 0xC0 == 0x80:  # inside a character
        size -= 1
    return size


def _read_again(file: IO[bytes], begin: int, size: int) -> Iterator[bytes]:
    """The hash of a document begins with its size, which is known only at the end where it is decompressed."""
    for start in range(begin, begin + size, BLOCK):
        file.seek(start)
        yield file.read(min(BLOCK, begin + size - start))


def split(text: Text, val_fraction: float, val_max_bytes: int | None) -> tuple[Part, Part, str, float]:
    """Training and validation part of a text, the hash that identifies both, and the share at which a document was cut.

    A single document is cut once, as in the usual benchmarks: its beginning is for training, its end for validation.
    Of several, the hash of each one's name decides its side, independently of the others; if a side would be empty,
    the document whose hash is nearest moves to it. At most `val_max_bytes` are held out: the end of a single document,
    those documents of lowest hash that fit together, or the end of the one of lowest hash if it is larger. If that is
    more than twice `val_fraction` of the text, the last document is cut, so that it is `val_fraction`; the share that
    it was is returned then, else 0.
    """
    whole, capped = text.whole(), derived(text.hash, f"val_max_bytes={val_max_bytes}")
    if len(text.records) == 1:
        cut, is_capped = _cut(whole, val_fraction, val_max_bytes)
        train, val = (Part(text, whole.documents, np.array([span])) for span in ((0, cut), (cut, text.size)))
        return train, val, capped if is_capped else text.hash, 0.0
    positions = text.records["position"]
    order = np.argsort(positions, kind="stable")
    ends = np.cumsum(text.records["size"][order].astype(np.int64))
    n_plain = min(max(int(np.count_nonzero(positions / 2.0**64 < val_fraction)), 1), len(order) - 1)
    n_whole, n_bytes = n_plain, 0  # documents of lowest hash that are held out, and bytes of the end of the next one
    if val_max_bytes is not None:
        n_whole = int(np.searchsorted(ends[:n_plain], val_max_bytes, "right"))
        n_bytes = 0 if n_whole else val_max_bytes
    data_hash = text.hash if n_whole == n_plain else capped
    share = (n_bytes or int(ends[n_whole - 1])) / text.size
    is_excessive = share > 2 * val_fraction
    if is_excessive:
        limit = int(val_fraction * text.size)
        n_whole = int(np.searchsorted(ends, limit, "right"))
        n_bytes = limit - int(ends[n_whole - 1]) if n_whole else max(limit, CHARACTER)
        if n_bytes < CHARACTER or ends[n_whole] <= n_bytes:  # too small to cut
            n_whole, n_bytes = max(n_whole, 1), 0
        data_hash = text.hash if n_whole == n_plain else derived(text.hash, f"val_documents={n_whole}")
    is_val = np.zeros(len(order), bool)
    is_val[order[:n_whole]] = True
    is_train, train_spans, val_spans = ~is_val, whole.spans.copy(), whole.spans.copy()
    if n_bytes:
        cut, last = _last_bytes(text, int(whole.spans[order[n_whole], 1]), n_bytes), order[n_whole]
        is_val[last], train_spans[last, 1], val_spans[last, 0] = True, cut, cut
        data_hash = derived(text.hash, f"val_from={cut}")
    train = Part(text, whole.documents[is_train], train_spans[is_train])
    val = Part(text, whole.documents[is_val], val_spans[is_val])
    return train, val, data_hash, share if is_excessive else 0.0


def split_fold(text: Text, fold: int, val_fraction: float) -> tuple[Part, Part, str]:
    """Return the training and validation part where one of round(1/val_fraction) folds is held out.

    A single document is parted into folds of characters; the training part is what stands before and
    after the fold, as two documents. The last fold is the part that `split` holds out. Of several
    documents, the hash of each name decides its fold; fold 0 is the part that `split` holds out.
    Raises UserError if a side would be empty.
    """
    n_folds, whole = round(1 / val_fraction), text.whole()
    text_hash = derived(text.hash, f"fold={fold} of {n_folds}")
    if len(text.records) == 1:
        begin = 0 if fold == 0 else _place_of(whole, 1 - (n_folds - fold) * val_fraction)
        is_last = fold == n_folds - 1
        end = text.size if is_last else _place_of(whole, 1 - (n_folds - 1 - fold) * val_fraction)
        spans = [span for span in ((0, begin), (end, text.size)) if span[0] < span[1]]
        train = Part(text, np.zeros(len(spans), np.int64), np.array(spans))
        val = Part(text, whole.documents, np.array([(begin, end)]))
    else:
        position = text.records["position"] / 2.0**64  # in [0, 1)
        is_val = (position >= fold / n_folds) & (position < (fold + 1) / n_folds)
        train, val = (Part(text, whole.documents[side], whole.spans[side]) for side in (~is_val, is_val))
    if not train.n_bytes or not val.n_bytes:
        raise UserError(f"data.fold={fold}: leaves no text for training or validation; choose another fold")
    return train, val, text_hash


def _place_of(whole: Part, share: float) -> int:
    """Return the byte at which the character after a share of the characters of a single document begins."""
    ends = np.cumsum([0, *(np.count_nonzero(_starts(block)) for block, _ in whole.blocks())])
    chosen = int(int(ends[-1]) * share)
    index = int(np.searchsorted(ends, chosen, "right")) - 1
    with open(whole.text.path, "rb") as file:
        file.seek(index * BLOCK)
        return index * BLOCK + int(np.flatnonzero(_starts(file.read(BLOCK)))[chosen - ends[index]])


def derived(text_hash: str, change: str) -> str:
    return hashlib.sha256(f"{text_hash} {change}".encode()).hexdigest()


def _cut(whole: Part, val_fraction: float, val_max_bytes: int | None) -> tuple[int, bool]:
    """The byte at which the validation text of a single document begins, and whether its limit decides it.

    The share is counted in characters, for which all of the text is read.
    """
    ends = np.cumsum([0, *(np.count_nonzero(_starts(block)) for block, _ in whole.blocks())])  # before each block
    n_characters = int(ends[-1])
    chosen = min(int(n_characters * (1 - val_fraction)), n_characters - 1)
    index = int(np.searchsorted(ends, chosen, "right")) - 1
    with open(whole.text.path, "rb") as file:
        file.seek(index * BLOCK)
        plain = index * BLOCK + int(np.flatnonzero(_starts(file.read(BLOCK)))[chosen - ends[index]])
    if val_max_bytes is None or whole.n_bytes - plain <= val_max_bytes:
        return plain, False
    return _last_bytes(whole.text, whole.n_bytes, val_max_bytes), True


def _starts(block: bytes) -> np.ndarray:
    """Which bytes of UTF-8 begin a character, (n,)."""
    return np.frombuffer(block, np.int8) >= -64


def _last_bytes(text: Text, end: int, n: int) -> int:
    """The first character of the `n` bytes before `end`, 4 or more."""
    begin = max(end - n, 0)
    with open(text.path, "rb") as file:
        file.seek(begin)
        return begin + int(_starts(file.read(4)).argmax())


def overlap(train: Part, val: Part) -> dict[str, float]:
    """How many documents of the validation part, and what share of its bytes, are a training document as well.

    A document that is cut has a stretch in each part, and does not count.
    """
    documents = np.setdiff1d(train.documents, val.documents) if train.text is val.text else train.documents
    records = val.text.records[val.documents]
    shared = np.isin(records["digest"], train.text.records["digest"][documents])
    share = float(records["size"][shared].sum() / records["size"].sum())
    return {"n_documents": int(shared.sum()), "of": len(records), "share": share}


# --- a part in pieces


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
        while cut and (match := cut.search(held, max(begin + CHUNK, searched))):
            yield held[begin : match.start()], first
            begin, first = match.start(), False
        held = held[begin:]
        searched = len(held)
        if last:
            yield held, first
            held, searched, first = "", 0, True


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
