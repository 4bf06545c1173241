"""The text and its tokenizer."""

import errno
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from lm.config.checks import UserError, expand_paths, require, require_choice, require_min

SOURCES = ("stdlib", "text", "json", "csv", "parquet", "hub", "tokens")
TABLES = ("json", "csv", "parquet", "hub")
OF_SOURCES = (  # settings that have an effect with some sources only: their default, and these sources
    *(("name", None, ("hub",)), ("revision", None, ("hub",)), ("split", "train", ("hub",))),
    *(("val_split", None, ("hub",)), ("val_path", None, ("text", "json", "csv", "parquet", "tokens"))),
    *(("sha256", None, ("text",)), ("separator", None, ("text",)), ("max_bytes", None, ("stdlib", "text", *TABLES))),
    *(("column", "text", TABLES), ("rows", "documents", TABLES)),
)
ORDERS = ("windows", "documents")
TOKENIZERS = ("bpe", "char", "byte", "file")
OTHER_CACHE = "data.cache_dir=DIR keeps the tokens elsewhere"
# Texts of at most so many bytes, and their recipe. Above the last, the default run.
RECIPES = (
    (20_000, "chars_10k"),
    (60_000, "chars_30k"),
    (200_000, "chars_100k"),
    (700_000, "bpe_300k"),
    (2_000_000, "bpe_1m"),
)


def recipe_of(n_bytes: float) -> str:
    """The experiment that suits a text of so many bytes.

    >>> recipe_of(300_000), recipe_of(10**9)
    ('bpe_300k', 'none')
    """
    return next((name for most, name in RECIPES if n_bytes <= most), "none")


def default_cache() -> str:
    """One for all working directories, in the user's cache folder."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lm_lab")


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """The source of the text, its split, and the size of a batch."""

    source: str = "stdlib"  # the kind of text; the group data chooses it
    path: str | None = None  # a file, folder, glob, address (https://, s3://), or the Hub's owner/name
    sha256: str | None = None  # text: the hash that its one file must have, decompressed; null: any
    name: str | None = None  # hub: the configuration of a data set that has several
    revision: str | None = None  # hub: a commit, tag or branch; null: the newest commit of the main branch
    split: str = "train"  # hub: which split to read
    val_split: str | None = None  # hub: the split that is the whole validation text; null: part of the text is held out
    val_path: str | None = None  # files: the path of the whole validation text; null: part of the text is held out
    separator: str | None = None  # text: a word that ends a document, and is no part of it; null: only files do
    column: str = "text"  # json, csv, parquet, hub: the column that holds the text
    rows: str = "documents"  # json, csv, parquet, hub: what a row is; lines are joined to one text
    seq_len: int = 128  # tokens of a training window, and the model's longest context
    batch_size: int = 8  # sequences per optimizer step on one device
    order: str = "windows"  # what each epoch shuffles: windows of the text, or documents too, before it is cut
    val_fraction: float = 0.1  # of the text that is held out for validation
    document_mask: bool = False  # true: a token attends to its own document alone, and positions start anew in each
    val_max_bytes: int | None = 4_000_000  # at most so much text is held out by val_fraction; null: any amount
    max_bytes: int | None = None  # of text: nothing beyond it is read; null: all
    overfit_batches: int = 0  # above 0: train on the first `overfit_batches` batches only, again and again
    cache_dir: str = field(default_factory=default_cache)  # where tokens are kept
    verify: bool = False  # encode the text again, though the cache has its tokens

    def __post_init__(self) -> None:
        expand_paths("data.", self, "path", "val_path")
        require_choice("data.source", self.source, SOURCES)
        require_min(1, "data.", self, "seq_len", "batch_size", "max_bytes")
        require_min(4, "data.", self, "val_max_bytes")  # the bytes of the longest character
        require_min(0, "data.", self, "overfit_batches")
        require(0 < self.val_fraction < 1, f"data.val_fraction={self.val_fraction}", "between 0 and 1")
        if self.source != "stdlib" and not self.path:
            form = "OWNER/NAME" if self.source == "hub" else "FILE"
            raise UserError(f"data.path: data.source={self.source} needs one (data.path={form})")
        if self.source == "stdlib" and self.path is not None:
            typed = shlex.quote(f"data.path={self.path}")
            raise UserError(f"data.path={self.path}: data=stdlib reads no file; use data=text {typed}")
        require_choice("data.order", self.order, ORDERS)
        require_choice("data.rows", self.rows, ("documents", "lines"))
        for key, default, sources in OF_SOURCES:
            value = getattr(self, key)
            if value == "":
                raise UserError(f"data.{key}: is empty")
            if value != default and self.source not in sources:
                kinds = " or ".join(sources)
                raise UserError(f"data.{key}={value}: is for data={kinds}, not data.source={self.source}")
        if None not in (self.separator, self.sha256, self.max_bytes):
            raise UserError(f"data.max_bytes={self.max_bytes}: expected null with data.separator and data.sha256")
        key, train = ("val_path", self.path) if self.val_split is None else ("val_split", self.split)
        if (value := getattr(self, key)) is not None:
            if value == train:
                raise UserError(f"data.{key}={value}: is the training text as well")
            for other in ("val_fraction", "val_max_bytes"):
                if (given := getattr(self, other)) != type(self).__dataclass_fields__[other].default:
                    raise UserError(f"data.{other}={given}: nothing is held out beside data.{key}={value}")

    @property
    def cache(self) -> Path:
        """The folder that cache_dir names, whose default is the same for every home. Raises PermissionError."""
        path = os.path.expanduser(self.cache_dir)
        if path.startswith("~/"):
            raise PermissionError(errno.EACCES, f"no home is known; {OTHER_CACHE}", path)
        return Path(path)


@dataclass(slots=True, kw_only=True)
class TokenizerConfig:
    kind: str = "bpe"  # bpe, char, byte or file
    vocab_size: int | None = 2048  # bpe: the end-of-text token included; fewer if a text yields no more
    path: str | None = None  # file: a tokenizer.json of the tokenizers library

    def __post_init__(self) -> None:
        expand_paths("tokenizer.", self, "path")
        require_choice("tokenizer.kind", self.kind, TOKENIZERS)
        if self.kind == "bpe" and (self.vocab_size or 0) < 257:
            raise UserError(f"tokenizer.vocab_size={self.vocab_size}: bpe needs 257 or more (256 bytes, end of text)")
        if self.kind != "bpe" and self.vocab_size is not None:
            raise UserError(
                f"tokenizer.vocab_size={self.vocab_size}: is for tokenizer=bpe; tokenizer.kind={self.kind} has its own"
            )
        if self.kind == "file" and self.path is None:
            raise UserError("tokenizer.path: tokenizer=file needs one; give the file of a tokenizer.json")
        if self.kind != "file" and self.path is not None:
            raise UserError(f"tokenizer.path={self.path}: is for tokenizer=file, not {self.kind}")
