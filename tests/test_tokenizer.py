"""Every tokenizer round-trips its text, and no text is encoded as end of text."""

import hashlib
import json
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import stored
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import BadInput, DataConfig, TokenizerConfig
from lm.data import encoding
from lm.data.split import Part
from lm.data.tokenizer import EOT, Tokenizer
from lm.data.tokenizer_file import load_tokenizer
from lm.data.tokens import prepare
from lm.data.vocabulary import RUN, build_tokenizer, byte_tokenizer, char_tokenizer, short_runs, train_bpe

TEXT = "".join(f"def f{i}(x, y):\n    return x * {i * 7 % 31} + y  # naïve {i:x}\n" for i in range(200))
BPE, BYTE, CHAR = train_bpe([TEXT], 400), byte_tokenizer(), char_tokenizer([TEXT])
SPELLED = f"{EOT} begin{EOT}{EOT}\nend {EOT[:-1]}{EOT[1:]}"


@pytest.mark.parametrize("size", [257, 258, 300, 517])
def test_bpe_has_exactly_the_size_asked_for(size: int) -> None:
    tokenizer = train_bpe([TEXT], size)
    assert tokenizer.vocab_size == size == len(tokenizer.backend.get_vocab())
    assert sorted(tokenizer.backend.get_vocab().values()) == list(range(size))
    assert 0 <= tokenizer.eot < size


def test_byte_has_257_tokens_and_char_one_for_each_character() -> None:
    assert BYTE.vocab_size == 257
    assert CHAR.vocab_size == len(set(TEXT)) + 1


@pytest.mark.parametrize("tokenizer", [BPE, BYTE], ids=["bpe", "byte"])
@settings(deadline=None)
@given(text=st.text())
def test_byte_level_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids


@settings(deadline=None)
@given(text=st.text())
def test_byte_uses_one_token_for_each_byte(text: str) -> None:
    assert len(BYTE.encode(text)) == len(text.encode())


@settings(deadline=None)
@given(text=st.text(st.sampled_from(sorted(set(TEXT)))))
def test_char_round_trips_any_text_over_its_alphabet_with_a_token_for_each_character(text: str) -> None:
    ids = CHAR.encode(text)
    assert CHAR.decode(ids) == text
    assert len(ids) == len(text)


@settings(deadline=None)
@given(text=st.text())
def test_char_round_trips_the_text_that_it_was_built_from(text: str) -> None:
    tokenizer = char_tokenizer([text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(set(text)) + 1


@pytest.mark.parametrize("tokenizer", [BPE, BYTE, char_tokenizer([SPELLED])], ids=["bpe", "byte", "char"])
def test_text_that_spells_end_of_text_is_plain_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(SPELLED)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == SPELLED


def test_end_of_text_spelled_in_the_training_text_of_bpe_is_plain_text_too() -> None:
    tokenizer = train_bpe([TEXT, SPELLED * 50], 300)
    assert tokenizer.eot not in tokenizer.encode(SPELLED)
    assert tokenizer.decode(tokenizer.encode(SPELLED)) == SPELLED


@settings(deadline=None)
@given(text=st.text())
def test_stream_joined_equals_decode(text: str) -> None:
    assert "".join(BPE.stream(BPE.encode(text))) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, BYTE.vocab_size - 1)))
def test_stream_of_any_ids_joined_equals_decode(ids: list[int]) -> None:
    assert "".join(BYTE.stream(ids)) == BYTE.decode(ids)


def test_bpe_training_is_deterministic() -> None:
    again = train_bpe([TEXT], 400)
    assert again.to_json() == BPE.to_json()
    assert again.hash == BPE.hash == hashlib.sha256(BPE.to_json().encode()).hexdigest()


def test_long_runs_are_cut_for_training_and_nothing_else_is() -> None:
    text = f"{'a' * (RUN - 1)} {'b' * RUN}\nc d\n\n  e{' ' * RUN}f"
    assert list(short_runs([text, "", "short"])) == [text, "", "short"]
    found = list(short_runs([f"one {'a' * (2 * RUN + 1)} two{' ' * (RUN + 2)}", text]))
    assert found == [f"one {'a' * RUN}", "a" * RUN, f"a two{' ' * RUN}", "  ", text]


def test_one_word_of_a_megabyte_is_learned_in_seconds() -> None:
    """Uncut, the time grows with the square of its length: this would take ten minutes."""
    draw = random.Random(0)
    assert train_bpe(["".join(draw.choices("abcdefgh", k=1_000_000))], 300).vocab_size == 300


def test_ctrl_c_is_heard_while_bpe_is_trained() -> None:
    """The library does not look at signals. This text would take it about a minute."""
    code = "import random; from lm.data import vocabulary\n"
    code += "vocabulary.RUN = 10**6; vocabulary.LONG_RUN = vocabulary.re.compile('$^')\n"
    code += "text = ''.join(random.Random(0).choices('abcdefgh', k=300_000))\n"
    code += "print('begun', flush=True)\nvocabulary.train_bpe([text], 2000)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "begun\n"
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        try:
            _, error = run.communicate(timeout=150)
        finally:
            run.kill()
        assert error.strip().endswith("KeyboardInterrupt")


def test_an_error_while_bpe_reads_its_text_is_raised() -> None:
    def texts() -> Iterator[str]:
        yield TEXT
        raise BadInput("not UTF-8")

    with pytest.raises(BadInput, match="not UTF-8"):
        train_bpe(texts(), 300)


@pytest.mark.parametrize("size", [0.3, 1, 2.5, 10])
def test_bpe_is_trained_on_evenly_spaced_stretches_of_a_long_text(
    size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "SAMPLE", 4000)
    monkeypatch.setattr(encoding, "STRETCH", 500)
    monkeypatch.setattr("lm.data.split.BLOCK", 1000)
    text = "".join(f"{i:07} é\n" for i in range(int(size * 400)))  # of 11 bytes each
    part = Part(stored(tmp_path, [(str(i), text[i : i + 300]) for i in range(0, len(text), 300)]))
    found = "".join(encoding.sample(part))
    assert found == "".join(encoding.sample(part))
    if part.n_bytes <= 4000:
        assert found == text
        return
    assert 0.98 * 4000 < len(found.encode()) <= 4000
    numbers = [int(one) for one in re.findall(r"(?<!\d)\d{7}(?!\d)", found)]
    assert numbers == sorted(set(numbers))
    spread = [sum(k * size * 50 <= one < (k + 1) * size * 50 for one in numbers) for k in range(8)]
    assert min(spread) > 0.9 * max(spread)


ADDED = {"id": 256, "single_word": False, "lstrip": False, "normalized": False, "special": False}


@pytest.mark.parametrize(("content", "rstrip"), [("a b", False), ("x\n", False), ("ab", True), ("ab", False)])
def test_a_text_is_encoded_as_at_once_whatever_tokens_a_file_adds(
    content: str, rstrip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = json.loads(BYTE.to_json())
    layout["added_tokens"].append(ADDED | {"id": 257, "content": content, "rstrip": rstrip})
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.splittable == ((content, rstrip) == ("ab", False))
    monkeypatch.setattr(encoding, "PIECE", 1)
    text = "ab a b  ab x\n x\nb ab  b" * 5
    found = list(encoding.encode(tokenizer, Part(stored(tmp_path, [("one", text)]))))
    assert np.concatenate(found).tolist() == [tokenizer.eot, *tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("setting", "piece"),
    [({"ignore_merges": True}, "hello"), ({"end_of_word_suffix": "</w>"}, "o</w>"), ({}, "hello")],
    ids=["whole words", "suffix", "neither"],
)
def test_a_word_is_not_cut_where_its_ids_would_change(
    setting: dict[str, Any], piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = json.loads(BYTE.to_json())
    layout["model"]["vocab"][piece] = 256
    layout["model"] |= setting
    layout["added_tokens"][0]["id"] = 257
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr(encoding, "PIECE", 2)
    found = list(encoding.encode(tokenizer, Part(stored(tmp_path, [("one", "hello")]))))
    assert np.concatenate(found).tolist() == [tokenizer.eot, *tokenizer.encode("hello")]
    assert tokenizer.divisible == (not setting)


@pytest.mark.parametrize("tokenizer", [BPE, BYTE, CHAR], ids=["bpe", "byte", "char"])
def test_a_saved_and_loaded_tokenizer_is_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = build_tokenizer(TokenizerConfig(kind="file", vocab_size=None, path=str(path)), [], [], progress=False)
    assert (loaded.vocab_size, loaded.eot, loaded.hash) == (tokenizer.vocab_size, tokenizer.eot, tokenizer.hash)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.decode([loaded.eot]) == ""


def saved(tokenizer: Tokenizer, path: Path, eot: str | None, special: bool = True) -> Path:
    """A tokenizer.json whose end-of-text token has another name, or none."""
    content = json.loads(tokenizer.to_json())
    if eot is None:
        content["added_tokens"] = []
        content["model"]["vocab"] = {token: i - 1 for token, i in content["model"]["vocab"].items() if token != EOT}
    else:
        content["added_tokens"][0] |= {"content": eot, "special": special}
        content["model"]["vocab"] = {eot if name == EOT else name: i for name, i in content["model"]["vocab"].items()}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>"])
def test_a_file_keeps_its_own_end_of_text_token(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(BPE, tmp_path / "tokenizer.json", name))
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.eot_token) == (400, BPE.eot, name)
    assert not tokenizer.eot_added
    text = SPELLED.replace(EOT, name)
    assert tokenizer.eot not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (tmp_path / "again.json").write_text(tokenizer.to_json())
    assert load_tokenizer(tmp_path / "again.json").hash == tokenizer.hash


@pytest.mark.parametrize(("name", "special"), [(None, True), ("[SEP]", True), ("</s>", False)])
def test_a_file_without_an_end_of_text_token_gets_one_more(name: str | None, special: bool, tmp_path: Path) -> None:
    """A token that is not special does not count: an ordinary text may contain it."""
    before = 256 if name is None else 257
    tokenizer = load_tokenizer(saved(BYTE, tmp_path / "tokenizer.json", name, special))
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.eot_token) == (before + 1, before, EOT)
    assert tokenizer.eot_added
    assert tokenizer.eot not in tokenizer.encode(SPELLED)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("</s>", "</s> is its end-of-text token; 257 tokens"),
        (None, "<|endoftext|> is added, because it has no usual end-of-text token; 257 tokens"),
    ],
)
def test_a_log_line_tells_the_end_of_text_token_of_a_file(
    name: str | None,
    message: str,
    corpus: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = saved(BYTE, tmp_path / "tokenizer.json", name)
    data = DataConfig(source="text", path=str(corpus), cache_dir=str(tmp_path / "cache"), seq_len=8)
    with caplog.at_level("INFO"):
        ready = prepare(data, TokenizerConfig(kind="file", vocab_size=None, path=str(path)))
    assert ready.tokenizer.vocab_size == 257
    assert f"tokenizer.path={path}" in caplog.text
    assert message in caplog.text


def test_bpe_learns_from_the_training_text_and_char_from_all_text() -> None:
    bpe = build_tokenizer(TokenizerConfig(vocab_size=300), [TEXT], ["not read"], progress=False)
    assert bpe.to_json() == train_bpe([TEXT], 300).to_json()
    char = build_tokenizer(TokenizerConfig(kind="char", vocab_size=None), ["ab"], ["ab", "c"], progress=False)
    assert char.vocab_size == 4


def test_the_characters_of_a_large_text_take_no_memory() -> None:
    tracemalloc.start()
    char_tokenizer(TEXT[:100] + str(i) for i in range(2000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6  # a set for each text took 12 MB


def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_what_it_yields() -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.vocab_size=5000: this text yields a vocabulary of at most \d+"):
        train_bpe(["abc abc"], 5000)


@pytest.mark.parametrize("text", ["~", "def ~", "a\nb\u20ac"])
def test_an_unknown_character_is_named(text: str) -> None:
    with pytest.raises(BadInput, match=f"does not know the character '{text[-1]}'"):
        CHAR.encode(text)


WHOLE = BPE.to_json().encode()
DAMAGED = {
    "empty": b"",
    "space": b" \n",
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "string": b'"BPE"',
    "object": b"{}",
    "other_json": b'{"model_type": "gpt2"}',
    "merges_of_unknown_tokens": b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
    "ids_as_strings": b'{"model": {"type": "WordLevel", "vocab": {"a": "1"}, "unk_token": "a"}}',
    "binary": bytes(range(256)),
    "nul": bytes(1000),
    "deep": b"[" * 100_000,
} | {f"cut_at_{cut}": WHOLE[:cut] for cut in (1, 2, 50, len(WHOLE) // 3, len(WHOLE) // 2, len(WHOLE) - 1)}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: not a tokenizer.json (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["absent.json", "folder", "absent/tokenizer.json"])
def test_an_absent_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput) as caught:
        load_tokenizer(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert str(caught.value).endswith("expected a tokenizer.json")


@pytest.mark.parametrize("odd", ["truncation", "not_special"])
def test_truncation_and_ordinary_end_of_text_in_a_given_file_are_corrected(odd: str, tmp_path: Path) -> None:
    content = json.loads(BPE.to_json())
    if odd == "truncation":
        content["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    else:
        content["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(SPELLED)) == SPELLED
    assert tokenizer.eot not in tokenizer.encode(SPELLED)
