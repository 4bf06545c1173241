"""Tokens on disk, and the batches cut from them.

A corpus becomes `train.bin` and `val.bin` (flat token ids, memory-mapped), `tokenizer.json` and `meta.json` in a
folder named by the hash of the text, the tokenizer and the split. It is built once, under a lock, and appears in
one step. Each document is preceded by the end-of-text token, so every token of the text has something before it.
"""

import hashlib
import itertools
import json
import lzma
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from tqdm import tqdm

from lm import corpus
from lm.config import BadInput, DataConfig, TokenizerConfig
from lm.files import sync_folder, write_text
from lm.tokenizer import Tokenizer, build_tokenizer, load_tokenizer

FORMAT = 1  # of the folder; a change makes old ones be built anew
PIECE = 1 << 16  # characters encoded at a time
BASELINE_BYTES = 1 << 24  # zlib and lzma are measured on no more than this
IGNORED = -100  # the target that CrossEntropyLoss leaves out

Batch = tuple[Tensor, Tensor]


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
    """Cut a text where no token of byte-level BPE can cross: between a visible character and a line break."""
    start = 0
    for cut in re.finditer(r"(?<=\S)\n", text):
        if cut.start() - start >= PIECE:
            yield text[start : cut.start()]
            start = cut.start()
    yield text[start:]


def encode(tokenizer: Tokenizer, texts: list[str], label: str = "", quiet: bool = True) -> Iterator[np.ndarray]:
    """Ids of all texts, end of text before each, in arrays as they come."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    total = sum(map(len, texts))
    with tqdm(total=total, desc=label, unit="char", unit_scale=True, disable=quiet, leave=False) as bar:
        cut = ((piece, i == 0) for text in texts for i, piece in enumerate(pieces(text)))
        while group := list(itertools.islice(cut, 64)):
            for ids, (piece, first) in zip(tokenizer.encode_all([p for p, _ in group]), group, strict=True):
                yield np.array([tokenizer.eot, *ids] if first else ids, dtype=dtype)
                bar.update(len(piece))


def compressed_bits_per_byte(texts: list[str]) -> dict[str, float]:
    raw = "".join(texts).encode()[:BASELINE_BYTES]
    sizes = {"zlib": len(zlib.compress(raw, 9)), "lzma": len(lzma.compress(raw, preset=9))}
    return {name: 8 * size / len(raw) for name, size in sizes.items()}


def prepare(config: DataConfig, tokenizer: TokenizerConfig, quiet: bool = True) -> TextData:
    """Read the corpus and open its tokens, building them if nobody has. Raises BadInput for unusable text."""
    documents = corpus.load_documents(config)
    text_hash = corpus.content_hash(documents)
    spelled: dict[str, Any] = {"format": FORMAT, "text": text_hash, "val": config.val_fraction, **asdict(tokenizer)}
    if tokenizer.path is not None:
        spelled["path"] = load_tokenizer(Path(tokenizer.path)).hash
    key = hashlib.sha256(json.dumps(spelled, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(config.cache_dir).expanduser() / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            build(folder, documents, config, tokenizer, text_hash, quiet)
    data = open_tokens(folder)
    for name, tokens in (("training", data.train), ("validation", data.val)):
        needed = config.seq_len + 1 if name == "training" else 2
        if len(tokens) < needed:
            raise BadInput(
                f"data: the {name} text has {len(tokens)} tokens, data.seq_len={config.seq_len} needs {needed}"
            )
    return data


def build(
    folder: Path,
    documents: list[corpus.Document],
    config: DataConfig,
    kind: TokenizerConfig,
    text_hash: str,
    quiet: bool,
) -> None:
    train, val = corpus.split(documents, config.val_fraction)
    everything = (document.text for document in documents)
    tokenizer = build_tokenizer(kind, itertools.chain.from_iterable(map(pieces, train)), everything, not quiet)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died; we hold the lock
    partial.mkdir()
    try:
        sizes = {}
        for name, texts in (("train", train), ("val", val)):
            with open(partial / f"{name}.bin", "wb") as file:
                for ids in encode(tokenizer, texts, f"encoding {name}", quiet):
                    ids.tofile(file)
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
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder}: damaged token cache ({error}); delete the folder, it will be built anew") from error
    return TextData(
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        train=train,
        val=val,
        val_bytes=meta["val_bytes"],
        baselines=meta["baselines"],
        hash=meta["text_hash"],
    )


def shift(windows: np.ndarray) -> Batch:
    """Windows (B, T+1) to tokens (B, T) and the targets (B, T) that follow them: the only shift of the project."""
    whole = torch.from_numpy(windows.astype(np.int64))
    return whole[:, :-1], whole[:, 1:]


class TrainingStream(IterableDataset[Batch]):
    """An endless stream of batches in which batch k is a pure function of (seed, k): resuming needs no state.

    Each epoch cuts the text into windows at another offset and visits them in another order, so that every token
    is a target about once an epoch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        overfit_batches: int = 0,
    ) -> None:
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.start, self.rank, self.world_size, self.overfit_batches = start, rank, world_size, overfit_batches
        self.slack = min(seq_len - 1, len(tokens) - 1 - seq_len)  # the largest offset that leaves a whole window
        self.per_epoch = (len(tokens) - 1 - self.slack) // seq_len
        self.epoch = -1

    def window_starts(self, samples: Iterable[int]) -> np.ndarray:
        starts = []
        for sample in samples:
            epoch, place = divmod(sample, self.per_epoch)
            if epoch != self.epoch:
                draw = np.random.default_rng([self.seed, epoch])
                self.epoch, self.offset = epoch, int(draw.integers(self.slack + 1))
                self.order = draw.permutation(self.per_epoch)
            starts.append(self.offset + int(self.order[place]) * self.seq_len)
        return np.array(starts)

    def batch(self, k: int) -> Batch:
        """Batch k of this rank: (tokens, targets), each (B, T)."""
        if self.overfit_batches:
            k %= self.overfit_batches
        first = (k * self.world_size + self.rank) * self.batch_size
        starts = self.window_starts(range(first, first + self.batch_size))
        return shift(self.tokens[starts[:, None] + np.arange(self.seq_len + 1)])

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, itertools.count(self.start))


def validation_batches(tokens: np.ndarray, seq_len: int, batch_size: int) -> Iterator[Batch]:
    """Windows that follow one another without overlap and make every token but the first a target exactly once.

    The last one is filled up; filled targets are IGNORED.
    """
    n_windows = -(-(len(tokens) - 1) // seq_len)
    for first in range(0, n_windows, batch_size):
        last = min(first + batch_size, n_windows)
        flat = np.full((last - first) * seq_len + 1, IGNORED, dtype=np.int64)
        part = tokens[first * seq_len : last * seq_len + 1]
        flat[: len(part)] = part
        starts = np.arange(last - first) * seq_len
        inputs, targets = shift(flat[starts[:, None] + np.arange(seq_len + 1)])
        yield inputs.clamp(min=0), targets
