"""The corpus: the source that a configuration names, and its text on disk.

Plain text is read here, so that an error can name the file and the byte. Other formats and the Hub are read by the
`datasets` library.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from lm.config import DataConfig, UserError
from lm.data.documents import Document, Files, Source
from lm.data.download import download
from lm.data.hub import Hub
from lm.data.paths import SUFFIXES, is_url, local_files
from lm.data.rows import Rows
from lm.data.store import StoredText
from lm.data.text import Text
from lm.system.files import json_sha256, sha256

EXCLUDED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3")
# Settings that decide which text is read.
SELECTING = ("source", "path", "sha256", "name", "column", "split", "max_bytes")


def stdlib() -> Files:
    """The source of the running interpreter's standard library, without tests and code tables; no download."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if name not in EXCLUDED]  # not descended into: site-packages may be large
        files += (Path(folder, name) for name in names if name.endswith(".py") and name not in EXCLUDED)
    local = ("_sysconfigdata", "config-")  # these hold paths of the machine
    files = sorted(file for file in files if not file.relative_to(root).parts[0].startswith(local))
    found = Files({file.relative_to(root).as_posix(): file for file in files})
    if (found.size or 0) < 1_000_000:
        raise UserError(f"{root}: this Python ships without its source; give your own text: data=text data.path=FILE")
    return found


def refuse(error: OSError) -> None:
    raise UserError(f"{error.filename}: {error.strerror}") from error


def files(config: DataConfig) -> dict[str, Path]:
    """The files of data.path by their names; a URL is downloaded."""
    assert config.path is not None
    if is_url(config.path):
        part = config.max_bytes if config.source == "text" and config.sha256 is None else None  # a table needs its end
        path = download(config.path, Path(config.cache_dir).expanduser(), part)
        return {path.name: path}
    return local_files(config.path, SUFFIXES.get(config.source, ()))


class TextFiles(Files):
    """A document from each file. Raises UserError unless it is one file of data.sha256, if that is given.

    The name of a single file is no part of the text: renamed, it is the same one. Of several, it decides the split.
    """

    def __init__(self, config: DataConfig) -> None:
        paths = files(config)
        super().__init__(paths if len(paths) > 1 else dict(zip([""], paths.values(), strict=True)))
        self.config = config

    def documents(self) -> Iterator[Document]:
        if (right := self.config.sha256) is not None:
            paths = list(self.files.values())
            what = f"has {sha256(paths[0])}" if len(paths) == 1 else f"is {len(paths)} files"
            if what != f"has {right.lower()}":
                raise UserError(f"data.path={self.config.path}: {what}, expected one file of data.sha256={right}")
        return super().documents()


def rows(config: DataConfig) -> Rows:
    return Rows(config.source, str(config.path), files(config), config.column)


SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "stdlib": lambda config: stdlib(),
    "text": TextFiles,
    "json": rows,
    "csv": rows,
    "parquet": rows,
    "hub": Hub,
}


def stored_text(config: DataConfig, quiet: bool = True) -> StoredText:
    """The text of a configuration, which is read unless it is in the cache and has not changed. Raises UserError."""
    settings, source = {name: getattr(config, name) for name in SELECTING}, SOURCES[config.source](config)
    if isinstance(source, Hub):
        settings["commit"] = source.commit
    return StoredText(
        Path(config.cache_dir).expanduser(),
        source,
        f"data.path={config.path}",
        request=json_sha256(settings)[:32],
        max_bytes=config.max_bytes,
        verify=config.verify,
        quiet=quiet,
    )


def stored_validation(config: DataConfig, quiet: bool = True) -> StoredText | None:
    """The text of data.val_split or data.val_path; None if part of the text is held out instead. Raises UserError."""
    for key, of in ("val_split", "split"), ("val_path", "path"):
        if (value := getattr(config, key)) is not None:
            other = replace(config, **{of: value, key: None, "sha256": None, "max_bytes": None})
            try:
                if of == "path":
                    refuse_overlap(config, other)
                return stored_text(other, quiet)
            except UserError as error:
                raise UserError(str(error).replace(f"data.{of}={value}", f"data.{key}={value}")) from error
    return None


def refuse_overlap(config: DataConfig, other: DataConfig) -> None:
    if is_url(str(config.path)) or is_url(str(other.path)):
        return
    training = {path.resolve() for path in files(config).values()}
    for path in files(other).values():
        if path.resolve() in training:
            raise UserError(f"data.path={other.path}: {path} belongs to data.path={config.path} as well")


def opened(stored: StoredText, config: DataConfig) -> Text:
    """The text on disk, in the documents that data.rows says."""
    text = stored.open()
    return text.joined() if config.rows == "lines" else text
