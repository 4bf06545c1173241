"""Tokenizers in the manner of Llama 2, Llama 3, Qwen and GPT-2: the same ids as in transformers, and the text back."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers
from conftest import TEXT
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from lm.data import encoding
from lm.data.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.texts import stored

WORDS = r"'s|'t| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = ["x = 1", " x", "  def f(x):\n\treturn x", "naïve 日本語 🙂", "</s> <s> <|endoftext|>", "\n\n", "a\x00b"]


def llama_2() -> Backend:
    """SentencePiece's BPE: a space is ▁, one stands before the text, and an unknown character is bytes."""
    raw_bytes = [f"<0x{i:02X}>" for i in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *raw_bytes]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXT.splitlines(True), trainer)
    layout = json.loads(backend.to_str())
    layout["added_tokens"] = layout["added_tokens"][:3]
    backend = Backend.from_str(json.dumps(layout))
    ends = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *ends])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_level(*special: str, words: str | None = WORDS, normalizer: normalizers.Normalizer | None = None) -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    split = [pre_tokenizers.Split(Regex(words), "isolated"), level] if words else []
    backend.pre_tokenizer = pre_tokenizers.Sequence(split) if words else level
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    backend.add_special_tokens(list(special))
    return backend


def llama_3() -> Backend:
    begin = "<|begin_of_text|>"
    backend = byte_level(begin, "<|end_of_text|>", "<|eot_id|>")
    template = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


KINDS: dict[str, tuple[Callable[[], Backend], str, str]] = {  # how it is made, its end of text, what begins a text
    "Llama 2": (llama_2, "</s>", "<s>"),
    "Llama 3": (llama_3, "<|end_of_text|>", "<|begin_of_text|>"),
    "Qwen": (
        lambda: byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", normalizer=normalizers.NFC()),
        "<|endoftext|>",
        "<|endoftext|>",
    ),
    "GPT-2": (lambda: byte_level("<|endoftext|>", words=None), "<|endoftext|>", "<|endoftext|>"),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tokenizer]:
    path = tmp_path_factory.mktemp("kind") / "tokenizer.json"
    KINDS[request.param][0]().save(str(path))
    return request.param, path, load_tokenizer(path)


Kind = tuple[str, Path, Tokenizer]


def test_its_own_tokens_end_and_begin_a_text_and_none_is_added(kind: Kind) -> None:
    name, path, tokenizer = kind
    assert (tokenizer.eot_token, tokenizer.begin_token, tokenizer.eot_added) == (*KINDS[name][1:], False)
    assert tokenizer.vocab_size == Backend.from_file(str(path)).get_vocab_size()


@pytest.mark.parametrize("text", LINES)
def test_the_text_comes_back_whole_and_in_parts(kind: Kind, text: str) -> None:
    tokenizer = kind[2]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "".join(tokenizer.stream(ids)) == text
    assert tokenizer.eot not in ids


@pytest.mark.parametrize("text", LINES[:4])
def test_the_ids_are_those_of_transformers(kind: Kind, text: str) -> None:
    _, path, tokenizer = kind
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)


def test_a_text_on_disk_is_encoded_as_at_once(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = kind[2]
    monkeypatch.setattr(encoding, "CHUNK", 1)
    text = "".join(LINES[:4]) * 3
    groups = list(encoding.encode(tokenizer, stored(tmp_path, [("name", text)]).whole()))
    assert np.concatenate(groups).tolist() == [*tokenizer.separator, *tokenizer.encode(text)]
