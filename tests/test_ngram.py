"""The n-gram model of bytes, against one that is written out in plain Python, and what a run says of it."""

from collections import Counter
from dataclasses import replace
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import DataConfig, TokenizerConfig
from lm.data import tokens
from lm.data.batches import TrainingStream
from lm.data.ngram import ORDER, bits_per_byte, probabilities
from lm.data.tokens import prepare
from lm.lab.targets import ExpectedTokens
from tests.helpers.texts import BYTE, documents
from tests.helpers.tiny import TEXT


class Plain:
    """Chen and Goodman's interpolated, modified Kneser-Ney model of bytes, by dictionaries."""

    def __init__(self, text):
        padded = bytes(ORDER - 1) + text
        occurrences = [padded[i : i + ORDER] for i in range(len(text))]
        self.counts = {ORDER: Counter(occurrences)}
        for order in range(ORDER - 1, 0, -1):
            self.counts[order] = Counter(longer[1:] for longer in self.counts[order + 1])
        self.discounts = {order: self.estimated(counts) for order, counts in self.counts.items()}

    def estimated(self, counts):
        n = [sum(count == i for count in counts.values()) for i in range(5)]
        discounts = [0.0, 0.5, 1.0, 1.5]
        if n[1]:
            for i in (1, 2, 3):
                if n[i] and (value := i - (i + 1) * n[1] / (n[1] + 2 * n[2]) * ([*n, n[4]][i + 1]) / n[i]) > 0:
                    discounts[i] = value
        return discounts

    def p(self, context, byte, order=ORDER):
        if order == 0:
            return 1 / 256
        counts, discounts = self.counts[order], self.discounts[order]
        context = context[len(context) - order + 1 :]
        after = [count for gram, count in counts.items() if gram[:-1] == context]
        lower = self.p(context[1:], byte, order - 1)
        if not after:
            return lower
        count = counts[context + bytes([byte])]
        kept_back = sum(discounts[min(c, 3)] for c in after)
        return (count - discounts[min(count, 3)] + kept_back * lower) / sum(after)


TEXTS = st.one_of(
    st.text("a", max_size=60), st.text("ab", max_size=40), st.text("abc\x00 é", max_size=60), st.text(max_size=12)
).map(str.encode)


@settings(max_examples=8)
@given(TEXTS, TEXTS, st.binary(min_size=ORDER - 1, max_size=ORDER - 1))
def test_it_is_the_model_of_the_paper_and_its_probabilities_sum_to_one(train, val, other):
    plain, text = Plain(train), bytes(ORDER - 1) + train + val
    bits = [-log2(plain.p(text[:i], text[i])) for i in range(ORDER - 1 + len(train), len(text))]
    assert bits_per_byte(train, val) == pytest.approx(sum(bits) / max(len(val), 1), abs=1e-12)
    padded = bytes(ORDER - 1) + train
    keys = [int.from_bytes(padded[i : i + ORDER]) for i in range(len(train))]
    for context in (other, text[1 - ORDER :], padded[: ORDER - 1]):
        every = np.array([int.from_bytes(context + bytes([byte])) for byte in range(256)], np.uint64)
        p = probabilities(np.array(keys, np.uint64), every)
        assert p.sum() == pytest.approx(1, abs=1e-12)
        assert p[97] == pytest.approx(plain.p(context, 97), abs=1e-12)


# --- what is stored, and what a run says


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 5)
    return DataConfig(source="text", path=str(tmp_path / "text.txt"), seq_len=16, cache_dir=str(tmp_path / "cache"))


def test_a_target_is_shared_with_what_the_model_of_tokens_expects():
    """Which is that of bytes, where these are the tokens."""
    text = (TEXT * 2).encode()[:600]
    codes, padded, plain = np.frombuffer(text, np.uint8), bytes(ORDER - 1) + text, Plain(text)
    expected = ExpectedTokens(codes, 256, ORDER, n_rows=300)  # of a model with more rows than tokens
    shares = expected(np.arange(len(text)))
    p = np.array([plain.p(padded[i : i + ORDER - 1], text[i]) for i in range(len(text))])
    np.testing.assert_allclose(shares[np.arange(len(text)), codes], p, rtol=1e-5)
    np.testing.assert_allclose(shares[:, :256].sum(1), 1, rtol=1e-5)
    assert not shares[:, 256:].any()

    stream = TrainingStream(codes, seq_len=16, batch_size=2, seed=0)
    tokens_, targets = stream.batch(3)
    same, shared = replace(stream, expected=expected, smoothing=0.25).batch(3)
    assert same.equal(tokens_)
    assert shared.shape == (2, 16, 300)
    at = stream.windows(range(6, 8))[:, 1:]
    assert shared.gather(2, targets[..., None])[..., 0].numpy() == pytest.approx(0.75 + 0.25 * p[at], rel=1e-5)
    assert shared.sum(2).numpy() == pytest.approx(1, rel=1e-5)


def test_it_is_scored_on_the_events_of_a_run(source, tmp_path):
    """A zero byte stands where a run predicts an end-of-text token: before each document but the first."""
    (tmp_path / "texts").mkdir()
    for i in range(60):
        (tmp_path / f"texts/{i}.txt").write_text(f"{i} {TEXT[: 40 + i]}")
    data = prepare(replace(source, path=str(tmp_path / "texts")), BYTE)
    training, validation = ([document.encode() for document in part] for part in documents(data))
    assert len(validation) > 2
    expected = bits_per_byte(b"\0".join([*training, b""]), b"\0".join(validation), data.val_bytes)
    assert data.baselines == {"ngram": expected}
    assert data.n_targets == len(b"\0".join(validation)), "as many events as the model of bytes has targets"


@pytest.mark.parametrize("names", ["ab", "bk"])  # the end of a is held out, before b; the end of k, behind b
def test_a_held_out_end_of_a_document_begins_anew_as_in_a_run(names, source, tmp_path):
    (tmp_path / "texts").mkdir()
    for name in names:
        (tmp_path / f"texts/{name}.txt").write_text(f"{name} {TEXT[:400]}")
    data = prepare(replace(source, path=str(tmp_path / "texts")), BYTE)
    training, (validation,) = ([document.encode() for document in part] for part in documents(data))
    assert data.baselines == {"ngram": bits_per_byte(b"\0".join([*training, b""]), validation, data.val_bytes)}


def test_evenly_spaced_stretches_are_used(source, tmp_path, monkeypatch):
    """And the figure is one of the text, whatever its tokens are."""
    whole, cut = prepare(source, BYTE), int(len(TEXT) * 5 * 0.9)
    assert whole.baselines == {"ngram": bits_per_byte((TEXT * 5)[:cut].encode(), (TEXT * 5)[cut:].encode())}
    assert prepare(source, TokenizerConfig(vocab_size=300)).baselines == whole.baselines
    assert whole.ngram_share == 1
    for name, size in (("STRETCH", 512), ("TRAIN_BYTES", 10_000), ("VAL_BYTES", 2_000)):
        monkeypatch.setattr(tokens, name, size)
    data = prepare(replace(source, cache_dir=f"{tmp_path}/other"), BYTE)
    assert data.ngram_share == pytest.approx(10_000 / cut, rel=0.1)
    assert whole.baselines["ngram"] != data.baselines["ngram"] == pytest.approx(whole.baselines["ngram"], rel=0.25)
