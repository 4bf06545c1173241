"""Text on disk: a folder with `text.bin`, the documents joined, `documents.bin`, a record for each, and `meta.json`.

`lm/data/store.py` writes such folders.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lm.data.cache import checksum
from lm.system.files import read_json

FORMAT = 1  # of these files; a change causes them to be written again
# Bytes of the text, the hash of the name as a position in [0, 2**64), and a hash of the text.
RECORD = np.dtype([("size", "<u8"), ("position", "<u8"), ("digest", "<u8")])


def position(name: str) -> int:
    """Where the hash of a name lies in [0, 2**64): this decides the side of the split."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


@dataclass(slots=True, frozen=True)
class Text:
    """A text on disk. Nothing of it is held in memory."""

    folder: Path
    hash: str  # of the names and texts of all documents, in order
    size: int  # bytes of UTF-8
    n_documents: int
    is_joined: bool = False

    def joined(self) -> "Text":
        """The same text as one document."""
        return replace(
            self, hash=hashlib.sha256(f"{self.hash} joined".encode()).hexdigest(), n_documents=1, is_joined=True
        )

    def records(self) -> Iterator[np.ndarray]:
        """The records of all documents, in arrays (n,) of RECORD."""
        if self.is_joined:
            yield np.array([(self.size, 0, int(self.hash[:16], 16))], RECORD)
            return
        with open(self.folder / "documents.bin", "rb") as file:
            while block := file.read(RECORD.itemsize << 16):
                yield np.frombuffer(block, RECORD)


def folder_of(cache: Path, text_hash: str) -> Path:
    return cache / "texts" / text_hash[:32]


def open_text(folder: Path) -> Text:
    """Raises FileNotFoundError if there is no text, and ValueError if it is damaged."""
    meta = read_json(folder / "meta.json")
    if meta.get("format") != FORMAT:
        raise ValueError(f"format {meta.get('format')}")
    for name, right in meta["checksums"].items():
        if checksum(folder / name) != right:
            raise ValueError(f"{name} does not match its checksum")
    return Text(folder, meta["hash"], meta["size"], meta["n_documents"])
