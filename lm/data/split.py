"""The split into training and validation text, decided from the records of the documents alone."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lm.data.text import Text

BLOCK = 1 << 20
LAST = 2**64 - 1  # the highest position
BUCKETS = 16  # bits of a position: documents are counted in 2**BUCKETS buckets of it


@dataclass(slots=True, frozen=True)
class Part:
    """Some documents of a text, one of which may be cut."""

    text: Text
    first: int = 0  # documents at positions from `first` to `last`
    last: int = LAST
    begin: int = 0  # and of the bytes of the text, those from `begin` to `end`
    end: int = 2**63 - 1
    cut: int = -1  # of the document in which this byte lies, only what is before it

    def spans(self) -> Iterator[np.ndarray]:
        """Begin and end of each document in text.bin, in arrays (n, 2)."""
        offset = 0
        for records in self.text.records():
            sizes = records["size"].astype(np.int64)
            ends = offset + np.cumsum(sizes)
            spans = np.stack([ends - sizes, ends], axis=1).clip(self.begin, self.end)
            spans[(spans[:, 0] <= self.cut) & (self.cut < spans[:, 1]), 1] = self.cut
            yield spans[self.chosen(records) & (spans[:, 0] < spans[:, 1])]
            offset = int(ends[-1])

    def chosen(self, records: np.ndarray) -> np.ndarray:
        return (records["position"] >= self.first) & (records["position"] <= self.last)

    @property
    def n_bytes(self) -> int:
        return sum(int((spans[:, 1] - spans[:, 0]).sum()) for spans in self.spans())

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """The bytes of the documents in blocks, and whether a document ends with this block."""
        with open(self.text.folder / "text.bin", "rb", buffering=BLOCK) as file:
            for begin, end in itertools.chain.from_iterable(map(np.ndarray.tolist, self.spans())):
                file.seek(begin)
                for at in range(begin, end, BLOCK):
                    yield file.read(min(BLOCK, end - at)), at + BLOCK >= end


def split(text: Text, val_fraction: float, val_max_bytes: int | None) -> tuple[Part, Part, str]:
    """Training and validation part of a text, and the hash that identifies both.

    A single document is cut once, as in the usual benchmarks: its beginning is for training, its end for validation.
    Of several, the hash of each one's name decides its side, independently of the others; if a side would be empty,
    the document whose hash is nearest moves to it. At most `val_max_bytes` are held out: the end of a single document,
    those documents of lowest hash that fit together, or the end of the one of lowest hash if it is larger.
    """
    if text.n_documents == 1:
        plain = character(text, val_fraction)
        cut = plain if val_max_bytes is None else max(plain, last_bytes(text, text.size, val_max_bytes))
        parts = Part(text, end=cut), Part(text, begin=cut)
    else:
        plain = threshold(text, val_fraction)
        cut = plain if val_max_bytes is None else min(plain, fitting(text, val_max_bytes))
        parts = Part(text, first=cut + 1), Part(text, last=cut)
    if val_max_bytes is not None and parts[1].n_bytes > val_max_bytes:  # the document of lowest hash, alone
        end = next(int(spans[0, 1]) for spans in parts[1].spans() if len(spans))
        begin = last_bytes(text, end, val_max_bytes)
        parts = Part(text, cut=begin), Part(text, last=cut, begin=begin)
        return *parts, hashlib.sha256(f"{text.hash} val_from={begin}".encode()).hexdigest()
    if cut == plain:
        return *parts, text.hash
    return *parts, hashlib.sha256(f"{text.hash} val_max_bytes={val_max_bytes}".encode()).hexdigest()


def published(text: Text, val: Text) -> tuple[Part, Part, str]:
    """The same for a text and a validation text of its own: both are used whole."""
    return Part(text), Part(val), hashlib.sha256(f"{text.hash} val={val.hash}".encode()).hexdigest()


@dataclass(slots=True, frozen=True)
class Shared:
    """Documents of the validation part whose text is that of a training document as well."""

    n_documents: int = 0
    of: int = 1  # documents of the validation part
    share: float = 0.0  # of its bytes

    @classmethod
    def between(cls, train: Part, val: Part) -> "Shared":
        records = np.concatenate([one[val.chosen(one)] for one in val.text.records()])
        found, same = np.zeros(len(records), bool), train.text == val.text
        for others in train.text.records():  # a document that is cut has a stretch in each part
            chosen = train.chosen(others) & ~(same & val.chosen(others))
            found |= np.isin(records["digest"], others["digest"][chosen])
        return cls(int(found.sum()), len(records), float(records["size"][found].sum() / records["size"].sum()))


def character(text: Text, val_fraction: float) -> int:
    """The byte at which the validation text of a single document begins: its share is counted in characters."""
    counts = [int(np.count_nonzero(starts(block))) for block, _ in Part(text).blocks()]
    left = min(int(sum(counts) * (1 - val_fraction)), sum(counts) - 1)
    for i, (block, _) in enumerate(Part(text).blocks()):
        if left < counts[i]:
            return i * BLOCK + int(np.flatnonzero(starts(block))[left])
        left -= counts[i]
    raise AssertionError("a text has changed on disk")


def starts(block: bytes) -> np.ndarray:
    """Which bytes of UTF-8 begin a character, (n,)."""
    return np.frombuffer(block, np.int8) >= -64


def last_bytes(text: Text, end: int, n: int) -> int:
    """The first character of the `n` bytes before `end`, 4 or more."""
    begin = max(end - n, 0)
    block, _ = next(Part(text, begin=begin, end=end).blocks())
    return begin + int(starts(block[:4]).argmax())


def threshold(text: Text, val_fraction: float) -> int:
    """The highest position of a document that is for validation."""
    lowest, highest, below = LAST, 0, -1
    for records in text.records():
        positions = records["position"]
        lowest, highest = min(lowest, int(positions.min())), max(highest, int(positions.max()))
        inside = positions[positions / 2**64 < val_fraction]
        below = max(below, int(inside.max(initial=0)) if len(inside) else -1)
    found = max(below, lowest)
    if found < highest:
        return found
    return max(int(one.max()) for records in text.records() if len(one := before(records, highest)))


def before(records: np.ndarray, position: int) -> np.ndarray:
    return records["position"][records["position"] < position]


def fitting(text: Text, n_bytes: int) -> int:
    """The highest position up to which all documents together have at most `n_bytes`, or else the lowest one."""
    sizes, lowest = np.zeros(2**BUCKETS), LAST
    for records in text.records():
        sizes += np.bincount(bucket(records), records["size"], 2**BUCKETS)
        lowest = min(lowest, int(records["position"].min()))
    full = int(np.searchsorted(np.cumsum(sizes), n_bytes, "right"))  # the bucket whose documents do not all fit
    if full == 2**BUCKETS:
        return LAST
    inside = np.sort(np.concatenate([one[bucket(one) == full] for one in text.records()]), order="position")
    n_fitting = int(np.searchsorted(sizes[:full].sum() + np.cumsum(inside["size"]), n_bytes, "right"))
    last = int(inside["position"][n_fitting - 1]) if n_fitting else (full << 64 - BUCKETS) - 1
    return max(last, lowest)


def bucket(records: np.ndarray) -> np.ndarray:
    return (records["position"] >> np.uint64(64 - BUCKETS)).astype(np.int64)
