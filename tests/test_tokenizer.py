"""Every tokenizer round-trips its text, no text is encoded as end of text, and a stranger's file does no harm."""

import json
import random
from functools import partial
from itertools import takewhile

import numpy as np
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from lm.config import DataConfig, TokenizerConfig
from lm.data.tokenizer import (
    EOT,
    Tokenizer,
    build_tokenizer,
    byte_tokenizer,
    char_tokenizer,
    encode,
    load_tokenizer,
    sample,
    train_bpe,
)
from lm.data.tokens import prepare
from lm.decoding import Sampling, generate
from tests.helpers.decoding import sensitive, tokens
from tests.helpers.refusals import refused
from tests.helpers.texts import stored, write_rows

TEXT = "".join(f"def f{i}(x, y):\n    return x * {i * 7 % 31} + y  # naïve {i:x}\n" for i in range(200))
BPE, BYTE, CHAR = train_bpe([TEXT], 400), byte_tokenizer(), char_tokenizer([TEXT])
SPELLED = f"{EOT} begin{EOT}{EOT}\nend {EOT[:-1]}{EOT[1:]}"


def test_bpe_has_the_size_asked_for_and_learns_from_the_training_text_and_char_from_all_text():
    bpe = build_tokenizer(TokenizerConfig(vocab_size=400), [TEXT], ["not read"])
    assert bpe.to_json() == BPE.to_json()
    assert sorted(bpe.backend.get_vocab().values()) == list(range(400))
    assert train_bpe(["abc abc"], 5000).vocab_size == 257 + 3, "ab, abc and abc after a space: there are no more"
    char = build_tokenizer(TokenizerConfig(kind="char", vocab_size=None), ["ab"], ["ab", "c"])
    assert char.vocab_size == 4


SPELLING = train_bpe([TEXT, SPELLED * 50], 300)  # end of text is spelled in its training text


@settings(max_examples=50)
@given(text=st.lists(st.text() | st.sampled_from([EOT, EOT[:-1], EOT[1:]])).map("".join))
@example(SPELLED)
def test_every_text_comes_back_from_its_tokens_also_one_that_spells_end_of_text(text):
    char = char_tokenizer([text])
    for tokenizer in (BPE, SPELLING, BYTE, char):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == "".join(tokenizer.stream(ids)) == text
        assert tokenizer.eot not in ids
    assert (char.vocab_size, len(char.encode(text))) == (len(set(text)) + 1, len(text))
    assert len(BYTE.encode(text)) == len(text.encode())


def test_a_very_long_word_is_learned_in_seconds():
    """Uncut, the time grows with the square of its length: this would take minutes."""
    draw = random.Random(0)
    assert train_bpe(["".join(draw.choices("abcdefgh", k=300_000))], 300).vocab_size == 300


def test_bpe_is_trained_on_whole_characters_of_evenly_spaced_stretches(tmp_path, monkeypatch):
    monkeypatch.setattr("lm.data.tokenizer.SAMPLE", 56)
    monkeypatch.setattr("lm.data.tokenizer.SAMPLE_STRETCH", 7)
    part = stored(tmp_path, [(str(i), f"é{i}" * 10) for i in range(8)]).whole()
    assert "".join(sample(part)) == "".join(f"é{i}é{i}" for i in range(8)), "and a stretch ends inside of an é"


# --- a tokenizer.json


def loaded(folder, content):
    (folder / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return load_tokenizer(folder / "tokenizer.json")


def added(content, rstrip=False):
    """A tokenizer.json of bytes with one more token, which is not special."""
    layout = json.loads(BYTE.to_json())
    token = dict.fromkeys(("single_word", "lstrip", "normalized", "special"), False)
    layout["added_tokens"].append(token | {"id": 257, "content": content, "rstrip": rstrip})
    return layout


def changing(normalizer):
    """A tokenizer.json of bytes that changes a text before it encodes it."""
    return json.loads(BYTE.to_json()) | {"normalizer": {"type": normalizer}}


def merged(piece, **options):
    """A tokenizer.json of bytes and one longer piece."""
    layout = json.loads(BYTE.to_json())
    layout["model"]["vocab"][piece] = 257
    layout["model"] |= options
    return layout


LINES, WORD = "ab a b  ab x\n x\nb ab  b" * 1000, "h" * 20_000


@pytest.mark.parametrize(
    ("layout", "text", "is_lossless"),
    [
        (added("a b"), LINES, True),
        (added("x\n"), LINES, True),
        (merged(WORD), WORD, True),
        (merged(WORD, ignore_merges=True), WORD, True),
        (added("ab", rstrip=True), LINES, False),
        (merged("h</w>", end_of_word_suffix="</w>"), WORD, False),
        (changing("Lowercase"), "A", False),
        (changing("NFC"), "e\u0301", False),
    ],
)
def test_a_long_text_is_encoded_as_at_once_or_refused(layout, text, is_lossless, tmp_path):
    tokenizer, part = loaded(tmp_path, layout), stored(tmp_path, [("name", text)]).whole()
    if is_lossless:
        assert np.concatenate([*encode(tokenizer, part)]).tolist() == [tokenizer.eot, *tokenizer.encode(text)]
        return
    with refused(r"^tokenizer: loses part of the text"):
        list(encode(tokenizer, part))


@pytest.mark.parametrize(
    ("name", "special", "is_added"),
    [(EOT, "true", False), ("[EOS]", "true", False), ("[SEP]", "true", True), ("</s>", "false", True)],
)
def test_a_file_keeps_its_own_end_of_text_token_or_gets_one_more(name, special, is_added, tmp_path):
    """A token that is not special does not count: an ordinary text may contain it."""
    content = BYTE.to_json().replace(EOT, name).replace('"special":true', f'"special":{special}')
    tokenizer = loaded(tmp_path, content)
    expected = (258, 257, EOT) if is_added else (257, BYTE.eot, name)
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.eot_token) == expected
    assert tokenizer.eot_added == is_added
    text = SPELLED.replace(EOT, tokenizer.eot_token)
    assert tokenizer.eot not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert loaded(tmp_path, tokenizer.to_json()).hash == tokenizer.hash


def test_an_unknown_character_is_named_and_left_out_of_a_prompt(caplog):
    with refused("'~'"):
        CHAR.encode("def ~")
    with caplog.at_level("WARNING"):
        assert [CHAR.without_unknown("~def ~~ 漢") for _ in range(2)] == ["def  "] * 2
        assert BYTE.without_unknown("~") == "~"
    assert (caplog.text.count("'~' '漢'"), caplog.text.count("'~'")) == (1, 1)


WHOLE = json.loads(BPE.to_json())
PANIC = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
MERGES = {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}  # of unknown tokens


@pytest.mark.parametrize("content", ["{}", '{"version": "1', MERGES, WHOLE | PANIC])
def test_a_damaged_or_unusable_file_is_named(content, tmp_path):
    with refused(f"^{tmp_path}/tokenizer.json: .*$"):
        loaded(tmp_path, content)


def test_what_a_given_file_does_to_a_text_beside_its_tokens_is_switched_off(tmp_path, caplog):
    """It cuts texts, takes end of text for an ordinary token, and drops merges at random."""
    layout = WHOLE | {"model": WHOLE["model"] | {"dropout": 1.0}}
    layout["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    layout["added_tokens"] = [WHOLE["added_tokens"][0] | {"special": False}]
    tokenizer = loaded(tmp_path, layout)
    assert tokenizer.encode(SPELLED + TEXT) == BPE.encode(SPELLED + TEXT)
    assert len(caplog.messages) == 1


# --- tokenizers in the manner of Llama 2 and Llama 3

WORDS = r"'s|'t| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TYPED = ["x = 1", " x", "  def f(x):\n\treturn x", "naïve 日本語 🙂", "</s> <s> <|endoftext|>", "\n\n", "a\x00b"]


def llama_2():
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


def llama_3():
    """Byte-level BPE whose words are split by a pattern of its own."""
    begin, backend = "<|begin_of_text|>", Backend(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    backend.add_special_tokens([begin, "<|end_of_text|>", "<|eot_id|>"])
    template = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def metaspace(scheme):
    """The same, where a pre-tokenizer puts ▁ before the text, if it does."""
    layout = json.loads(llama_2().to_str())
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    ends = [{"type": "ByteFallback"}, step, {"type": "Fuse"}]
    changes = {"normalizer": None, "pre_tokenizer": step, "decoder": {"type": "Sequence", "decoders": ends}}
    return Backend.from_str(json.dumps(layout | changes))


MAKERS = {
    "gpt_2": lambda: BPE.backend,
    "llama_2": llama_2,
    "llama_3": llama_3,
    **{scheme: partial(metaspace, scheme) for scheme in ("always", "never")},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_text_goes_on_after_the_ids_before_it(make):
    """SentencePiece leaves out the space of the first token of a text, which a continuation must keep."""
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode("x = naïve f(x) 日本語 🙂 return x")
    whole = tokenizer.decode(ids)
    for n in range(len(ids) + 1):
        before = tokenizer.decode(ids[:n])
        if not before.endswith("\ufffd"):
            assert before + "".join(tokenizer.stream(ids[n:], after=ids[:n])) == whole
    net, prompts = sensitive(tokenizer.vocab_size), [f"x = {n}" for n in range(99)]
    before = [[tokenizer.begin, *tokenizer.encode(prompt)] for prompt in prompts]
    rows = tokens(net, before, 4, Sampling(temperature=100.0))
    assert {tokenizer.label(row[0])[:1] for row in rows} >= {" "}
    ids = (takewhile(lambda token: token not in tokenizer.stops, row) for row in rows)
    expected = [tokenizer.decode([*start, *own]) for start, own in zip(before, ids, strict=True)]
    continuations = generate(net, tokenizer, prompts, 4, temperature=100.0)
    assert [prompt + text for prompt, text in zip(prompts, continuations, strict=True)] == expected


LEFT_OUT = ["eot", "eot", "begin", None, "eot"]  # begin and end are one token but for the manner of Llama


@pytest.mark.parametrize(("make", "left_out"), [*zip(MAKERS.values(), LEFT_OUT, strict=True)], ids=MAKERS)
def test_tokens_that_were_made_elsewhere_have_the_bytes_of_their_documents(make, left_out, tmp_path, monkeypatch):
    """As `data=json` of the same documents has, also where a document is decoded in many pieces."""
    tokenizer = loaded(tmp_path, make().to_str())
    rows = ["x = 1", "naïve 日本語 🙂 f(x)" * 50, "a", "two  words\n"] * 10
    own = TokenizerConfig(kind="file", vocab_size=None, path=f"{tmp_path}/tokenizer.json")
    settings = {"seq_len": 8, "cache_dir": f"{tmp_path}/cache"}
    train, val = write_rows(tmp_path / "train.jsonl", ["x = 1\n" * 20]), write_rows(tmp_path / "val.jsonl", rows)
    paths = {"path": str(train), "val_path": str(val)}
    expected = prepare(DataConfig(source="json", **paths, **settings), own)
    for name in ("train", "val"):
        ids = np.asarray(getattr(expected, name))
        if left_out is not None and tokenizer.begin != tokenizer.eot:
            ids = ids[ids != getattr(tokenizer, left_out)]
        ids.tofile(tmp_path / f"{name}.bin")
    monkeypatch.setattr("lm.lab.sources.made_elsewhere.IDS", 7)
    paths = {"path": f"{tmp_path}/train.bin", "val_path": f"{tmp_path}/val.bin"}
    data = prepare(DataConfig(source="tokens", **paths, **settings), own)
    assert (data.val_bytes, data.baselines) == (len("".join(rows).encode()), expected.baselines)


@pytest.mark.parametrize(
    ("make", "eot", "begin"), [(llama_2, "</s>", "<s>"), (llama_3, "<|end_of_text|>", "<|begin_of_text|>")]
)
def test_a_tokenizer_of_a_known_kind_gives_the_ids_of_transformers_and_the_text_back(
    make, eot, begin, tmp_path, monkeypatch
):
    tokenizer, path = loaded(tmp_path, make().to_str()), tmp_path / "tokenizer.json"
    assert (tokenizer.eot_token, tokenizer.begin_token, tokenizer.eot_added) == (eot, begin, False)
    assert tokenizer.vocab_size == Backend.from_file(str(path)).get_vocab_size()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in TYPED:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == "".join(tokenizer.stream(ids)) == text
        assert tokenizer.eot not in ids
        assert text not in TYPED[:4] or theirs(text, add_special_tokens=False).input_ids == ids
    monkeypatch.setattr("lm.data.text.CHUNK", 1)
    text = "".join(TYPED[:4]) * 3
    groups = list(encode(tokenizer, stored(tmp_path, [("name", text)]).whole()))
    assert np.concatenate(groups).tolist() == [*tokenizer.separator, *tokenizer.encode(text)]
