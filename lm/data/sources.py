"""Sources of text: files, columns of tables, the Hugging Face Hub."""

import codecs
import hashlib
import logging
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Protocol

import xxhash

from lm.config import DataConfig
from lm.data import paths
from lm.errors import UserError
from lm.registry import load
from lm.system.files import json_sha256

EXCLUDED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3")
TABLE_FILES = ("json", "csv", "parquet")
COMMIT = re.compile("[0-9a-f]{40}")  # of a data set on the Hub

log = logging.getLogger(__name__)
Names = dict[str, Path]  # of files, as they are called in the text, and where each lies
Documents = Iterator[tuple[str, Iterable[bytes]]]  # a name, which decides the side of the split, and blocks of UTF-8


class Source(Protocol):
    """Where text comes from. What it raises for unusable text is a UserError or an OSError that names the file."""

    place: str  # the setting that names it, for messages

    def state(self) -> str:
        """Return a digest of the content and, where they decide something, of the names."""

    def documents(self, max_bytes: int | None) -> Documents:
        """The documents in order. Of each, little more than `max_bytes` are read."""


class Files:
    """Files by their names, or the one that was downloaded from an address.

    The state of a file is its content, as far as it is read. In a table, each row of a column is a document. Else each
    file is one, without its byte-order mark; with a separator several, named by the file and their number there. The
    name of a single text is no part of it: renamed, it is the same one. Of several, it decides the split.
    """

    def __init__(self, config: DataConfig, place: str, files: Names) -> None:
        self.config, self.place, self.files, self.sha256 = config, place, files, (config.sha256 or "").lower()
        if config.source in ("text", "stdlib"):
            self.files = files if len(files) > 1 else dict(zip([""], files.values(), strict=True))
            for kind in TABLE_FILES:
                if all(paths.suffix(file) in paths.SUFFIXES[kind] for file in files.values()):
                    log.warning("%s: is read as plain text; data=%s reads the text in a column of it", place, kind)
                    return
            if config.source == "text" and _begins_as_json(next(iter(files.values()))):
                log.warning("%s: looks like JSON Lines; data=json reads the text in a column of it", place)

    def state(self) -> str:
        is_text, is_cut = self.config.source in ("text", "stdlib"), self.config.max_bytes is not None
        is_cut = is_cut and is_text and self.config.separator is None and not self.sha256
        states = []
        for name, file in self.files.items():
            limit = (self.config.max_bytes or 0) + paths.BLOCK if is_cut and not paths.is_compressed(file) else inf
            states.append([name if is_text else "", _digest(file, limit)])
            if self.config.source == "tokens":  # which stay where they are
                states.append([str(file.resolve()), ""])
        return json_sha256(states)

    def documents(self, max_bytes: int | None) -> Documents:
        if self.config.source == "tokens":
            raise UserError(f"{self.place}: holds the tokens of one tokenizer, expected a text")
        return self._rows() if self.config.source in TABLE_FILES else self._texts(max_bytes)

    def _rows(self) -> Documents:
        kind, column = self.config.source, self.config.column
        with paths.reading_from(self.place, kind):
            yield from load("lm.lab.sources.tables.documents_in")(self.files.values(), kind, column)

    def _texts(self, max_bytes: int | None) -> Documents:
        if self.sha256 and len(self.files) > 1:
            raise UserError(f"{self.place}: is {len(self.files)} files, expected one file of data.sha256={self.sha256}")
        separator, n_documents = self.config.separator, 0
        for name, file in self.files.items():
            if separator is None:
                limit = inf if max_bytes is None else max_bytes + 4  # with a character that is cut
                yield name, self._blocks(file, limit)
                continue
            for number, document in enumerate(_parted(self._blocks(file, inf), separator.encode()), 1):
                yield f"{name}:{number}", [document]
                n_documents += 1
        if separator is not None and n_documents == len(self.files):
            raise UserError(f"data.separator={separator}: does not occur in {self.place}")

    def _blocks(self, file: Path, limit: float) -> Iterator[bytes]:
        decoder, digest, n_read = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256(), 0
        place = f"{self.place} (downloaded to {file})" if paths.is_url(self.place) else str(file)
        with paths.reading_from(place, "text"), paths.open_file(file) as content:
            try:
                while block := content.read(paths.BLOCK):
                    is_first, is_wanted = n_read == 0, n_read < limit
                    n_read += len(block)
                    digest.update(block)
                    if is_wanted:
                        if b"\0" in block:
                            raise _not_utf8(file, n_read - len(block) + block.index(b"\0"), "a byte of zero")
                        decoder.decode(block)
                        yield block.removeprefix(codecs.BOM_UTF8) if is_first else block
                    elif not self.sha256:
                        return
                if n_read < limit:
                    decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:
                raise _not_utf8(file, n_read - len(error.object) + error.start, error.reason) from error
        if self.sha256 not in ("", digest.hexdigest()):
            raise UserError(f"{place}: has {digest.hexdigest()}, expected one file of data.sha256={self.sha256}")


def _begins_as_json(file: Path) -> bool:
    with suppress(Exception), paths.open_file(file) as content:  # what is wrong with a file is said when it is read
        return content.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b'{"')
    return False


def _digest(file: Path, limit: float) -> str:
    """XXH3 with 128 bits of the first `limit` bytes of a file, as fast as they are read."""
    digest, n_read = xxhash.xxh3_128(), 0
    with open(file, "rb", buffering=0) as content:
        while n_read < limit and (block := content.read(paths.BLOCK)):
            digest.update(block)
            n_read += len(block)
    return digest.hexdigest()


def _parted(blocks: Iterable[bytes], separator: bytes) -> Iterator[bytes]:
    """The documents between the separators of a text."""
    text, searched = bytearray(), 0
    for block in blocks:
        text += block
        while (end := text.find(separator, searched)) >= 0:
            yield bytes(text[:end])
            del text[: end + len(separator)]
            searched = 0
        searched = max(len(text) - len(separator) + 1, 0)
    yield bytes(text)


def _not_utf8(file: Path, at: int, reason: str) -> UserError:
    with paths.open_file(file) as content:
        start = content.read(paths.BLOCK)
    if start.startswith(b"PAR1"):
        return UserError(f"{file}: is a Parquet file; use data=parquet data.column=NAME")
    guess = "utf-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
    cure = f"save it as UTF-8, for example by: iconv -f {guess} -t utf-8 FILE > NEW"
    if guess == "latin1" and re.search(rb"[\0-\x08]", start):
        cure = "take the text out of a document or an archive, or choose files by a glob such as 'FOLDER/*.txt'"
        cure += "; of UTF-16: iconv -f utf-16le -t utf-8 FILE > NEW"
    return UserError(f"{file}: not UTF-8 at byte {at} ({reason}); {cure}")


# --- the Hugging Face Hub


# --- the choice


def open_sources(config: DataConfig) -> list[Source]:
    """The text, and the validation text if data.val_path or data.val_split names one. Raises UserError."""
    source = open_source(config)
    if config.val_split is not None:
        return [source, open_source(replace(config, split=config.val_split, val_split=None), "data.val_split")]
    if config.val_path is None:
        return [source]
    val = open_source(replace(config, path=config.val_path, val_path=None, sha256=None), "data.val_path")
    training = {path.resolve() for path in _local_paths(source)}
    if common := next((path for path in _local_paths(val) if path.resolve() in training), None):
        raise UserError(f"{val.place}: {common} belongs to data.path={config.path} as well")
    return [source, val]


def _local_paths(source: Source) -> list[Path]:
    return [*getattr(source, "files", {}).values()]


def only_file(source: Source) -> Path:
    """The one file of a source. Raises UserError if it has another number."""
    files = _local_paths(source)
    if len(files) != 1:
        raise UserError(f"{source.place}: is {len(files)} files, expected one of token ids")
    return files[0]


def open_source(config: DataConfig, key: str = "data.path") -> Source:
    """Open a source, of which nothing is read yet, but a file at an address is downloaded unless the cache has it.

    `key` is the setting that errors name. Raises UserError, and OSError of a cache.
    """
    if config.source == "hub":
        source: Source = load("lm.lab.sources.hub.Hub")(config, "data.split" if key == "data.path" else key)
        return source
    if config.source == "stdlib":
        return Files(config, "data=stdlib", _stdlib())
    assert config.path is not None
    if paths.is_url(config.path):
        files = {"": paths.downloaded(config.path, config.cache, key)}
    else:
        files = paths.local_files(config.path, paths.SUFFIXES.get(config.source, ()), key)
    return Files(config, f"{key}={config.path}", files)


def _stdlib() -> Names:
    """The source of the running interpreter's standard library, without tests and code tables; no download."""
    root, files = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, below, names in os.walk(root, onerror=paths.raise_error):
        below[:] = [name for name in below if name not in EXCLUDED]  # not descended into: site-packages may be large
        files += (Path(folder, name) for name in names if name.endswith(".py") and name not in EXCLUDED)
    local = ("_sysconfigdata", "config-")  # these hold paths of the machine
    files = sorted(file for file in files if not file.relative_to(root).parts[0].startswith(local))
    if not (root / "argparse.py").is_file():
        raise UserError(f"{root}: this Python ships without its source; give your own text: data=text data.path=FILE")
    return {file.relative_to(root).as_posix(): file for file in files}
