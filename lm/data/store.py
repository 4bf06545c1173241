"""The texts that were read: each is kept once, in a folder named by its hash, and looked up by its source.

As in git, `sources/` is an index from the state of a source (sizes, times and inodes of its files) to the hash of its
text, and `texts/` holds the texts by that hash. A folder is written beside its final name under a lock, and renamed.
"""

import hashlib
import logging
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash
from tqdm import tqdm

from lm.config import UserError
from lm.data.cache import checksum, locked, partial_folder
from lm.data.documents import Document, Source, cut
from lm.data.text import FORMAT, Text, folder_of, open_text, position
from lm.system.files import STALE_SECONDS, read_json, remove_partial, write_json

PACKED = struct.Struct("<QQQ")  # a record, as in lm/data/text.py
RACY = 2 * 10**9  # ns: the coarsest times of file systems

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Scan:
    """What one pass over a source has found."""

    hash: str
    size: int
    n_documents: int
    fingerprint: str
    clean: bool  # any later change of the source is certain to change its fingerprint


def limited(documents: Iterator[Document], max_bytes: int | None) -> Iterator[Document]:
    """The documents that are not empty, up to `max_bytes` of text; nothing beyond them is read."""
    size = 0
    for document in documents:
        size += document.size
        if max_bytes is not None and size > max_bytes:
            document = cut(document, document.size - (size - max_bytes))
        if document.size:
            yield document
        if max_bytes is not None and size >= max_bytes:
            return


def scan(
    source: Source,
    max_bytes: int | None = None,
    quiet: bool = True,
    text: IO[bytes] | None = None,
    records: IO[bytes] | None = None,
) -> Scan:
    """Read a source once, and write its text and records if asked to. Raises UserError if it changes meanwhile."""
    begun, before = time.time_ns(), source.fingerprint()
    content, size, n = hashlib.sha256(), 0, 0
    total = min((n for n in (None if quiet else source.size, max_bytes) if n is not None), default=None)
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=quiet, leave=False) as bar:
        for document in limited(source.documents(), max_bytes):
            name, digest = document.name.encode(), xxhash.xxh3_64()
            content.update(len(name).to_bytes(8, "big") + name + document.size.to_bytes(8, "big"))
            for block in document.blocks:
                content.update(block)
                digest.update(block)
                if text is not None:
                    text.write(block)
                bar.update(len(block))
            if records is not None:
                records.write(PACKED.pack(document.size, position(document.name), digest.intdigest()))
            size, n = size + document.size, n + 1
    after = source.fingerprint()
    if after != before:
        raise UserError("data.path: the text changed while it was being read; run the same command again")
    clean = after.newest < begun - RACY
    return Scan(content.hexdigest(), size, n, after.digest, clean)


class StoredText:
    """The text of a source, kept in `cache`. Making one reads the source unless it is as it was read before.

    `request` is a hash of the settings that select the text. Raises UserError.
    """

    def __init__(
        self, cache: Path, source: Source, what: str, *, request: str, max_bytes: int | None, verify: bool, quiet: bool
    ) -> None:
        self.cache, self.source, self.what, self.max_bytes, self.quiet = cache, source, what, max_bytes, quiet
        self.entry, self.request = cache / "sources" / f"{request}.json", cache / "texts" / request
        self.hash = self.find(verify)
        if verify and self.folder.exists():
            self.open()

    @property
    def folder(self) -> Path:
        return folder_of(self.cache, self.hash)

    def find(self, verify: bool) -> str:
        """The hash of the text that the source holds now."""
        entry = self.indexed()
        if entry and self.holds(entry, verify):
            return str(entry["text"])
        with locked(self.request):
            newer = self.indexed()
            if newer and newer != entry and self.holds(newer):  # another process has read it meanwhile
                return str(newer["text"])
            return self.write()

    def indexed(self) -> dict[str, Any] | None:
        try:
            entry = read_json(self.entry)
        except (OSError, ValueError):
            return None
        return entry if entry.get("format") == FORMAT else None

    def holds(self, entry: dict[str, Any], verify: bool = False) -> bool:
        """Whether the source still has the text of an entry. It is read again if its state leaves that open."""
        if entry["clean"] and not verify and self.source.fingerprint().digest == entry["fingerprint"]:
            return True
        again = scan(self.source, self.max_bytes, self.quiet)
        if again.hash != entry["text"]:
            return False
        with suppress(OSError):  # a cache that is read-only still serves
            self.index(again)
        return True

    def index(self, found: Scan) -> None:
        state = {"format": FORMAT, "fingerprint": found.fingerprint, "clean": found.clean, "text": found.hash}
        self.entry.parent.mkdir(exist_ok=True)
        remove_partial(self.entry.parent, older_than=STALE_SECONDS)  # without a lock: others may be writing theirs
        write_json(self.entry, state)

    def open(self) -> Text:
        """The text on disk, after a check of all its bytes. If it is damaged or absent, the source is read again."""
        with suppress(FileNotFoundError):
            return self.checked()
        with locked(self.request):
            with suppress(FileNotFoundError):  # another process may have written it meanwhile
                return self.checked()
            if self.write() != self.hash:
                raise UserError(f"{self.what}: the text has changed since the start; run the same command again")
            return open_text(self.folder)

    def checked(self) -> Text:
        """Raises FileNotFoundError if there is no such text, also after removing a damaged one."""
        try:
            return open_text(self.folder)
        except (ValueError, KeyError) as error:
            log.warning("%s: damaged (%s); the text is read again", self.folder, error)
            shutil.rmtree(self.folder)
            raise FileNotFoundError from error

    def write(self) -> str:
        """Read the source and write its text. The caller holds the lock."""
        with partial_folder(self.request) as partial:
            with open(partial / "text.bin", "wb") as text, open(partial / "documents.bin", "wb") as records:
                found = scan(self.source, self.max_bytes, self.quiet, text, records)
            if not found.size:
                raise UserError(f"{self.what}: the text is empty")
            checksums = {name: checksum(partial / name) for name in ("text.bin", "documents.bin")}
            meta = {"hash": found.hash, "size": found.size, "n_documents": found.n_documents, "checksums": checksums}
            write_json(partial / "meta.json", {"format": FORMAT, **meta})
            folder = folder_of(self.cache, found.hash)
            with locked(folder):  # another process may write the same text from another source
                try:
                    open_text(folder)
                except (FileNotFoundError, ValueError, KeyError):
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(partial, folder)
        self.index(found)
        return found.hash
