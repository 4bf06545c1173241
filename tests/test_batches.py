"""Batches have their properties for every length."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lm.data.batches import IGNORED, TrainingStream, validation_batches, validation_windows


def streams(tokens: int, seq_len: int, **options: Any) -> TrainingStream:
    return TrainingStream(np.arange(tokens), **{"seq_len": seq_len, "batch_size": 1, "seed": 0} | options)


def epoch_of(stream: TrainingStream, epoch: int) -> np.ndarray:
    """The targets of an epoch, a row for each window; each token of `streams` is its own position."""
    first = epoch * stream.per_epoch
    return torch.cat([stream.batch(k)[1] for k in range(first, first + stream.per_epoch)]).numpy()


# --- batches for training

LENGTHS = {"tokens": st.integers(2, 120), "seq_len": st.integers(1, 120), "seed": st.integers(0, 5)}


@given(**LENGTHS, k=st.integers(0, 1000), batch_size=st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_a_batch_is_a_function_of_seed_and_index(tokens: int, seq_len: int, seed: int, k: int, batch_size: int) -> None:
    assume(tokens > seq_len)
    options = {"seed": seed, "batch_size": batch_size}
    inputs, targets = streams(tokens, seq_len, **options).batch(k)
    used = streams(tokens, seq_len, **options)
    for other in (k + 7, 3, 0):
        used.batch(other)
    again = used.batch(k)
    assert torch.equal(inputs, again[0])
    assert torch.equal(targets, again[1])
    assert inputs.shape == targets.shape == (batch_size, seq_len)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)  # each token is its own position
    assert int(inputs.min()) >= 0
    assert int(targets.max()) < tokens


@given(**LENGTHS)
@settings(deadline=None, max_examples=40)
def test_an_epoch_has_each_token_as_target_at_most_once(tokens: int, seq_len: int, seed: int) -> None:
    assume(tokens > seq_len)
    stream = streams(tokens, seq_len, seed=seed)
    for epoch in (0, 1, 5):
        targets = epoch_of(stream, epoch)
        assert len(np.unique(targets)) == targets.size  # never twice
        at_the_ends = 2 * (seq_len - 1)  # parts of windows, which are left out
        assert targets.size >= max(seq_len, tokens - 1 - at_the_ends)


def test_epochs_together_cover_every_token_in_different_orders() -> None:
    stream = streams(200, 8)
    epochs = [epoch_of(stream, epoch) for epoch in range(40)]
    assert set(np.concatenate(epochs).ravel()) == set(range(1, 200))
    assert len({tuple(targets[:, 0]) for targets in epochs}) == 40
    assert not np.array_equal(epoch_of(streams(200, 8, seed=1), 0), epochs[0])


@given(**LENGTHS, k=st.integers(0, 50), world=st.integers(1, 4), batch_size=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_ranks_share_a_batch(tokens: int, seq_len: int, seed: int, k: int, world: int, batch_size: int) -> None:
    assume(tokens > seq_len)
    parts = [
        streams(tokens, seq_len, seed=seed, batch_size=batch_size, rank=rank, world_size=world).batch(k)[0]
        for rank in range(world)
    ]
    assert torch.equal(torch.cat(parts), streams(tokens, seq_len, seed=seed, batch_size=batch_size * world).batch(k)[0])


# --- documents in a new order in each epoch


def order_of(stream: TrainingStream, epoch: int) -> np.ndarray:
    """The places of an epoch in the text, one window after the other."""
    first = epoch * stream.per_epoch
    windows = stream.windows(range(first, first + stream.per_epoch))  # (N, T+1)
    return windows[np.argsort(stream.order)]


@given(**LENGTHS, k=st.integers(0, 300), starts=st.sets(st.integers(1, 100), max_size=20), batch_size=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_documents_change_places(
    tokens: int, seq_len: int, seed: int, k: int, starts: set[int], batch_size: int
) -> None:
    assume(tokens > seq_len)
    documents = np.array([0, *sorted(start for start in starts if start < tokens)])
    options = {"seed": seed, "documents": documents}
    used = streams(tokens, seq_len, batch_size=batch_size, **options)
    used.batch(k + 7)
    again = streams(tokens, seq_len, batch_size=batch_size, **options).batch(k)
    assert all(torch.equal(*pair) for pair in zip(used.batch(k), again, strict=True)), "a function of (seed, k)"
    for epoch in (0, 3):
        windows = order_of(streams(tokens, seq_len, **options), epoch)
        assert len(np.unique(windows[:, 1:])) == windows[:, 1:].size, "no token is a target twice"
        ends = {*documents[1:] - 1, tokens - 1}
        for place, following in zip(windows[:, :-1].ravel(), windows[:, 1:].ravel(), strict=True):
            assert following == place + 1 or (place in ends and following in documents)


@pytest.mark.parametrize("n", [1, 3])
def test_overfitting_repeats_the_first_batches(n: int) -> None:
    plain, again = streams(200, 8, batch_size=4), streams(200, 8, batch_size=4, overfit_batches=n)
    for k in range(3 * n):
        inputs, targets = again.batch(k)
        assert torch.equal(inputs, plain.batch(k % n)[0])
        assert torch.equal(targets, plain.batch(k % n)[1])


@given(tokens=st.integers(2, 200), seq_len=st.integers(1, 200), batch_size=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_validation_has_each_token_but_the_first_as_target_once(tokens: int, seq_len: int, batch_size: int) -> None:
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
@settings(deadline=None, max_examples=40)
def test_an_estimate_takes_the_middles_of_equal_stretches(windows: int, seq_len: int, batch_size: int, n: int) -> None:
    tokens = np.arange(windows * seq_len + 1, dtype=np.uint16)
    chosen = validation_windows(len(tokens), seq_len, n)
    k = min(windows, n)
    assert len(chosen) == k
    assert all(i * windows / k <= window + 0.5 <= (i + 1) * windows / k for i, window in enumerate(chosen))
    batches = list(validation_batches(tokens, seq_len, batch_size, n))
    assert len(batches) == -(-k // batch_size)
    assert torch.cat([inputs for inputs, _ in batches])[:, 0].tolist() == (chosen * seq_len).tolist()
