"""Sources of text: plain files and the standard library here, everything else in lm.lab.sources."""

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

from lm.config import TABLES, DataConfig
from lm.data.paths import (
    BLOCK,
    COMPRESSED,
    ENDINGS,
    is_url,
    kind_of,
    local_files,
    open_file,
    raise_error,
    reading_from,
)
from lm.errors import UserError, require
from lm.registry import from_lab
from lm.system.files import json_sha256

SOURCES = {  # data.source -> class of (config, place, files); TextFiles reads plain text
    "json": "lm.lab.sources.tables.Table",
    "csv": "lm.lab.sources.tables.Table",
    "parquet": "lm.lab.sources.tables.Table",
    "tokens": "lm.lab.sources.made_elsewhere.TokenFile",
}
# Files and folders of the standard library that are left out: tests, code tables, and what was installed.
EXCLUDED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3")
OTHER_KINDS = {  # first bytes of a file that is no text, decompressed by its ending
    b"\x1f\x8b": "compressed by gzip; expected a name that ends in .gz",
    b"BZh91AY": "compressed by bzip2; expected a name that ends in .bz2",
    b"\xfd7zXZ": "compressed by xz; expected a name that ends in .xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; expected a name that ends in .zst",
    b"PAR1": "a Parquet file; use data=parquet data.column=NAME",
    b"%PDF": "a PDF; pdftotext FILE makes a text of it",
    b"{\\rt": "an RTF file; expected the text in it",
    b"\x89PNG": "a picture",
    b"PK\x03\x04": "a zip archive, as .docx and .epub are; expected the text in it",
}
CONVERT = "if it is a text, `file FILE` names its encoding, and iconv -f ENCODING -t utf-8 FILE > NEW converts it"
COMMIT = re.compile("[0-9a-f]{40}")  # of a data set on the Hub
JSON = re.compile(rb'\s*(\[\s*)?\{\s*"')  # how an object, or a list of objects, begins
MARKUP = re.compile(rb"\s*<(!doctype html|html|head|body|\?xml|!--)", re.IGNORECASE)

log = logging.getLogger(__name__)
Files = dict[str, Path]  # of files, as they are called in the text, and where each lies
Documents = Iterator[tuple[str, Iterable[bytes]]]  # a name, which decides the side of the split, and blocks of UTF-8


class Source(Protocol):
    """Where text comes from. Unusable text raises a UserError or an OSError that names the file."""

    place: str  # the setting that names the source, for messages

    def state(self) -> str:
        """Return a digest of the content and, where names decide something, of the names."""

    def documents(self) -> Documents:
        """Yield the documents in order. The caller stops when it has enough."""


class TextFiles:
    """Files of plain text. Each file is a document, without its byte-order mark.

    With a separator a file holds several documents, named by the file and their number in it. The
    name of a single file is no part of the text; of several files, the names decide the split.
    """

    def __init__(self, config: DataConfig, place: str, files: Files) -> None:
        self.config, self.place = config, place
        self.files = files if len(files) > 1 else {"": next(iter(files.values()))}
        if config.sha256 and len(files) > 1:
            raise UserError(f"{place}: is {len(files)} files, expected one file of data.sha256={config.sha256}")

    def state(self) -> str:
        is_whole = self.config.max_bytes is None or self.config.separator is not None or self.config.sha256
        return state_of(self.files, inf if is_whole else (self.config.max_bytes or 0) + BLOCK)

    def documents(self) -> Documents:
        separator, sha256 = self.config.separator, self.config.sha256
        for name, file in self.files.items():
            if sha256:
                with open_file(file) as content:
                    digest = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
                expected = f"one file of data.sha256={sha256}"
                require(digest == sha256.lower(), f"{self._place_of(file)}: has {digest}", expected)
            if separator is None:
                yield name, self._blocks(file)
                continue
            for number, document in enumerate(_parted(self._blocks(file), separator.encode()), 1):
                yield f"{name}:{number}", [document]

    def _place_of(self, file: Path) -> str:
        return f"{self.place} (downloaded to {file})" if is_url(self.place) else str(file)

    def _blocks(self, file: Path) -> Iterator[bytes]:
        """Yield the text of a file in blocks."""
        decoder, n_read, block = codecs.getincrementaldecoder("utf-8")(), 0, b"\n"  # not empty, so that the loop begins
        advice = "; a glob in quotes, as in 'texts/*.txt', leaves files out" if len(self.files) > 1 else ""
        with reading_from(place := self._place_of(file), "text"), open_file(file) as content:
            while block:
                block = content.read(BLOCK)
                for mark, kind in OTHER_KINDS.items() if n_read == 0 else ():
                    if block.startswith(mark):
                        raise UserError(f"{place}: is {kind}{advice}")
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    at = n_read + len(block) - len(error.object) + error.start
                    raise UserError(f"{place}: not UTF-8 ({error.reason}) at byte {at}; {CONVERT}{advice}") from error
                if (zero := block.find(b"\0")) >= 0:
                    raise UserError(f"{place}: has a zero byte at byte {n_read + zero}; {CONVERT}{advice}")
                yield block.removeprefix(codecs.BOM_UTF8) if n_read == 0 else block
                n_read += len(block)


def warn_of_other_formats(sources: Iterable[Source]) -> None:
    """Warn of a plain text whose largest file is a table or a web page: its marks would be learned as text."""
    for source in sources:
        if not isinstance(source, TextFiles):
            continue
        file, begin = max(source.files.values(), key=os.path.getsize), b""
        with suppress(Exception), open_file(file) as content:  # reading says what is wrong
            begin = content.read(256).removeprefix(codecs.BOM_UTF8)
        place = source.place if len(source.files) == 1 else file
        kind = "json" if JSON.match(begin) else kind_of(str(file))
        if kind in TABLES:
            log.warning("%s: looks like %s; data=%s reads the text in a column of a table", place, kind.upper(), kind)
        elif MARKUP.match(begin):
            log.warning("%s: looks like a web page, whose marks are part of the text", place)


def state_of(files: Files, limit: float = inf) -> str:
    """Return a digest of names, compressions and contents: all of a compressed file, of the others `limit` bytes."""
    states = []
    for name, file in files.items():
        if limit <= 0:
            break
        digest, n_read, compression = xxhash.xxh3_128(), 0, COMPRESSED.get(file.suffix.lower(), "")
        most = inf if compression else limit
        with open(file, "rb", buffering=0) as content:
            while n_read < most and (block := content.read(BLOCK)):
                digest.update(block)
                n_read += len(block)
        limit -= 0 if compression else n_read
        states.append([name, compression, digest.hexdigest()])
    return json_sha256(states)


def local_states(config: DataConfig) -> dict[str, str]:
    """Return a digest of each file or folder of this machine that a run reads, by its setting."""
    states = {}
    texts = {"data.path": config}
    if config.val_path is not None:
        texts["data.val_path"] = _val_config(config)
    for key, text in texts.items():
        if text.path and text.source != "hub" and not is_url(text.path):
            with suppress(OSError, UserError):  # a text may be gone
                states[key] = open_source(text, key).state()
    return states


def _parted(blocks: Iterable[bytes], separator: bytes) -> Iterator[bytes]:
    """Yield the documents between the separators of a text."""
    text, searched = bytearray(), 0
    for block in blocks:
        text += block
        while (end := text.find(separator, searched)) >= 0:
            yield bytes(text[:end])
            del text[: end + len(separator)]
            searched = 0
        searched = max(len(text) - len(separator) + 1, 0)
    yield bytes(text)


def open_sources(config: DataConfig, downloads: bool = True) -> list[Source]:
    """Open the text, and the validation text if data.val_path or data.val_split names one. Raises UserError.

    A separate validation text is read whole: data.max_bytes limits the training text alone.
    """
    source = open_source(config, downloads=downloads)
    if config.val_split is not None:
        own = replace(config, split=config.val_split, val_split=None, max_bytes=None)
        return [source, open_source(own, "data.val_split")]
    if config.val_path is None:
        return [source]
    val = open_source(_val_config(config), "data.val_path", downloads)
    training, validation = ({file.resolve() for file in files_of(part).values()} for part in (source, val))
    if common := training & validation:
        raise UserError(f"{val.place}: {min(common)} belongs to data.path={config.path} as well")
    return [source, val]


def text_size(config: DataConfig, limit: int) -> int:
    """Return the size of a text in bytes. A compressed file or a column of a table is counted up to `limit`."""
    source = open_source(config)
    files = files_of(source).values()
    if isinstance(source, TextFiles) and not any(file.suffix.lower() in COMPRESSED for file in files):
        return sum(file.stat().st_size for file in files)
    n_bytes = 0
    for _, blocks in source.documents():
        for block in blocks:
            n_bytes += len(block)
            if n_bytes >= limit:
                return n_bytes
    return n_bytes


def files_of(source: Source) -> Files:
    """Return the local files of a source; none for a source that is no files."""
    return getattr(source, "files", {})


def _val_config(config: DataConfig) -> DataConfig:
    return replace(config, path=config.val_path, val_path=None, sha256=None, max_bytes=None)


def open_source(config: DataConfig, key: str = "data.path", downloads: bool = True) -> Source:
    """Open a source without reading it. A file at an address is downloaded unless the cache has the file.

    `key` is the setting that errors name. Raises UserError, and OSError for the cache.
    """
    if config.source == "stdlib":
        return TextFiles(config, "data=stdlib", _standard_library())
    if config.source == "hub":
        return from_lab("lm.lab.sources.hub.Hub")(config, "data.split" if key == "data.path" else key)
    path, place = str(config.path), f"{key}={config.path}"
    if is_url(path):
        files = {"": from_lab("lm.lab.sources.addresses.downloaded")(path, config.cache, key, downloads)}
    else:
        files = local_files(path, ENDINGS.get(config.source, ()), key)
        if config.source in ENDINGS and (kind := kind_of(path)) not in ("text", config.source):
            raise UserError(f"{place}: expected data={kind}, by the ending of the name, not data={config.source}")
    if config.source == "text":
        return TextFiles(config, place, files)
    return from_lab(SOURCES[config.source])(config, place, files)


def _standard_library() -> Files:
    """Return the source files of the running interpreter's standard library, without tests and code tables."""
    root, files = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, below, names in os.walk(root, onerror=raise_error):
        below[:] = [name for name in below if name not in EXCLUDED]
        files += (Path(folder, name) for name in names if name.endswith(".py") and name not in EXCLUDED)
    local = ("_sysconfigdata", "config-")  # these hold paths of the machine
    files = sorted(file for file in files if not file.relative_to(root).parts[0].startswith(local))
    if not (root / "argparse.py").is_file():
        raise UserError(f"{root}: this Python ships without its source; give your own text: data=text data.path=FILE")
    return {file.relative_to(root).as_posix(): file for file in files}
