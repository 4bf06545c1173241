"""Tokens on disk.

A text is stored as `train.bin` and `val.bin` (flat token ids, memory-mapped), `tokenizer.json` and `meta.json`, in a
folder of the cache that is named by the hash of the settings and of the content of the source, wherever that lies. The
folder is written beside and renamed into place: processes that build it at once write the same bytes. Its checksum is
compared when it is opened, and a damaged folder is built again.
An end-of-text token precedes each document, so every token of the text has a token before it.
"""

import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lm.config import TABLES, DataConfig, TokenizerConfig
from lm.data.ngram import STRETCH, TRAIN_BYTES, VAL_BYTES, bits_per_byte, evenly_spaced
from lm.data.sources import Source, only_file, open_source, open_sources
from lm.data.text import Text, chunks, decoded, derived, overlap, read, sample, split, split_fold, stretches
from lm.data.tokenizer import EOT, Tokenizer, build_tokenizer, decoded_documents, encode, load_tokenizer, lost
from lm.errors import UserError
from lm.system.files import json_sha256, read_json, sha256, sync_folder, write_json, write_text

FORMAT = 10  # of the folder; a change causes folders to be built again
SEARCHED, STRETCH_TOKENS, N_STRETCHES = 10_000_000, 64, 50  # training tokens, and validation tokens looked for in them
FILES = ("train.bin", "val.bin", "tokenizer.json")
SELECTING = ("source", "separator", "column", "rows", "sha256", "max_bytes")  # settings that decide which text is read
MIN_OVERLAP = 0.001  # share of the validation text that may be in training documents before it is said
MIN_COPIED = 0.05  # share of places of the validation text that may stand in the training text before it is said
CHUNK = 1 << 20  # tokens that are looked at at a time; even
NPY = b"\x93NUMPY"  # what a file of numpy.save begins with
ABANDONED_SECONDS = 24 * 3600.0  # after which a folder that nobody writes to is that of a killed process

OTHER_CACHE = "data.cache_dir=DIR keeps the tokens elsewhere"
log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TextData:
    """A corpus ready for training."""

    tokenizer: Tokenizer
    train: np.ndarray  # (n_tokens,) ids, starting with end of text
    val: np.ndarray
    val_bytes: int  # UTF-8 bytes of the validation text: what bits per byte divides by
    baselines: dict[str, float]  # bits per byte of an n-gram model of the same text, by its name
    hash: str  # of the text, and of its split where that is not decided by data.val_fraction alone
    val_hash: str | None = None  # of a validation text of its own, with the names of its documents
    revision: str | None = None  # the commit on the Hub that the text was read from
    ngram_share: float = 1.0  # of the training text, from which the n-gram model was made
    copied: float = 0.0  # share of the places looked at in the validation text that stand in the training text

    @property
    def n_targets(self) -> int:
        """How many tokens of the validation text are scored: all after the first, but those that are no text."""
        targets, unscored = self.val[1:], self.tokenizer.unscored
        if unscored is None:
            return len(targets)
        return sum(int(np.count_nonzero(targets[i : i + CHUNK] != unscored)) for i in _chunks(targets))

    def documents(self) -> np.ndarray:
        """Where the documents of the training text begin, (n,): at its first token, and at each end-of-text token."""
        starts = _chunks(self.train)  # it may exceed memory
        places = [start + np.flatnonzero(self.train[start : start + CHUNK] == self.tokenizer.eot) for start in starts]
        return np.union1d([0], np.concatenate(places))


def prepare(
    config: DataConfig,
    tokenizer: TokenizerConfig,
    quiet: bool = True,
    trained: Path | None = None,
    downloads: bool = True,
) -> TextData:
    """Open the tokens of a text, which are built if they do not exist. Raises UserError for unusable text.

    `trained`: the tokenizer.json of a run with these settings, with which they are built in place of training BPE anew.
    `downloads`: whether a text of the Hub may be downloaded, if its tokens are not there.
    """
    sources = open_sources(config)
    held_out = [config.val_fraction, config.val_max_bytes, config.fold] if len(sources) == 1 else None
    identity: dict[str, Any] = {"format": FORMAT, "held_out": held_out, **asdict(tokenizer)}
    identity |= {key: getattr(config, key) for key in SELECTING}
    states = identity["states"] = [source.state() for source in sources]
    if tokenizer.path is not None:
        own = load_tokenizer(Path(tokenizer.path))
        identity["path"] = own.hash
        note = "is added, because it has no usual end-of-text token" if own.eot_added else "is its end-of-text token"
        log.info("tokenizer.path=%s: %s %s; %d tokens", tokenizer.path, own.eot_token, note, own.vocab_size)
    folder = config.cache / "tokens" / json_sha256(identity)[:16]
    if trained is not None and tokenizer.kind == "bpe" and not folder.exists():
        file = TokenizerConfig(kind="file", vocab_size=None, path=str(trained))
        return prepare(config, file, quiet, downloads=downloads)
    if not _is_whole(folder):
        if config.source == "hub" and not downloads:
            place = f"{sources[0].place}: its tokens are not in {folder.parent}"
            raise UserError(f"{place}; give a text: data=text data.path=FILE")
        write = _write_given if config.source == "tokens" else _write_encoded
        with _naming(folder.parent), _replacing(folder, folder.exists()) as partial:
            write(partial, sources, config, tokenizer, quiet)
            if [source.state() for source in sources] != states:
                reason = "the text changed while it was being read; run the same command again"
                raise UserError(f"{sources[0].place}: {reason}")
    data = _open(folder, sources)
    for name, tokens, needed in (("training", data.train, config.seq_len + 1), ("validation", data.val, 2)):
        if len(tokens) < needed:
            held_out_advice = "" if held_out is None else " or raise data.val_fraction"
            advice = " or lower data.seq_len" if name == "training" else held_out_advice
            raise UserError(
                f"data: the {name} text has {len(tokens)} tokens, data.seq_len={config.seq_len} needs {needed}:"
                f" give more text{advice}"
            )
    if config.order == "documents" and len(data.documents()) == 1:
        raise UserError("data.order=documents: no end-of-text token parts the training text; choose data.order=windows")
    return data


def encode_whole(config: DataConfig, tokenizer: Tokenizer, quiet: bool = True) -> tuple[np.ndarray, int]:
    """The tokens (n,) of a whole text, in a file that has no name, and the number of bytes of the text."""
    cache = config.cache / "tokens"
    with _naming(cache):
        _make_cache(cache)
        with (
            tempfile.TemporaryDirectory(".partial", dir=cache) as folder,
            tempfile.TemporaryFile(dir=cache) as file,
        ):
            text = _read(open_source(config), Path(folder, "text"), config, quiet)
            for ids in encode(tokenizer, text.whole(), "encoding", quiet):
                file.write(ids.data)
            file.flush()
            return np.memmap(file, ids.dtype, "r"), text.size


def _read(source: Source, path: Path, config: DataConfig, quiet: bool) -> Text:
    text = read(source, path, max_bytes=config.max_bytes, quiet=quiet)
    if config.rows == "lines":
        return text.joined()
    if text.n_empty and config.source in TABLES:  # an empty file is nothing to be told of
        n = text.n_empty + len(text.records)
        log.info("%s: %d of %d rows are empty or null and have been skipped", source.place, text.n_empty, n)
    return text


# --- the folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder is there and its files match their checksum. Its name says which text it holds."""
    if not folder.exists():
        return False
    try:
        if read_json(folder / "meta.json")["checksum"] != _checksum(folder):
            raise ValueError("its files do not match their checksum")
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: damaged token cache (%s); it is built again", folder, error)
        return False
    return True


def _write_encoded(
    folder: Path, sources: list[Source], config: DataConfig, settings: TokenizerConfig, quiet: bool
) -> None:
    """The text is read once, into a file that is removed afterwards, and encoded from there.

    A validation text of its own, which data.max_bytes does not limit, is read first: a mistake in it is found before a
    long reading.
    """
    whole = replace(config, max_bytes=None)
    val_texts = [_read(source, folder / "val-text", whole, quiet) for source in sources[1:]]
    texts = [_read(sources[0], folder / "text", config, quiet), *val_texts]
    if val_texts:  # both are used whole
        train, val, uncut = texts[0].whole(), texts[1].whole(), 0.0
        data_hash = derived(texts[0].hash, f"val={texts[1].hash}")
    elif config.fold is not None:
        train, val, data_hash = split_fold(texts[0], config.fold, config.val_fraction)
        uncut = 0.0
    else:
        train, val, data_hash, uncut = split(texts[0], config.val_fraction, config.val_max_bytes)
    everything = (chunk for part in (train, val) for chunk, _ in chunks(decoded(part)))
    tokenizer = build_tokenizer(settings, sample(train), everything, quiet)
    for name, part in (("train", train), ("val", val)):
        with open(folder / f"{name}.bin", "wb") as file:
            for ids in encode(tokenizer, part, f"encoding {name}", quiet):
                file.write(ids.data)
    used = [b"".join(stretches(part, most, STRETCH)) for part, most in ((train, TRAIN_BYTES), (val, VAL_BYTES))]
    meta: dict[str, Any] = {"hash": data_hash, "val_hash": val_texts[0].hash if val_texts else None}
    meta |= {"val_bytes": val.n_bytes, "overlap": overlap(train, val)}
    meta |= {"notes": _notes(texts, uncut, config, tokenizer), "ngram_share": len(used[0]) / max(train.n_bytes, 1)}
    if settings.kind == "bpe" and tokenizer.vocab_size < (asked := settings.vocab_size or 0):
        meta["notes"] += [f"tokenizer.vocab_size={asked}: the text yields no more than {tokenizer.vocab_size} tokens"]
    for text in texts:
        text.path.unlink()
    _write_meta(folder, tokenizer, meta, *used)


def _notes(texts: list[Text], uncut: float, config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """What the user is told of a text each time that its tokens are opened; `uncut` is the share from `split`."""
    notes = []
    if uncut:
        key = "data.val_split=NAME" if config.source == "hub" else "data.val_path=FILE"
        notes.append(
            f"data: whole documents for validation would be {100 * uncut:.0f} % of the text, so the last of them is cut"
            f" to data.val_fraction={config.val_fraction}; {key} names a validation text of its own"
        )
    for word in sorted({EOT, tokenizer.eot_token}):
        if n := sum(text.count(word.encode()) for text in texts):
            advice = f"; 'data.separator={word}' ends a document there" if config.source == "text" else ""
            notes.append(f"data: the text spells {word} {n:,} times, as ordinary characters{advice}")
    return notes


def _write_given(
    folder: Path, sources: list[Source], config: DataConfig, settings: TokenizerConfig, quiet: bool
) -> None:
    """Tokens that were made elsewhere stay where they are, and the folder leads to them."""
    if len(sources) == 1:
        raise UserError("data.val_path: data=tokens needs one, the tokens of the validation text")
    if settings.path is None:
        needs = "data=tokens needs the tokenizer that made them: tokenizer=file tokenizer.path=FILE, a tokenizer.json"
        raise UserError(f"tokenizer={settings.kind}: {needs}")
    tokenizer, paths = load_tokenizer(Path(settings.path)), [only_file(source) for source in sources]
    train, val = (_given_ids(path, tokenizer, settings.path) for path in paths)
    for name, path in zip(("train", "val"), paths, strict=True):
        os.symlink(path.resolve(), folder / f"{name}.bin")
    if tokenizer.unknown is not None and any((val[i : i + CHUNK] == tokenizer.unknown).any() for i in _chunks(val)):
        raise UserError(
            f"{paths[1]}: has the token {tokenizer.unknown}, which stands for text that {settings.path} lacks,"
            " so bits per byte would be wrong"
        )
    if (probe := lost(tokenizer)) is not None:
        example = f"{probe!r} comes back as {tokenizer.decode(tokenizer.encode(probe))!r}"
        log.warning("%s: bits per byte are of the text as the tokenizer leaves it (%s)", settings.path, example)
    if not (n_bytes := sum(len(text.encode()) for text in decoded_documents(tokenizer, val))):
        raise UserError(f"{paths[1]}: its tokens have no text; expected the tokens of the validation text")
    per_token = n_bytes / len(val)
    used = [evenly_spaced(ids, int(most / per_token)) for ids, most in ((train, TRAIN_BYTES), (val, VAL_BYTES))]
    hashes = [*map(sha256, paths)]
    meta = {"hash": json_sha256(hashes), "val_hash": hashes[1], "val_bytes": n_bytes, "overlap": None, "notes": []}
    meta |= {"ngram_share": len(used[0]) / max(len(train), 1)}
    _write_meta(folder, tokenizer, meta, *("".join(decoded_documents(tokenizer, ids)).encode() for ids in used))


def _given_ids(path: Path, tokenizer: Tokenizer, name: str) -> np.ndarray:
    """The ids (n,) of a file, of the integer type that its vocabulary needs. Raises UserError if it has another one."""
    width = np.dtype(tokenizer.dtype).itemsize
    expected = f"expected flat token ids of {tokenizer.dtype}: ids.astype({tokenizer.dtype!r}).tofile(FILE)"
    with open(path, "rb") as file:
        if file.read(len(NPY)) == NPY:
            raise UserError(f"{path}: is a file of numpy.save; {expected}")
    if path.stat().st_size % width:
        raise UserError(f"{path}: its size is no multiple of {width} bytes; {expected}")
    ids = _mapped(path, tokenizer.dtype)
    if len(ids) > 3 and not any(ids[i + 1 : i + CHUNK : 2].any() for i in _chunks(ids)):
        raise UserError(f"{path}: every second {tokenizer.dtype} is 0, as if an id took {2 * width} bytes; {expected}")
    highest = max((int(ids[i : i + CHUNK].max()) for i in _chunks(ids)), default=0)
    if highest >= tokenizer.vocab_size:
        raise UserError(f"{path}: has the token {highest}, but {name} has {tokenizer.vocab_size} tokens; {expected}")
    return ids


def _chunks(ids: np.ndarray) -> range:
    return range(0, len(ids), CHUNK)


def _write_meta(folder: Path, tokenizer: Tokenizer, meta: dict[str, Any], train: bytes, val: bytes) -> None:
    """`train` and `val`: what the n-gram model is made from, and what it is scored on."""
    meta |= {"dtype": tokenizer.dtype, "baselines": {"ngram": bits_per_byte(train, val)}}
    meta["copied"] = max(_copied(folder, tokenizer.dtype), (meta["overlap"] or {"share": 0.0})["share"])
    write_text(folder / "tokenizer.json", tokenizer.to_json())
    write_json(folder / "meta.json", meta | {"checksum": _checksum(folder)})


def _copied(folder: Path, dtype: str) -> float:
    """The share of some stretches of the validation tokens that stand in the training tokens, or their beginning."""
    train, val = (_mapped(folder / f"{name}.bin", dtype) for name in ("train", "val"))
    searched, last = train[:SEARCHED].tobytes(), max(len(val) - STRETCH_TOKENS, 0)
    starts = {*np.linspace(0, last, N_STRETCHES, dtype=int)}
    return sum(val[start : start + STRETCH_TOKENS].tobytes() in searched for start in starts) / len(starts)


def _open(folder: Path, sources: list[Source]) -> TextData:
    meta = read_json(folder / "meta.json")
    common, copied = meta["overlap"] or {"share": 0.0}, 100 * meta["copied"]
    if common["share"] >= MIN_OVERLAP or meta["copied"] >= MIN_COPIED:
        line = f"data: {copied:.1f} % of the places looked at in the validation text stand in the training text too"
        if common["share"]:
            line += f"; {common['n_documents']} of {common['of']} validation documents are training documents"
        log.warning(line)
    for note in meta["notes"]:
        log.info(note)
    return TextData(
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        train=_mapped(folder / "train.bin", meta["dtype"]),
        val=_mapped(folder / "val.bin", meta["dtype"]),
        **{key: meta[key] for key in ("val_bytes", "baselines", "ngram_share", "copied", "hash", "val_hash")},
        revision=getattr(sources[0], "commit", None),
    )


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # no empty file can be mapped


def _checksum(folder: Path) -> str:
    """XXH3 with 128 bits of the files of a folder, as fast as they are read. It is no protection against forgery."""
    digest = xxhash.xxh3_128()
    for name in FILES:
        with open(folder / name, "rb", buffering=0) as file:
            digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


@contextmanager
def _naming(cache: Path) -> Iterator[None]:
    """Let an error of writing to the cache name it, and the setting that chooses another."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or cache)
        if error.errno is None or not (place.is_relative_to(cache) or cache.is_relative_to(place)):
            raise
        raise OSError(error.errno, f"{error.strerror}; {OTHER_CACHE}", str(place)) from error


def _make_cache(cache: Path) -> None:
    """Make the folder, without what processes that were killed long ago have left in it."""
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob("*.partial"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left)


@contextmanager
def _replacing(folder: Path, replaces: bool) -> Iterator[Path]:
    """An empty folder beside `folder`, which takes its name at the end, or is removed on an error.

    `replaces`: whether it takes the place of a folder that is there.
    """
    cache = folder.parent
    _make_cache(cache)
    partial, old = (Path(tempfile.mkdtemp(".partial", f"{folder.name}-", cache)) for _ in range(2))
    try:
        yield partial
        partial.chmod(0o755)  # as mkdir makes it; mkdtemp closes it to others
        if replaces and folder.exists():
            os.rename(folder, old)
        try:
            os.rename(partial, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise  # else another process was faster, and its bytes are the same
        sync_folder(cache)
    finally:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
