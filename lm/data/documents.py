"""Documents, which are texts with a name, and the files that hold one each."""

import codecs
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lm.config import UserError

BLOCK = 1 << 20  # bytes that are read at a time


@dataclass(slots=True, frozen=True)
class Document:
    """A named text as blocks of UTF-8, so that a text of any size can pass through little memory."""

    name: str  # decides on which side of the split it is, so it must not depend on the machine
    size: int  # bytes in all blocks
    blocks: Iterable[bytes]  # a character may be divided between two; they can be read twice


@dataclass(slots=True, frozen=True)
class Fingerprint:
    """The state of a source: it holds the same text as long as its fingerprint is the same."""

    digest: str
    newest: int = 0  # ns since the epoch: the last change that clocks decide about; 0: they decide about none


class Source(Protocol):
    """Where text comes from."""

    @property
    def size(self) -> int | None:
        """About the bytes of its text, for a progress bar."""

    def fingerprint(self) -> Fingerprint: ...

    def documents(self) -> Iterator[Document]: ...


@dataclass(slots=True, frozen=True)
class FileBlocks:
    """A file of `size` bytes. Raises UserError naming it, and the byte at which it is not UTF-8."""

    path: Path
    size: int

    def __iter__(self) -> Iterator[bytes]:
        decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
        try:
            with open(self.path, "rb") as file:
                while True:
                    block = file.read(BLOCK)
                    held = len(decoder.getstate()[0])  # bytes of an unfinished character
                    decoder.decode(block, final=not block)
                    if not block:
                        break
                    read += len(block)
                    yield block
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: not UTF-8 at byte {read - held + error.start} ({error.reason})") from error
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from error
        if read != self.size:
            raise UserError(f"{self.path}: changed while it was being read, from {self.size} bytes to {read}")


def cut(document: Document, size: int) -> Document:
    """The beginning of a document: at most `size` bytes, and whole characters."""
    end, tail = 0, b""
    for block in document.blocks:
        window, begin = tail + block, end - len(tail)
        end += len(block)
        if end > size:
            while window[size - begin] & 0xC0 == 0x80:  # inside a character
                size -= 1
            return Document(document.name, size, first_bytes(document.blocks, size))
        tail = window[-3:]
    return document


def first_bytes(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    for block in blocks:
        if size <= len(block):
            yield block[:size]
            return
        yield block
        size -= len(block)


def read_text(path: Path) -> str:
    """The text of a file or pipe. Raises UserError naming it, and the byte at which it is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start} ({error.reason})") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


class Files:
    """A document from each file, or another kind of source that is made of local files.

    Their state is told by size, inode and the times of the last changes, as git tells it.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files  # name -> path
        self.size: int | None = sum(status(path).st_size for path in files.values())

    def fingerprint(self) -> Fingerprint:
        digest, newest, now = hashlib.sha256(), 0, time.time_ns()
        for name, path in self.files.items():
            found = status(path)
            state = [name, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
            digest.update(json.dumps(state).encode())
            changed = found.st_mtime_ns if found.st_mtime_ns <= now else 0  # some program has set a time to come
            newest = max(newest, changed, found.st_ctime_ns)
        return Fingerprint(digest.hexdigest(), newest)

    def documents(self) -> Iterator[Document]:
        for name, path in self.files.items():
            size = status(path).st_size
            yield Document(name, size, FileBlocks(path, size))


def status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
