"""Tokenizers: text to token ids and back, read from a file or made from a text as byte-level BPE, characters or bytes.

Every tokenizer has one end-of-text token, which no text can produce: a text that spells the token's name is encoded as
ordinary characters.
"""

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lm.config import TokenizerConfig
from lm.data.text import ANYWHERE, SAFE_CUT, Part, chunks, progress, stretches
from lm.errors import UserError, error_prefix, first_line

EOT = "<|endoftext|>"
# End-of-text tokens of tokenizer.json files in use, in the order of preference.
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")
CHARACTERS = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
# Parts of a BPE model, each of which lets an id depend on more than one character.
JOINING = ("merges", "ignore_merges", "fuse_unk", "continuing_subword_prefix", "end_of_word_suffix")
PRE_TOKENIZERS = [json.loads(step.__getstate__()) for step in (CHARACTERS, BYTES)]
# BPE is trained on words and runs of spaces of at most 512 characters, because the time of training grows with the
# square of their length.
SHORT_WORDS = pre_tokenizers.Split(tokenizers.Regex(r"\S{512}(?=\S)|\s{512}(?=\s)"), "merged_with_previous")
HALF = re.compile("[\ud800-\udfff]")  # half of a character
SAMPLE, SAMPLE_STRETCH = 1 << 25, 1 << 16  # bytes of text that BPE is trained on, and bytes of a stretch
GROUP = 128  # pieces of a text that all threads encode together: enough for 64 threads, and little memory

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)  # warns once of the same characters or file, however often they are read


class Tokenizer:
    """The part of `tokenizers.Tokenizer` that this project needs.

    The end-of-text token is the first name of EOT_NAMES that is a special token, or else `eot`, or else the token that
    the template of the file puts before a text. Without such a token, the constructor adds EOT. A text begins with the
    token of the template, such as <|begin_of_text|> of Llama 3, or else with end of text. Raises UserError if the
    tokenizer lacks `eot`, has gaps in its ids, or encodes the spelled name of end of text as end of text.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("héllo <|endoftext|>"))
    'héllo <|endoftext|>'
    """

    def __init__(self, backend: tokenizers.Tokenizer, eot: str | None = None) -> None:
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        layout = json.loads(backend.to_str())
        template = backend.encode("").ids  # what the template of the file puts around a text
        before = backend.id_to_token(template[0]) if template else None
        usual = next((name for name in EOT_NAMES if name in special), None)
        if usual is None and eot is not None and backend.token_to_id(eot) is None:
            raise UserError(f"the tokenizer has no token {eot}, which is said to be its end of text")
        self.eot_token = usual or eot or (before if before in special else None) or EOT
        self.eot_added = backend.token_to_id(self.eot_token) is None
        backend.add_special_tokens([self.eot_token])  # an ordinary token of that name becomes a special one
        backend.encode_special_tokens = True  # "<|endoftext|>" in a text is ordinary text
        backend.no_truncation()
        backend.no_padding()
        self.dropout: float = layout["model"].get("dropout") or 0.0  # dropout of the file, which is switched off
        if self.dropout:  # a regulariser of training, which would make every score random
            backend.model.dropout = None  # only BPE has dropout
        self.backend = backend
        self.eot: int = backend.token_to_id(self.eot_token)  # type: ignore[assignment]  # the token has just been added
        if self.eot_token not in (usual, before, EOT):  # to_json must say which token ends a text
            backend.post_processor = processors.TemplateProcessing(
                single=f"{self.eot_token} $A", special_tokens=[(self.eot_token, self.eot)]
            )
            before = self.eot_token
        self.special = special | {self.eot_token}
        self.begin_token = before if before in special else self.eot_token
        self.begin: int = backend.token_to_id(self.begin_token)  # type: ignore[assignment]
        self.stops = {self.eot, self.begin}  # ids at which generation ends
        self.unscored = None if self.begin == self.eot else self.begin  # follows end of text and is no text
        self.vocab_size: int = backend.get_vocab_size()
        self.dtype = "uint16" if self.vocab_size <= 1 << 16 else "uint32"  # of ids on disk
        self.cut = _safe_cut(layout)
        highest = max(backend.get_vocab().values())
        if highest >= self.vocab_size:
            raise UserError(
                f"the tokenizer has {self.vocab_size} tokens but an id {highest}: expected ids without gaps"
            )
        if self._eot_in_text():
            reason = f"the tokenizer encodes a text that spells {self.eot_token} as its end-of-text token"
            raise UserError(f"{reason}; expected a tokenizer without this piece, to which {EOT} is added")

    @property
    def separator(self) -> list[int]:
        """Return the ids before each document: end of text, and the id that a text begins with, if this id differs."""
        return [self.eot] if self.begin == self.eot else [self.eot, self.begin]

    def _eot_in_text(self) -> bool:
        try:
            return self.eot in self.encode(self.eot_token)
        except UserError:  # the text has characters that the vocabulary lacks
            return False

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text.

        Raises UserError for half of a character, and for a character that the vocabulary lacks (character level only).
        """
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # tokenizers raises bare Exception
            if surrogate := HALF.search("".join(texts)):
                raise UserError(f"a text has {surrogate[0]!r}, half of a character; expected UTF-8") from error
            vocabulary = self.backend.get_vocab()
            missing = next((c for text in texts for c in text if c not in vocabulary), None)
            if missing is None:
                raise
            raise UserError(
                f"tokenizer: does not know the character {missing!r}, which the text of its run did not have; "
                "expected a text of known characters, or a run with tokenizer=byte or bpe"
            ) from error

    def without_unknown(self, prompt: str) -> str:
        """Return a prompt without the characters that the vocabulary lacks. Warn of these characters once.

        Raises UserError for half of a character.
        """
        try:
            self.encode(prompt)
            for name in sorted(name for name in self.special if name in prompt):
                _warn_once("a prompt spells %s, which is read as ordinary characters", name)
            return prompt
        except UserError:
            vocabulary = self.backend.get_vocab()
            unknown = "".join(dict.fromkeys(c for c in prompt if c not in vocabulary))
            if not unknown or HALF.search(prompt):
                raise
            characters = " ".join(map(repr, unknown))
            _warn_once("the model does not know %s: the prompt is continued without them", characters)
            return "".join(c for c in prompt if c in vocabulary)

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Return the text of ids. `after` holds the ids before them in a text, whose own text is left out."""
        before = self.backend.decode([*after], skip_special_tokens=True) if after else ""
        return self.backend.decode([*after, *ids], skip_special_tokens=True)[len(before) :]

    def decode_all(self, ids: list[list[int]]) -> list[str]:
        return self.backend.decode_batch(ids, skip_special_tokens=True)

    def label(self, token: int) -> str:
        """Return the text of a token inside of a text, or its name in the vocabulary if it is no whole character."""
        text = self.decode([token], after=[token])
        return text if text.strip("\ufffd") else self.backend.id_to_token(token) or f"<{token}>"

    def stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield text as ids arrive, in pieces of whole characters. The joined pieces equal `decode` of all ids.

        `after` is as in `decode`. Decode new ids together with the few ids before them, because a decoder may treat
        the first id of a text differently: SentencePiece leaves out its space.
        `tokenizers.decoders.DecodeStream` would drop an unfinished character at the end.
        """
        yield from self.stream_chunks(([token] for token in ids), after)

    def stream_chunks(self, chunks: Iterable[list[int]], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield text as chunks of ids arrive, as `stream` does. Hold about two chunks in memory."""
        window = list(after)
        shown = len(window)  # ids of the window whose text has been yielded
        for chunk in chunks:
            window += chunk
            before, now = self.decode(window[:shown]), self.decode(window)
            if len(now) > len(before) and not now.endswith("\ufffd"):
                yield now[len(before) :]
                window = window[shown:]
                shown = len(window)
        rest = self.decode(window)[len(self.decode(window[:shown])) :]
        if rest:
            yield rest

    def to_json(self) -> str:
        return self.backend.to_str(pretty=False)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _safe_cut(layout: dict[str, Any]) -> re.Pattern[str] | None:
    """Return where a cut of a text leaves the ids of the text unchanged, or None for nowhere.

    Return ANYWHERE if each character is a token or several tokens. Return SAFE_CUT, before a space or a
    line break behind a word, for other byte-level BPE.
    """
    model, added = layout["model"], layout["added_tokens"]
    is_char, is_byte_level = (layout["pre_tokenizer"] == step for step in PRE_TOKENIZERS)
    crosses = any(token["rstrip"] or re.search(r"\S\s", token["content"]) for token in added)
    if layout["normalizer"] is not None or crosses or not (is_char or is_byte_level):
        return None
    is_alone = "merges" in model and not any(model.get(key) for key in JOINING)
    return ANYWHERE if (is_char or is_alone) and all(token["special"] for token in added) else SAFE_CUT


def load_tokenizer(path: str | Path, eot: str | None = None) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Raises UserError with the file if the file is missing or damaged.

    >>> load_tokenizer(Path("absent.json"))
    Traceback (most recent call last):
    lm.errors.UserError: absent.json: No such file or directory; expected a tokenizer.json
    """
    try:
        backend = tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a tokenizer.json") from error
    except BaseException as error:  # a panic of the library, as for a malformed part, is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: not a tokenizer.json ({first_line(error)})") from error
    with error_prefix(str(path)):
        tokenizer = Tokenizer(backend, eot)
    if tokenizer.dropout:
        note = "%s: its BPE dropout of %g is switched off, so a text has the same tokens each time"
        _warn_once(note, path, tokenizer.dropout)
    return tokenizer


# --- made from a text


def _byte_level(vocab: dict[str, int] | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab, [] if vocab else None))
    backend.pre_tokenizer = BYTES
    backend.decoder = decoders.ByteLevel()
    return backend


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) with at most `vocab_size` tokens."""
    backend = _byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([SHORT_WORDS, BYTES])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # the trainer would show four bars
    )
    with progress(None, "training the tokenizer") as bar:
        read = (text for text in texts if bar.update(len(text.encode())) or True)
        backend.train_from_iterator(read, trainer)
    backend.pre_tokenizer = BYTES
    return Tokenizer(backend)


def char_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of end of text and each distinct character of the texts, in order of code points."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    vocab = {EOT: 0} | {char: i for i, char in enumerate(sorted(alphabet), start=1)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=""))
    backend.pre_tokenizer = CHARACTERS
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of end of text and the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = _byte_level({EOT: 0} | {symbol: i for i, symbol in enumerate(alphabet, start=1)})
    return Tokenizer(backend)


def build_tokenizer(config: TokenizerConfig, train: Iterable[str], everything: Iterable[str]) -> Tokenizer:
    """Return the tokenizer of a run. Train BPE on the training text alone; take characters from the whole text."""
    if config.kind == "bpe":
        assert config.vocab_size is not None
        return train_bpe(train, config.vocab_size)
    if config.kind == "file":
        assert config.path is not None
        return load_tokenizer(Path(config.path))
    return char_tokenizer(everything) if config.kind == "char" else byte_tokenizer()


# --- a text and its ids, streamed from disk


def sample(part: Part) -> Iterator[str]:
    """Yield the text that BPE is trained on: all up to SAMPLE bytes, else SAMPLE bytes in evenly spaced stretches."""
    if part.n_bytes <= SAMPLE:
        yield from (text for text, _ in chunks(part))
        return
    for pieces in stretches(part, SAMPLE, SAMPLE_STRETCH):  # a stretch may begin and end inside a character
        yield from (piece.decode(errors="ignore") for piece in pieces)


def encode(tokenizer: Tokenizer, part: Part, label: str = "") -> Iterator[np.ndarray]:
    """Yield the ids of a part in arrays, with the ids of `separator` before each document.

    Raises UserError if the tokenizer loses text, because bits per byte would be wrong.
    """
    with progress(part.n_bytes, label) as bar:
        pieces = chunks(part, tokenizer.cut)
        while group := [*itertools.islice(pieces, GROUP)]:
            texts = [text for text, _ in group]
            ids = tokenizer.encode_all(texts)
            _compare(texts, tokenizer.decode_all(ids))
            flat: list[int] = []
            for (text, first), chunk in zip(group, ids, strict=True):
                flat += [*tokenizer.separator, *chunk] if first else chunk
                bar.update(len(text.encode()))
            yield np.array(flat, dtype=tokenizer.dtype)


def _compare(texts: list[str], decoded_texts: list[str]) -> None:
    for text, other in zip(texts, decoded_texts, strict=True):
        if text != other:
            pairs = enumerate(zip(text, other, strict=False))
            at = next((i for i, (before, after) in pairs if before != after), min(len(text), len(other)))
            around = slice(max(at - 10, 0), at + 10)
            raise UserError(
                "tokenizer: loses part of the text, so bits per byte would be wrong:"
                f" {text[around]!r} comes back as {other[around]!r}"
            )
