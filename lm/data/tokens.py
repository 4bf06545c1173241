"""Tokens on disk.

A text is stored as `train.bin` and `val.bin` (flat token ids, memory-mapped), `tokenizer.json` and `meta.json`, in a
folder of the cache. The name of the folder is the hash of the settings, of the content of the source, wherever the
source lies, and of the code in READING. `prepare` writes a scratch folder and renames the scratch folder into place, so
that processes may build a folder at once. `prepare` compares the checksum when it opens the folder, and builds a
damaged folder again.
An end-of-text token precedes each document, so every token of the text has a token before it.
"""

import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lm.config import TABLES, DataConfig, TokenizerConfig
from lm.data.ngram import STRETCH, TRAIN_BYTES, VAL_BYTES, bits_per_byte
from lm.data.sources import Source, files_of, open_source, open_sources, warn_of_other_formats
from lm.data.text import CHARACTER, MIN_COPIED, Part, Text, chunks, derived, overlap, read, split, stretches
from lm.data.tokenizer import EOT, Tokenizer, build_tokenizer, encode, load_tokenizer, sample
from lm.errors import UserError, error_prefix
from lm.registry import from_lab
from lm.system.code import READING, files_hash
from lm.system.files import json_sha256, read_json, rename_folder, scratch_folder, write_json, write_text

FILES = ("train.bin", "val.bin", "tokenizer.json")
SELECTING = ("source", "separator", "column", "rows", "sha256", "max_bytes")  # settings that decide which text is read
SEARCHED = 10_000_000  # training tokens that are searched for stretches of the validation text
STRETCH_TOKENS, N_STRETCHES = 64, 50  # length and number of these stretches
MIN_SHARED = 0.001  # least share of the validation text in training documents that gives a warning
CHUNK = 1 << 20  # tokens that a search reads at a time

log = logging.getLogger(__name__)
_note_once = cache(log.info)  # the folds of a text have the same notes


@dataclass(slots=True, kw_only=True)
class TextData:
    """A corpus ready for training."""

    tokenizer: Tokenizer
    train: np.ndarray  # (n_tokens,) ids, starting with end of text
    val: np.ndarray
    val_bytes: int  # UTF-8 bytes of the validation text: what bits per byte divides by
    baselines: dict[str, float]  # bits per byte of an n-gram model of the same text, by its name
    hash: str  # of the text, and of the split if data.val_fraction alone does not decide the split
    val_hash: str | None = None  # of a separate validation text, with the names of its documents
    revision: str | None = None  # the commit on the Hub that the text was read from
    ngram_share: float = 1.0  # of the training text, from which the n-gram model was made
    copied: float = 0.0  # share of the validation text, by places or whole documents, that stands in the training text

    @property
    def n_targets(self) -> int:
        """Return how many tokens of the validation text are scored: all after the first, except `unscored` tokens."""
        targets, unscored = self.val[1:], self.tokenizer.unscored
        if unscored is None:
            return len(targets)
        return sum(int(np.count_nonzero(targets[i : i + CHUNK] != unscored)) for i in chunk_starts(targets))

    def document_starts(self) -> np.ndarray:
        """Return where the documents of the training text begin, (n,): at token 0, and at each end-of-text token."""
        starts = chunk_starts(self.train)  # the text may exceed memory
        places = [start + np.flatnonzero(self.train[start : start + CHUNK] == self.tokenizer.eot) for start in starts]
        return np.union1d([0], np.concatenate(places))


def chunk_starts(ids: np.ndarray) -> range:
    return range(0, len(ids), CHUNK)


def prepare(
    config: DataConfig,
    tokenizer: TokenizerConfig,
    trained: Path | None = None,
    downloads: bool = True,
) -> TextData:
    """Return the tokens of a text. Build the tokens if they do not exist. Raises UserError for unusable text.

    `trained`: the tokenizer.json of a run with these settings, used to build the tokens without training BPE anew.
    `downloads`: whether a text of the Hub may be downloaded, if its tokens do not exist.
    """
    sources = open_sources(config, downloads)
    warn_of_other_formats(sources)
    states = [source.state() for source in sources]
    held_out = [config.val_fraction, config.val_max_bytes, config.fold] if len(sources) == 1 else None
    identity: dict[str, Any] = {"code": files_hash(READING), "held_out": held_out, "states": states}
    identity |= {key: getattr(config, key) for key in SELECTING}
    identity["tokenizer"] = asdict(tokenizer)
    if tokenizer.path is not None:
        with error_prefix("tokenizer.path"):
            own = load_tokenizer(Path(tokenizer.path))
        identity["tokenizer"]["path"] = own.hash
        note = "is added, because it has no usual end-of-text token" if own.eot_added else "is its end-of-text token"
        log.info("tokenizer.path=%s: %s %s; %d tokens", tokenizer.path, own.eot_token, note, own.vocab_size)
    folder = config.cache / "tokens" / json_sha256(identity)[:16]
    if trained is not None and tokenizer.kind == "bpe" and not folder.exists():
        file = TokenizerConfig(kind="file", vocab_size=None, path=str(trained))
        return prepare(config, file, downloads=downloads)
    if not _is_whole(folder):
        if config.source == "hub" and not downloads:
            place = f"{sources[0].place}: its tokens are not in {folder.parent}"
            raise UserError(f"{place}; give a text: data=text data.path=FILE")
        build = from_lab("lm.lab.sources.made_elsewhere.link") if config.source == "tokens" else _encode_sources
        with _cache_folder(folder.parent) as scratch:
            build(scratch, sources, config, tokenizer)
            if [source.state() for source in sources] != states:
                reason = "the text changed while it was being read; run the same command again"
                raise UserError(f"{sources[0].place}: {reason}")
            rename_folder(scratch, folder)
    data = _open(folder, sources)
    _check_lengths(data, config)
    return data


def _check_lengths(data: TextData, config: DataConfig) -> None:
    for name, tokens, needed in (("training", data.train, config.seq_len + 1), ("validation", data.val, 2)):
        if len(tokens) < needed:
            reason, advice = f"data.seq_len={config.seq_len}", " or lower data.seq_len"
            if name == "validation":
                reason = "a score"
                advice = "" if config.val_path or config.val_split else " or raise data.val_fraction"
            what = f"has {len(tokens)} tokens, {reason} needs {needed}"
            raise UserError(f"data: the {name} text {what}: give more text{advice}")
    if config.order == "documents" and len(data.document_starts()) == 1:
        raise UserError("data.order=documents: the training text is one document; choose data.order=windows")


def encode_whole(config: DataConfig, tokenizer: Tokenizer) -> tuple[np.ndarray, int, str]:
    """Return the tokens (n,) of a whole text, mapped from a file without a name, its size in bytes, and its hash."""
    with _cache_folder(config.cache / "tokens") as scratch:
        source = open_source(config)
        warn_of_other_formats([source])
        text = _read(source, scratch / "text", config)
        for note in _notes([text], 0.0, config, tokenizer):
            log.info(note)
        _write_ids(scratch / "ids", tokenizer, text.whole(), "encoding")
        return mapped(scratch / "ids", tokenizer.dtype), text.size, text.hash


# --- a folder of the cache


def _is_whole(folder: Path) -> bool:
    """Return whether a folder exists and its files match their checksum. Remove a damaged folder."""
    if not folder.exists():
        return False
    try:
        if read_json(folder / "meta.json")["checksum"] != _checksum(folder):
            raise ValueError("its files do not match their checksum")
        return True
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: damaged token cache (%s); it is built again", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return False


@contextmanager
def _cache_folder(cache: Path) -> Iterator[Path]:
    """Yield an empty folder inside the cache. An error of writing names the place and the setting of another cache."""
    try:
        with scratch_folder(cache) as folder:
            yield folder
    except OSError as error:
        place = Path(error.filename or cache)
        if error.errno is None or not (place.is_relative_to(cache) or cache.is_relative_to(place)):
            raise
        reason = f"{error.strerror}; data.cache_dir=DIR keeps the tokens elsewhere"
        raise OSError(error.errno, reason, str(place)) from error


def _checksum(folder: Path) -> str:
    """Return the XXH3 hash (128 bits) of the files of a folder.

    The hash is as fast as a read, but no protection against forgery.
    """
    digest = xxhash.xxh3_128()
    for name in FILES:
        with open(folder / name, "rb", buffering=0) as file:
            digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # no empty file can be mapped


def write_meta(folder: Path, tokenizer: Tokenizer, meta: dict[str, Any]) -> None:
    """Write the tokenizer, and the description of the token files of a folder."""
    write_text(folder / "tokenizer.json", tokenizer.to_json())
    train, val = (mapped(folder / f"{name}.bin", tokenizer.dtype) for name in ("train", "val"))
    copied = max(copied_share(train, val), meta["shared"])
    meta |= {"dtype": tokenizer.dtype, "copied": copied, "checksum": _checksum(folder)}
    write_json(folder / "meta.json", meta)


def copied_share(train: np.ndarray, val: np.ndarray) -> float:
    """Return the share of some stretches of `val` (n,) that stand in the first SEARCHED tokens of `train` (n,)."""
    searched, last = train[:SEARCHED].tobytes(), max(len(val) - STRETCH_TOKENS, 0)
    starts = {*np.linspace(0, last, N_STRETCHES, dtype=int)}
    return sum(val[start : start + STRETCH_TOKENS].tobytes() in searched for start in starts) / len(starts)


def _open(folder: Path, sources: list[Source]) -> TextData:
    meta = read_json(folder / "meta.json")
    if meta["copied"] >= MIN_COPIED or meta["shared"] >= MIN_SHARED:
        log.warning("data: %.1f %% of the validation text stands in the training text too", 100 * meta["copied"])
    for note in meta["notes"]:
        _note_once(note)
    return TextData(
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        train=mapped(folder / "train.bin", meta["dtype"]),
        val=mapped(folder / "val.bin", meta["dtype"]),
        **{key: meta[key] for key in ("val_bytes", "baselines", "ngram_share", "copied", "hash", "val_hash")},
        revision=getattr(sources[0], "commit", None),
    )


# --- from text to tokens


def _read(source: Source, path: Path, config: DataConfig) -> Text:
    text = read(source, path, max_bytes=config.max_bytes)
    n_files = len(files_of(source))
    is_whole = n_files == 1 or not config.max_bytes or text.size + CHARACTER <= config.max_bytes  # all files were read
    is_training = not source.place.startswith("data.val_path=")  # a validation text may be one document
    if config.separator is not None and is_training and is_whole and len(text.records) + text.n_empty == n_files:
        raise UserError(f"data.separator={config.separator}: does not occur in what is read of {source.place}")
    if text.n_empty and config.source in TABLES:  # an empty file needs no message
        n = text.n_empty + len(text.records)
        log.info("%s: %d of %d rows are empty or null and have been skipped", source.place, text.n_empty, n)
    return text.joined() if config.rows == "lines" else text


def _write_ids(path: Path, tokenizer: Tokenizer, part: Part, label: str) -> None:
    with open(path, "wb") as file:
        for ids in encode(tokenizer, part, label):
            file.write(ids.data)


def _encode_sources(folder: Path, sources: list[Source], config: DataConfig, settings: TokenizerConfig) -> None:
    """Read the text once into a file, encode the text from this file, and remove the file.

    Read a separate validation text first: a mistake in this text then appears before a long reading.
    """
    whole = replace(config, max_bytes=None)
    val_texts = [_read(source, folder / "val-text", whole) for source in sources[1:]]
    texts = [_read(sources[0], folder / "text", config), *val_texts]
    rejected_share = 0.0
    if val_texts:  # both texts are used whole
        train, val = texts[0].whole(), texts[1].whole()
        data_hash = derived(texts[0].hash, f"val={texts[1].hash}")
    else:
        train, val, data_hash, rejected_share = split(texts[0], config.val_fraction, config.val_max_bytes, config.fold)
    everything = (chunk for part in (train, val) for chunk, _ in chunks(part))
    tokenizer = build_tokenizer(settings, sample(train), everything)
    for name, part in (("train", train), ("val", val)):
        _write_ids(folder / f"{name}.bin", tokenizer, part, f"encoding {name}")
    notes = _notes(texts, rejected_share, config, tokenizer)
    if settings.kind == "bpe" and tokenizer.vocab_size < (asked := settings.vocab_size or 0):
        notes.append(f"tokenizer.vocab_size={asked}: the text yields fewer tokens")  # the same note for each fold
    meta: dict[str, Any] = {"hash": data_hash, "val_hash": val_texts[0].hash if val_texts else None}
    meta |= {"val_bytes": val.n_bytes, "shared": overlap(train, val), "notes": notes, **_ngram(train, val)}
    for text in texts:
        text.path.unlink()
    write_meta(folder, tokenizer, meta)


def _ngram(train: Part, val: Part) -> dict[str, Any]:
    """Return the score of the n-gram model, and the share of the training text that the model is made from.

    A zero byte stands where a document ends and the next document begins: a run predicts an
    end-of-text token there. No zero byte stands before a validation text that goes on where the
    training text ends.
    """
    used = [[*stretches(part, most, STRETCH)] for part, most in ((train, TRAIN_BYTES), (val, VAL_BYTES))]
    train_text, val_text = (b"".join(map(b"\0".join, stretch)) for stretch in used)
    train_bytes, val_bytes = (sum(len(piece) for pieces in stretch for piece in pieces) for stretch in used)
    is_one = train.text is val.text and len(train.text.records) == 1
    goes_on = is_one and train.spans[-1:, 1].tolist() == val.spans[:1, 0].tolist()
    bits = bits_per_byte(train_text + (b"" if goes_on else b"\0"), val_text, val_bytes)
    return {"baselines": {"ngram": bits}, "ngram_share": train_bytes / max(train.n_bytes, 1)}


def _notes(texts: list[Text], rejected_share: float, config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Return messages about a text for the user, each shown once by each process that opens the tokens."""
    notes = []
    if rejected_share:
        key = "data.val_split=NAME" if config.source == "hub" else "data.val_path=FILE"
        notes.append(
            f"data: whole documents for validation would be {100 * rejected_share:.2g} % of the text, so a document is"
            f" cut to data.val_fraction={config.val_fraction}; {key} names a validation text of its own"
        )
    names = sorted({EOT, *tokenizer.special})
    counts = sum((text.counts([name.encode() for name in names]) for text in texts), Counter[bytes]())
    for name in names:
        if n := counts[name.encode()]:
            is_end = config.source == "text" and name in (EOT, tokenizer.eot_token)
            advice = f"; 'data.separator={name}' ends a document there" if is_end else ""
            notes.append(f"data: the text spells {name} {n:,} times, as ordinary characters{advice}")
    return notes
