"""Tokens that were made elsewhere: flat files of ids, as nanoGPT's prepare.py leaves them, and their tokenizer."""

import itertools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lm.config import DataConfig, TokenizerConfig
from lm.data.ngram import STRETCH, TRAIN_BYTES, VAL_BYTES, bits_per_byte
from lm.data.sources import Documents, Files, Source, files_of, state_of
from lm.data.tokenizer import GROUP, Tokenizer, load_tokenizer
from lm.data.tokens import CHUNK, chunk_starts, mapped, write_meta
from lm.errors import UserError
from lm.system.files import json_sha256, sha256

NPY = b"\x93NUMPY"  # what a file of numpy.save begins with
IDS = 1 << 16  # ids that are decoded at a time
PROBES = ("A", "a  b", "a\n\tb", "e\u0301", "\ufb01")  # which a lossy tokenizer does not give back

log = logging.getLogger(__name__)


class TokenFile:
    """A file of token ids, which stays where it is: `link` makes a folder of the cache that leads to it."""

    def __init__(self, config: DataConfig, place: str, files: Files) -> None:
        self.place, self.files = place, files

    def state(self) -> str:
        return state_of({str(file.resolve()): file for file in self.files.values()})

    def documents(self) -> Documents:
        raise UserError(f"{self.place}: holds the tokens of one tokenizer, expected a text")


def link(folder: Path, sources: list[Source], config: DataConfig, settings: TokenizerConfig) -> None:
    """Fill a folder of the token cache with links to both files. Raises UserError."""
    if len(sources) == 1:
        raise UserError("data.val_path: data=tokens needs one, the tokens of the validation text")
    if settings.path is None:
        needs = "data=tokens needs the tokenizer that made them: tokenizer=file tokenizer.path=FILE, a tokenizer.json"
        raise UserError(f"tokenizer={settings.kind}: {needs}")
    tokenizer, paths = load_tokenizer(Path(settings.path)), [_only_file(source) for source in sources]
    train, val = (_ids_in(path, tokenizer, settings.path) for path in paths)
    for name, path in zip(("train", "val"), paths, strict=True):
        os.symlink(path.resolve(), folder / f"{name}.bin")
    unknown = _unknown_token(tokenizer)
    if unknown is not None and any((val[i : i + CHUNK] == unknown).any() for i in chunk_starts(val)):
        raise UserError(
            f"{paths[1]}: has the token {unknown}, which stands for text that {settings.path} lacks,"
            " so bits per byte would be wrong"
        )
    if (probe := _lost(tokenizer, unknown)) is not None:
        example = f"{probe!r} comes back as {tokenizer.decode(tokenizer.encode(probe))!r}"
        log.warning("%s: bits per byte are of the text as the tokenizer leaves it (%s)", settings.path, example)
    val_bytes = sum(len(piece.encode()) for pieces in documents_of(tokenizer, val) for piece in pieces)
    if not val_bytes:
        raise UserError(f"{paths[1]}: its tokens have no text; expected the tokens of the validation text")
    hashes = [*map(sha256, paths)]
    meta = {"hash": json_sha256(hashes), "val_hash": hashes[1], "val_bytes": val_bytes, "shared": 0.0, "notes": []}
    write_meta(folder, tokenizer, meta | _ngram(tokenizer, train, val, val_bytes / len(val)))


def _ngram(tokenizer: Tokenizer, train: np.ndarray, val: np.ndarray, bytes_per_token: float) -> dict[str, Any]:
    """Return the score of the n-gram model of the decoded text, with a zero byte between documents."""
    used = [_evenly_spaced(ids, int(most / bytes_per_token)) for ids, most in ((train, TRAIN_BYTES), (val, VAL_BYTES))]
    train_texts, val_texts = (["".join(pieces).encode() for pieces in documents_of(tokenizer, ids)] for ids in used)
    bits = bits_per_byte(b"\0".join([*train_texts, b""]), b"\0".join(val_texts), sum(map(len, val_texts)))
    return {"baselines": {"ngram": bits}, "ngram_share": len(used[0]) / max(len(train), 1)}


def _evenly_spaced(values: np.ndarray, n: int) -> np.ndarray:
    """Return at most `n` of the values (m,), or STRETCH if that is more: all, or evenly spaced stretches."""
    if len(values) <= n:
        return values
    n_stretches = max(n // STRETCH, 1)
    return np.concatenate([values[i * len(values) // n_stretches :][:STRETCH] for i in range(n_stretches)])


def _only_file(source: Source) -> Path:
    files = [*files_of(source).values()]
    if len(files) != 1:
        raise UserError(f"{source.place}: is {len(files)} files, expected one of token ids")
    return files[0]


def _ids_in(path: Path, tokenizer: Tokenizer, name: str) -> np.ndarray:
    """Return the ids (n,) of a file, of the integer type that its vocabulary needs, or raise UserError."""
    width = np.dtype(tokenizer.dtype).itemsize
    expected = f"expected flat token ids of {tokenizer.dtype}: ids.astype({tokenizer.dtype!r}).tofile(FILE)"
    with open(path, "rb") as file:
        if file.read(len(NPY)) == NPY:
            raise UserError(f"{path}: is a file of numpy.save; {expected}")
    if path.stat().st_size % width:
        raise UserError(f"{path}: its size is no multiple of {width} bytes; {expected}")
    ids = mapped(path, tokenizer.dtype)
    if len(ids) > 3 and not any(ids[i + 1 : i + CHUNK : 2].any() for i in chunk_starts(ids)):
        raise UserError(f"{path}: every second {tokenizer.dtype} is 0, as if an id took {2 * width} bytes; {expected}")
    highest = max((int(ids[i : i + CHUNK].max()) for i in chunk_starts(ids)), default=0)
    if highest >= tokenizer.vocab_size:
        raise UserError(f"{path}: has the token {highest}, but {name} has {tokenizer.vocab_size} tokens; {expected}")
    return ids


def documents_of(tokenizer: Tokenizer, ids: np.ndarray) -> Iterator[Iterator[str]]:
    """Yield the text of each document, in pieces of bounded size; documents without tokens of their own are left out.

    Each document is decoded by itself, because a decoder may drop a space where a text begins.
    """
    stops = list(tokenizer.stops)
    blocks = ((i, np.isin(ids[i : i + GROUP], stops)) for i in range(0, len(ids), GROUP))
    starts = itertools.chain.from_iterable((i + np.flatnonzero(is_stop)).tolist() for i, is_stop in blocks)
    for begin, end in itertools.pairwise(itertools.chain([0], starts, [len(ids)])):
        if end - begin > 1 or (end > begin and ids[begin] not in stops):
            yield tokenizer.stream_chunks(ids[i : min(i + IDS, end)].tolist() for i in range(begin, end, IDS))


def _unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the id that stands for what the vocabulary lacks; it is no text."""
    model = json.loads(tokenizer.to_json())["model"]
    token = model.get("unk_token")
    unknown: int | None = tokenizer.backend.token_to_id(token) if token else model.get("unk_id")
    return None if unknown in tokenizer.stops else unknown


def _lost(tokenizer: Tokenizer, unknown: int | None) -> str | None:
    """Return a short text that the tokenizer does not give back, though its vocabulary has all of it."""
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if not token.special]
    for probe in (*PROBES, *(f"a {content} b" for content in added)):  # an added token may take the spaces beside it
        with suppress(UserError):  # a character that the vocabulary lacks
            ids = tokenizer.encode(probe)
            if unknown not in ids and tokenizer.decode(ids) != probe:
                return probe
    return None
