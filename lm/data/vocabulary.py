"""Tokenizers that are made from a text: byte-level BPE, characters, bytes."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lm.config import TokenizerConfig, UserError
from lm.data.text import progress
from lm.data.tokenizer import BYTES, CHARACTERS, EOT, Tokenizer, load_tokenizer

MAX_WORD = 512  # characters of a word that BPE is trained on
SPACES = re.compile(rf"\s{{{MAX_WORD + 1}}}")
LONG_WORD = re.compile(rf"\S{{{MAX_WORD}}}(?=\S)|\s{{{MAX_WORD}}}(?=\s)")


def _byte_level(vocab: dict[str, int] | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab, [] if vocab else None))
    backend.pre_tokenizer = BYTES
    backend.decoder = decoders.ByteLevel()
    return backend


def train_bpe(texts: Iterable[str], vocab_size: int, quiet: bool = True) -> Tokenizer:
    """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) with exactly `vocab_size` tokens."""
    backend = _byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # four bars of its own
    )
    with progress(None, "training the tokenizer", quiet) as bar:
        read = (text for text in texts if bar.update(len(text.encode())) or True)
        backend.train_from_iterator(_short_runs(read), trainer)
    if backend.get_vocab_size() != vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size}: this text yields a vocabulary of at most"
            f" {backend.get_vocab_size()}; choose that or less, or tokenizer=char"
        )
    return Tokenizer(backend)


def _short_runs(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with words of more than MAX_WORD characters and longer runs of spaces cut.

    The time to train grows with the square of the length of a word.
    """
    for text in texts:
        long = max(map(len, text.split()), default=0) > MAX_WORD or SPACES.search(text)
        cuts = [match.end() for match in LONG_WORD.finditer(text)] if long else []
        yield from (text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)]))


def char_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A token for each distinct character of the texts, in order of code points, and end of text."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    vocab = {EOT: 0} | {char: i for i, char in enumerate(sorted(alphabet), start=1)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=""))
    backend.pre_tokenizer = CHARACTERS
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def byte_tokenizer() -> Tokenizer:
    """The 256 bytes and end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = _byte_level({EOT: 0} | {symbol: i for i, symbol in enumerate(alphabet, start=1)})
    return Tokenizer(backend)


def build_tokenizer(
    config: TokenizerConfig, train: Iterable[str], everything: Iterable[str], quiet: bool = True
) -> Tokenizer:
    """The tokenizer of a run. BPE is trained on the training text alone; characters come from the whole text."""
    if config.kind == "bpe":
        assert config.vocab_size is not None
        return train_bpe(train, config.vocab_size, quiet)
    if config.kind == "file":
        assert config.path is not None
        return load_tokenizer(Path(config.path))
    return char_tokenizer(everything) if config.kind == "char" else byte_tokenizer()
