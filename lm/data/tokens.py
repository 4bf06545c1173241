"""Tokens on disk.

A corpus is stored as `train.bin` and `val.bin` (flat token ids, memory-mapped), `tokenizer.json` and `meta.json`, in a
folder named by the hash of the text, the tokenizer and the split. The folder is built once, under a lock, and renamed
into place. An end-of-text token precedes each document, so every token of the text has a token before it.
"""

import errno
import hashlib
import itertools
import json
import logging
import lzma
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from tqdm import tqdm

from lm.config import BadInput, DataConfig, TokenizerConfig
from lm.data import corpus
from lm.data.documents import Document
from lm.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from lm.system.files import sync_folder, write_text

FORMAT = 1  # of the folder; a change causes folders to be built again
PIECE_LENGTH = 1 << 16  # characters that are encoded at a time
BASELINE_BYTES = 1 << 24  # zlib and lzma are measured on the first bytes of the text

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TextData:
    """A corpus ready for training."""

    tokenizer: Tokenizer
    train: np.ndarray  # (n_tokens,) ids, starting with end of text
    val: np.ndarray
    val_bytes: int  # UTF-8 bytes of the validation text: what bits per byte divides by
    baselines: dict[str, float]  # bits per byte of general-purpose compressors on the same text
    hash: str  # of the text


def pieces(text: str) -> Iterator[str]:
    """Split a text where no token of byte-level BPE can cross: between a visible character and a line break."""
    start = 0
    for cut in re.finditer(r"(?<=\S)\n", text):
        if cut.start() - start >= PIECE_LENGTH:
            yield text[start : cut.start()]
            start = cut.start()
    yield text[start:]


def encode(tokenizer: Tokenizer, texts: list[str], label: str = "", quiet: bool = True) -> Iterator[np.ndarray]:
    """Yield the ids of all texts in arrays, end of text before each text."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    total = sum(map(len, texts))
    with tqdm(total=total, desc=label, unit="char", unit_scale=True, disable=quiet, leave=False) as bar:
        cut = (
            (piece, i == 0)
            for text in texts
            for i, piece in enumerate(pieces(text) if tokenizer.splittable else [text])
        )
        while group := list(itertools.islice(cut, 64)):
            for ids, (piece, first) in zip(tokenizer.encode_all([p for p, _ in group]), group, strict=True):
                yield np.array([tokenizer.eot, *ids] if first else ids, dtype=dtype)
                bar.update(len(piece))


def compressed_bits_per_byte(texts: list[str]) -> dict[str, float]:
    raw = "".join(texts).encode()[:BASELINE_BYTES]
    sizes = {"zlib": len(zlib.compress(raw, 9)), "lzma": len(lzma.compress(raw, preset=9))}
    return {name: 8 * size / len(raw) for name, size in sizes.items()}


def prepare(config: DataConfig, tokenizer: TokenizerConfig, quiet: bool = True) -> TextData:
    """Read the corpus and open its tokens, which are built if they do not exist. Raises BadInput for unusable text."""
    documents = corpus.load_documents(config)
    text_hash = corpus.content_hash(documents)
    identity: dict[str, Any] = {"format": FORMAT, "text": text_hash, "val": config.val_fraction, **asdict(tokenizer)}
    if tokenizer.path is not None:
        own = load_tokenizer(Path(tokenizer.path))
        identity["path"] = own.hash
        note = "is added, because it has no usual end-of-text token" if own.eot_added else "is its end-of-text token"
        log.info("tokenizer.path=%s: %s %s; %d tokens", tokenizer.path, own.eot_token, note, own.vocab_size)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(config.cache_dir).expanduser() / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists() and not os.access(folder.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
    except OSError as error:
        raise BadInput(f"data.cache_dir={config.cache_dir}: {error.strerror}; expected a folder to write to") from error
    if not folder.exists():  # an existing folder is complete, and may be read-only
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                build(folder, documents, config, tokenizer, text_hash, quiet)
    data = open_tokens(folder)
    for name, tokens in (("training", data.train), ("validation", data.val)):
        needed = config.seq_len + 1 if name == "training" else 2
        if len(tokens) < needed:
            instead = "lower data.seq_len" if name == "training" else "raise data.val_fraction"
            raise BadInput(
                f"data: the {name} text has {len(tokens)} tokens, data.seq_len={config.seq_len} needs {needed}:"
                f" give more text or {instead}"
            )
    return data


def build(
    folder: Path,
    documents: list[Document],
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    text_hash: str,
    quiet: bool,
) -> None:
    train, val = corpus.split(documents, config.val_fraction)
    everything = (document.text for document in documents)
    tokenizer = build_tokenizer(
        tokenizer_config, itertools.chain.from_iterable(map(pieces, train)), everything, not quiet
    )
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process; this one holds the lock
    partial.mkdir()
    try:
        sizes = {}
        for name, texts in (("train", train), ("val", val)):
            with open(partial / f"{name}.bin", "wb") as file:
                for ids in encode(tokenizer, texts, f"encoding {name}", quiet):
                    file.write(ids.tobytes())
                file.flush()
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        write_text(partial / "tokenizer.json", tokenizer.to_json())
        meta = {
            "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
            "file_bytes": sizes,
            "val_bytes": sum(len(text.encode()) for text in val),
            "baselines": compressed_bits_per_byte(val),
            "text_hash": text_hash,
        }
        write_text(partial / "meta.json", json.dumps(meta, indent=1))
        os.rename(partial, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def open_tokens(folder: Path) -> TextData:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        for name, size in meta["file_bytes"].items():
            if (folder / f"{name}.bin").stat().st_size != size:
                raise ValueError(f"{name}.bin does not hold {size} bytes")
        train, val = (np.memmap(folder / f"{name}.bin", meta["dtype"], "r") for name in ("train", "val"))
        return TextData(
            tokenizer=load_tokenizer(folder / "tokenizer.json"),
            train=train,
            val=val,
            val_bytes=meta["val_bytes"],
            baselines=meta["baselines"],
            hash=meta["text_hash"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{folder}: damaged token cache ({error}); delete the folder, it will be built again") from error
