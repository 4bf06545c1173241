"""Tokens on disk.

A corpus is stored as `train.bin` and `val.bin` (flat token ids, memory-mapped), `tokenizer.json` and `meta.json`, in a
folder named by the hash of the text, the tokenizer and the split. The folder is built once, under a lock, and renamed
into place; every file is checked when it is opened, and a damaged folder is built again. An end-of-text token precedes
each document, so every token of the text has a token before it.
"""

import logging
import lzma
import os
import shutil
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lm.config import DataConfig, TokenizerConfig, UserError
from lm.data.cache import checksum, locked, partial_folder
from lm.data.corpus import opened, stored_text, stored_validation
from lm.data.encoding import decoded, encode, pieces, sample
from lm.data.split import Part, Shared, published, split
from lm.data.store import StoredText
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_file import load_tokenizer
from lm.data.vocabulary import build_tokenizer
from lm.system.files import json_sha256, read_json, sync_folder, write_json, write_text

FORMAT = 3  # of the folder; a change causes folders to be built again
FILES = ("train.bin", "val.bin", "tokenizer.json")
WORTH_SAYING = 0.001  # of the validation text: so much of it is training text as well
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
    hash: str  # of the text, and of its split where that is not decided by data.val_fraction alone
    revision: str | None = None  # the commit on the Hub that the text was read from


def compressed_bits_per_byte(part: Part, quiet: bool = True) -> dict[str, float]:
    """Block by block, because lzma takes a second for a megabyte: with a progress bar, and Ctrl-C is heard."""
    compressors: dict[str, Any] = {"zlib": zlib.compressobj(9), "lzma": lzma.LZMACompressor(preset=9)}
    sizes, total = dict.fromkeys(compressors, 0), min(part.n_bytes, BASELINE_BYTES)
    left = total
    with tqdm(total=total, desc="compressing", unit="B", unit_scale=True, disable=quiet, leave=False) as bar:
        for block, _ in part.blocks():
            block = block[:left]
            for name, compressor in compressors.items():
                sizes[name] += len(compressor.compress(block))
            bar.update(len(block))
            left -= len(block)
            if not left:
                break
    return {name: 8 * (sizes[name] + len(one.flush())) / total for name, one in compressors.items()}


def prepare(config: DataConfig, tokenizer: TokenizerConfig, quiet: bool = True) -> TextData:
    """Read the corpus and open its tokens, which are built if they do not exist. Raises UserError for unusable text."""
    val, text = stored_validation(config, quiet), stored_text(config, quiet)
    split_by = {"val": val.hash if val else config.val_fraction, "val_max_bytes": config.val_max_bytes}
    of_text = {"text": text.hash, "rows": config.rows, **split_by}
    identity: dict[str, Any] = {"format": FORMAT, **of_text, **asdict(tokenizer)}
    if tokenizer.path is not None:
        own = load_tokenizer(Path(tokenizer.path))
        identity["path"] = own.hash
        note = "is added, because it has no usual end-of-text token" if own.eot_added else "is its end-of-text token"
        log.info("tokenizer.path=%s: %s %s; %d tokens", tokenizer.path, own.eot_token, note, own.vocab_size)
    folder = Path(config.cache_dir).expanduser() / "tokens" / json_sha256(identity)[:16]
    data = usable(folder)
    if data is None:
        with locked(folder):
            data = usable(folder)  # another process may have built it meanwhile
            if data is None:
                build(folder, text, val, config, tokenizer, quiet)
                data = open_tokens(folder)
    for name, tokens in (("training", data.train), ("validation", data.val)):
        needed = config.seq_len + 1 if name == "training" else 2
        if len(tokens) < needed:
            instead = " or lower data.seq_len" if name == "training" else "" if val else " or raise data.val_fraction"
            raise UserError(
                f"data: the {name} text has {len(tokens)} tokens, data.seq_len={config.seq_len} needs {needed}:"
                f" give more text{instead}"
            )
    return replace(data, revision=getattr(text.source, "commit", None))


def usable(folder: Path) -> TextData | None:
    """The tokens of a folder, or None if there is none, or a damaged one."""
    if not folder.exists():
        return None
    try:
        return open_tokens(folder)
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: damaged token cache (%s); it is built again", folder, error)
        return None


def build(
    folder: Path,
    stored: StoredText,
    stored_val: StoredText | None,
    config: DataConfig,
    settings: TokenizerConfig,
    quiet: bool,
) -> None:
    """Write a token folder, in place of a damaged one if there is one. The caller holds its lock."""
    text = opened(stored, config)
    if stored_val is None:
        train, val, data_hash = split(text, config.val_fraction, config.val_max_bytes)
    else:
        train, val, data_hash = published(text, opened(stored_val, config))
    everything = (one for part in (train, val) for one, _ in pieces(decoded(part)))
    tokenizer = build_tokenizer(settings, sample(train), everything, not quiet)
    with partial_folder(folder) as partial:
        for name, part in (("train", train), ("val", val)):
            with open(partial / f"{name}.bin", "wb") as file:
                for ids in encode(tokenizer, part, f"encoding {name}", quiet):
                    file.write(ids.data)
        write_text(partial / "tokenizer.json", tokenizer.to_json())
        meta = {
            "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
            "val_bytes": val.n_bytes,
            "baselines": compressed_bits_per_byte(val, quiet),
            "data_hash": data_hash,
            "shared": asdict(Shared.between(train, val)),
            "checksums": {name: checksum(partial / name) for name in FILES},
        }
        write_json(partial / "meta.json", meta)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
        sync_folder(folder.parent)


def open_tokens(folder: Path) -> TextData:
    """Raises OSError or ValueError if a file is missing or damaged."""
    meta = read_json(folder / "meta.json")
    for name, right in meta["checksums"].items():
        if checksum(folder / name) != right:
            raise ValueError(f"{name} does not match its checksum")
    train, val = (mapped(folder / f"{name}.bin", meta["dtype"]) for name in ("train", "val"))
    if (shared := Shared(**meta["shared"])).share >= WORTH_SAYING:
        log.warning(
            "data: %d of %d validation documents, %.1f %% of their bytes, are training documents too",
            *(shared.n_documents, shared.of, 100 * shared.share),
        )
    return TextData(
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        train=train,
        val=val,
        val_bytes=meta["val_bytes"],
        baselines=meta["baselines"],
        hash=meta["data_hash"],
    )


def mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # no empty file can be mapped
