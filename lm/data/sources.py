"""Sources of text: files, columns of tables, the Hugging Face Hub."""

import codecs
import hashlib
import json
import logging
import os
import re
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from lm.config import DataConfig, UserError
from lm.data.paths import SUFFIXES, is_url, local_files, suffix
from lm.data.servers import ask, file_version, hub_cells, hub_commit
from lm.data.tables import BLOCK, READERS, documents_of, open_file, reading_from
from lm.system.files import json_sha256

EXCLUDED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3")
RACY = 2 * 10**9  # ns: the coarsest times of file systems
VERSION = ("ETag", "Content-MD5", "Digest", "Last-Modified")  # headers that tell two versions of a file apart

log = logging.getLogger(__name__)
Documents = Iterator[tuple[str, Iterable[bytes]]]  # a name, which decides the side of the split, and blocks of UTF-8


@dataclass(slots=True, frozen=True)
class State:
    """The state of a source: it holds the same text as long as its digest is the same."""

    digest: str
    newest: float = 0.0  # ns since the epoch: the last change; 0: no clock decides about the digest

    def is_settled(self, time_of_reading: int) -> bool:
        """Whether any change since a reading is certain to have changed the digest."""
        return self.newest < time_of_reading - RACY


class Source(Protocol):
    """Where text comes from. What it raises for unusable text is a UserError."""

    place: str  # the setting that names it, for messages

    def state(self) -> State: ...

    def documents(self, max_bytes: int | None) -> Documents:
        """The documents in order. Of each, little more than `max_bytes` are read."""


class Files:
    """Files by their names, which are local paths or addresses: what most kinds of source are made of.

    The state of local files is told by size, inode and times, as git tells it, that of others by what the server says.
    """

    def __init__(self, place: str, files: dict[str, Path | str], cache: Path) -> None:
        self.place, self.files = place, files
        addresses = [file for file in files.values() if isinstance(file, str)]
        self.versions = {url: ask(cache, url, partial(file_version, place, url)) for url in addresses}

    def state(self) -> State:
        digest, newest, now = hashlib.sha256(), 0.0, time.time_ns()
        for name, file in self.files.items():
            if isinstance(file, Path):
                status = _status(file)
                state = [name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
                changed = status.st_mtime_ns if status.st_mtime_ns <= now else 0  # some program has set a time to come
                newest = max(newest, changed, status.st_ctime_ns)
            else:
                state = [file, self.versions[file]]
                if file.startswith("http") and not any(header in self.versions[file] for header in VERSION):
                    newest = float("inf")
            digest.update(json.dumps(state).encode())
        return State(digest.hexdigest(), newest)

    def documents(self, max_bytes: int | None) -> Documents:
        raise UserError(f"{self.place}: holds the tokens of one tokenizer, expected a text")


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


class TextFiles(Files):
    """A document from each file, without its byte-order mark, of data.sha256 if that is given.

    The name of a single file is no part of the text: renamed, it is the same one. Of several, it decides the split.
    """

    def __init__(self, place: str, files: dict[str, Path | str], cache: Path, sha256: str | None = None) -> None:
        super().__init__(place, files if len(files) > 1 else dict(zip([""], files.values(), strict=True)), cache)
        self.sha256 = sha256 and sha256.lower()
        for kind in READERS:
            if all(suffix(file) in SUFFIXES[kind] for file in files.values()):
                log.warning("%s: is read as plain text; data=%s reads the text in a column of it", place, kind)

    def documents(self, max_bytes: int | None) -> Documents:
        if self.sha256 and len(self.files) > 1:
            raise UserError(f"{self.place}: is {len(self.files)} files, expected one file of data.sha256={self.sha256}")
        for name, file in self.files.items():
            yield name, self._blocks(file, max_bytes)

    def _blocks(self, file: Path | str, max_bytes: int | None) -> Iterator[bytes]:
        decoder, digest, at = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256(), 0
        place = str(file) if isinstance(file, Path) else self.place
        with reading_from(place, "text"), open_file(file) as content:
            while block := content.read(BLOCK):
                digest.update(block)
                if max_bytes is None or at < max_bytes + 4:
                    n_held = len(decoder.getstate()[0])  # bytes of an unfinished character
                    try:
                        decoder.decode(block)
                    except UnicodeDecodeError as error:
                        raise _not_utf8(file, at - n_held + error.start, error.reason) from error
                    yield block.removeprefix(codecs.BOM_UTF8) if at == 0 else block
                elif not self.sha256:
                    return
                at += len(block)
        if n_held := len(decoder.getstate()[0]) if max_bytes is None or at < max_bytes + 4 else 0:
            raise _not_utf8(file, at - n_held, "unexpected end of data")
        if self.sha256 not in (None, digest.hexdigest()):
            raise UserError(f"{place}: has {digest.hexdigest()}, expected one file of data.sha256={self.sha256}")


def _not_utf8(file: Path | str, at: int, reason: str) -> UserError:
    with open_file(file) as content:
        start = content.read(4)
    if start == b"PAR1":
        return UserError(f"{file}: is a Parquet file; use data=parquet data.column=NAME")
    guess = "utf-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
    cure = f"save it as UTF-8, for example by: iconv -f {guess} -t utf-8 FILE > NEW"
    return UserError(f"{file}: not UTF-8 at byte {at} ({reason}); {cure}")


class Tables(Files):
    """A document from each row of a column of JSON, CSV or Parquet files."""

    def __init__(self, place: str, files: dict[str, Path | str], cache: Path, kind: str, column: str) -> None:
        super().__init__(place, files, cache)
        self.kind, self.column = kind, column

    def documents(self, max_bytes: int | None) -> Documents:
        cells = (cell for file in self.files.values() for cell in READERS[self.kind](file, self.column))
        with reading_from(self.place, self.kind):
            yield from documents_of(cells, self.column)


class Hub:
    """A document from each row of a column of a split, at one commit of a data set on the Hugging Face Hub."""

    def __init__(self, config: DataConfig, cache: Path, key: str) -> None:
        self.config, self.key, self.place, self.commit = config, key, f"data.path={config.path}", str(config.revision)
        if not re.fullmatch("[0-9a-f]{40}", self.commit):  # a whole commit hash stands for itself
            request = f"hf://datasets/{config.path}@{config.revision or 'main'}"
            self.commit = ask(cache, request, partial(hub_commit, config, config.revision))["commit"]

    def state(self) -> State:
        return State(json_sha256([self.config.path, self.config.name, self.config.split, self.commit]))

    def documents(self, max_bytes: int | None) -> Documents:
        return documents_of(hub_cells(self.config, self.commit, self.key), self.config.column)


def open_sources(config: DataConfig) -> tuple[Source, Source | None]:
    """The text, and the validation text if data.val_path or data.val_split names one. Raises UserError."""
    source = open_source(config)
    if config.val_split is not None:
        return source, open_source(replace(config, split=config.val_split, val_split=None), "data.val_split")
    if config.val_path is None:
        return source, None
    val = open_source(replace(config, path=config.val_path, val_path=None, sha256=None), "data.val_path")
    assert isinstance(source, Files)
    assert isinstance(val, Files)
    training = {path.resolve() for path in source.files.values() if isinstance(path, Path)}
    for path in val.files.values():
        if isinstance(path, Path) and path.resolve() in training:
            raise UserError(f"{val.place}: {path} belongs to data.path={config.path} as well")
    return source, val


def open_source(config: DataConfig, key: str = "data.path") -> Source:
    """Nothing is read yet. `key` is the setting that errors name. Raises UserError."""
    cache = Path(config.cache_dir).expanduser()
    if config.source == "hub":
        return Hub(config, cache, "data.split" if key == "data.path" else key)
    if config.source == "stdlib":
        return TextFiles("data=stdlib", _stdlib(), cache)
    assert config.path is not None
    place, suffixes = f"{key}={config.path}", SUFFIXES.get(config.source, ())
    is_local = not is_url(config.path)
    files: dict[str, Path | str] = {**local_files(config.path, suffixes, key)} if is_local else {"": config.path}
    if config.source in READERS:
        return Tables(place, files, cache, config.source, config.column)
    return TextFiles(place, files, cache, config.sha256) if config.source == "text" else Files(place, files, cache)


def _stdlib() -> dict[str, Path | str]:
    """The source of the running interpreter's standard library, without tests and code tables; no download."""
    root, files = Path(sysconfig.get_path("stdlib")), list[Path]()

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror}") from error

    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if name not in EXCLUDED]  # not descended into: site-packages may be large
        files += (Path(folder, name) for name in names if name.endswith(".py") and name not in EXCLUDED)
    local = ("_sysconfigdata", "config-")  # these hold paths of the machine
    files = sorted(file for file in files if not file.relative_to(root).parts[0].startswith(local))
    if sum(_status(file).st_size for file in files) < 1_000_000:
        raise UserError(f"{root}: this Python ships without its source; give your own text: data=text data.path=FILE")
    return {file.relative_to(root).as_posix(): file for file in files}
