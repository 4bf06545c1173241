"""Batches have their properties for every length."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.batches import IGNORED, TrainingStream, validation_batches, validation_windows


def streams(tokens, seq_len, **options):
    """A stream whose tokens are their own positions."""
    return TrainingStream(np.arange(tokens), **{"seq_len": seq_len, "batch_size": 1, "seed": 0} | options)


def epoch_of(stream, epoch):
    """The targets of an epoch, a row for each window."""
    first = epoch * stream.windows_per_epoch
    return torch.cat([stream.batch(k)[1] for k in range(first, first + stream.windows_per_epoch)]).numpy()


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@st.composite
def texts(draw):
    """Settings of `streams`: a text longer than its window, in one order or by documents that change places."""
    tokens = draw(st.integers(2, 120))
    starts = draw(st.none() | st.sets(st.integers(1, tokens), max_size=20))
    documents = None if starts is None else np.array([0, *sorted(starts - {tokens})])
    seq_len, seed = draw(st.integers(1, tokens - 1)), draw(st.integers(0, 5))
    return {"tokens": tokens, "seq_len": seq_len, "seed": seed, "document_starts": documents}


# --- batches for training


@given(text=texts(), k=st.integers(0, 1000), batch_size=st.integers(1, 5))
@settings(max_examples=50)
def test_a_batch_is_a_function_of_seed_and_index(text, k, batch_size):
    inputs, targets = streams(**text, batch_size=batch_size).batch(k)
    used = streams(**text, batch_size=batch_size)
    for other in (k + 7, 3, 0):
        used.batch(other)
    assert equal(used.batch(k), (inputs, targets))
    assert inputs.shape == targets.shape == (batch_size, text["seq_len"])
    assert inputs.dtype == targets.dtype == torch.int64
    starts = [0] if text["document_starts"] is None else text["document_starts"]
    ends = [*(start - 1 for start in starts[1:]), text["tokens"] - 1]
    for token, target in zip(inputs.ravel().tolist(), targets.ravel().tolist(), strict=True):
        is_next = token + 1 == target < text["tokens"]
        assert is_next or (text["document_starts"] is not None and token in ends and target in starts)


@given(text=texts())
@settings(max_examples=40)
def test_an_epoch_has_each_token_as_target_at_most_once(text):
    stream = streams(**text)
    for epoch in (0, 1, 5):
        targets = epoch_of(stream, epoch)
        assert len(np.unique(targets)) == targets.size
        at_the_ends = 2 * (text["seq_len"] - 1)  # parts of windows, which are left out
        assert targets.size >= max(text["seq_len"], text["tokens"] - 1 - at_the_ends)


@pytest.mark.parametrize("documents", [None, np.arange(0, 200, 5)])
def test_epochs_together_cover_every_token_in_different_orders(documents):
    stream = streams(200, 8, document_starts=documents)
    epochs = [epoch_of(stream, epoch) for epoch in range(40)]
    assert set(np.concatenate(epochs).ravel()) >= set(range(1, 200))
    assert len({tuple(targets[:, 0]) for targets in epochs}) == 40
    inputs, targets = stream.batch(0)
    assert torch.equal(inputs + 1, targets) == (documents is None), "documents change places"
    assert not np.array_equal(epoch_of(streams(200, 8, seed=1, document_starts=documents), 0), epochs[0])


@given(text=texts(), k=st.integers(0, 50), world=st.integers(1, 4), batch_size=st.integers(1, 3))
def test_ranks_share_a_batch(text, k, world, batch_size):
    ranks = [streams(**text, batch_size=batch_size, rank=rank, world_size=world) for rank in range(world)]
    together = torch.cat([rank.batch(k)[0] for rank in ranks])
    assert torch.equal(together, streams(**text, batch_size=batch_size * world).batch(k)[0])


def test_overfitting_repeats_the_first_batches():
    plain, again = streams(200, 8, batch_size=4), streams(200, 8, batch_size=4, overfit_batches=3)
    for k in range(7):
        assert equal(again.batch(k), plain.batch(k % 3))


# --- batches for validation


@given(tokens=st.integers(2, 200), seq_len=st.integers(1, 200), batch_size=st.integers(1, 9))
def test_validation_has_each_token_but_the_first_as_target_once(tokens, seq_len, batch_size):
    batches = list(validation_batches(np.arange(tokens, dtype=np.uint16), seq_len, batch_size))
    inputs, targets = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    real = targets != IGNORED
    assert targets[real].tolist() == list(range(1, tokens))
    assert torch.equal(inputs[real] + 1, targets[real])
    assert int(inputs.min()) >= 0
    assert all(1 <= len(batch[0]) <= batch_size for batch in batches)
    assert inputs.shape[1] == seq_len
    assert len(inputs) == -(-(tokens - 1) // seq_len)


@given(windows=st.integers(1, 400), seq_len=st.integers(1, 9), batch_size=st.integers(1, 9), n=st.integers(1, 500))
def test_an_estimate_takes_the_middles_of_equal_stretches(windows, seq_len, batch_size, n):
    tokens = np.arange(windows * seq_len + 1, dtype=np.uint16)
    chosen = validation_windows(len(tokens), seq_len, n)
    k = min(windows, n)
    assert len(chosen) == k
    assert all(i * windows / k <= window + 0.5 <= (i + 1) * windows / k for i, window in enumerate(chosen))
    batches = validation_batches(tokens, seq_len, batch_size, n)
    assert torch.cat([inputs for inputs, _ in batches])[:, 0].tolist() == (chosen * seq_len).tolist()
