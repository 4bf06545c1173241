"""Decoding: the same tokens with and without a cache, alone and in a batch, and no softmax anywhere."""

import copy
import math
from itertools import islice, takewhile

import pytest
import torch
import torch.nn.functional as F
from conftest import SEQ, TIED, VOCAB, some, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from lm.config import POSITIONS, UserError
from lm.data.vocabulary import byte_tokenizer, char_tokenizer
from lm.inference.decode import cache_length, decode, window_start
from lm.inference.generate import generate, likeliest, stream
from lm.inference.sampling import Sampling
from lm.model.cache import KVCache, attention_inputs
from lm.model.transformer import Transformer
from tests.helpers.decoding import by_definition, sensitive, tokens

BYTE, CHAR = byte_tokenizer(), char_tokenizer(["abcde"])
SAMPLING = [  # out of range, or of no effect
    *({"top_k": 0, "temperature": 1.0}, {"min_p": 1.1, "temperature": 1.0}, {"min_p": math.nan, "temperature": 1.0}),
    *({"top_p": 0.0, "temperature": 1.0}, {"top_p": 1.1, "temperature": 1.0}),
    *({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}),
]
PROMPTS = [[1], [5, 6, 7, 8, 9], [*range(SEQ)], [*range(20, 21 + SEQ)], [*range(40, VOCAB)]]


@settings(deadline=None)
@given(length=st.integers(1, 5000), seq_len=st.integers(1, 300))
def test_the_window_is_never_empty_and_fits_the_context(length: int, seq_len: int) -> None:
    start = window_start(length, seq_len)
    assert 0 < length - start <= seq_len
    assert length - start > seq_len // 2 or start == 0
    assert (start == 0) == (length <= seq_len)


@settings(deadline=None)
@given(seq_len=st.integers(2, 100))
def test_the_window_moves_by_half_a_context(seq_len: int) -> None:
    """So the cache is rebuilt once in half a context; and the window only moves forward."""
    starts = [window_start(length, seq_len) for length in range(1, 6 * seq_len)]
    assert starts == sorted(starts)
    assert {starts.count(start) for start in set(starts) - {0, starts[-1]}} == {seq_len // 2}


@pytest.mark.parametrize("seq_len", [SEQ, 7, 1])
@pytest.mark.parametrize("n_kv_heads", [None, 1])
@pytest.mark.parametrize("position", some(POSITIONS, 3))
def test_cached_equals_uncached_equals_batched_far_past_the_context(
    position: str, n_kv_heads: int | None, seq_len: int
) -> None:
    net = sensitive(position=position, n_kv_heads=n_kv_heads, seq_len=seq_len)
    n = 4 * seq_len
    expected = [by_definition(net, prompt, n) for prompt in PROMPTS]
    assert tokens(net, PROMPTS, n) == expected
    assert [tokens(net, [prompt], n)[0] for prompt in PROMPTS] == expected


def test_a_cache_grows_with_the_text() -> None:
    """Through all its lengths, for rows of different lengths, and across the end of the context."""
    net, n = sensitive(seq_len=100), 2 * 100
    prompts = [[1], [*range(VOCAB)][:45]]
    expected = [by_definition(net, prompt, n) for prompt in prompts]
    assert tokens(net, prompts, n) == expected
    assert [tokens(net, [prompt], n)[0] for prompt in prompts] == expected
    assert [cache_length(length, 100) for length in (1, 32, 33, 64, 65, 100)] == [32, 32, 64, 64, 100, 100]


def test_the_sensitive_model_depends_on_its_whole_context() -> None:
    """The comparisons above depend on it: the next token changes with distant tokens and with their order."""
    net, text = sensitive(), torch.randint(VOCAB, (200, SEQ), generator=torch.Generator().manual_seed(0))
    moved = text.clone()
    moved[:, :2] = text[:, :2].flip(1)
    with torch.no_grad():
        changed = net(text)[:, -1].argmax(-1) != net(moved)[:, -1].argmax(-1)
    assert changed.float().mean() > 0.1


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        next(decode(sensitive(), [[1], []]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_stops_at_end_of_text(temperature: float) -> None:
    """Each row of a batch stops by itself; what it decodes after end of text is dropped."""
    net, prompts = sensitive(CHAR.vocab_size), ["", "a", "bcd", "edcba" * 5, "cc", "dab"]
    continuations = generate(net, CHAR, prompts, 30, temperature=temperature)
    rows = tokens(net, [[CHAR.eot, *CHAR.encode(prompt)] for prompt in prompts], 30, Sampling(temperature=temperature))
    assert continuations == [CHAR.decode(takewhile(lambda one: one != CHAR.eot, row)) for row in rows]
    assert len({len(continuation) for continuation in continuations}) > 2  # they stop, at different lengths


def test_batched_continuations_equal_single_ones() -> None:
    net, prompts = sensitive(BYTE.vocab_size), ["", "x", "def f(x):", "naïve 漢字 " * 4]
    continuations = generate(net, BYTE, prompts, 40)
    assert continuations == [generate(net, BYTE, prompt, 40) for prompt in prompts]
    assert len(set(continuations)) == len(prompts)
    assert generate(net, BYTE, [], 40) == []


def test_zero_new_tokens_give_an_empty_continuation() -> None:
    assert generate(sensitive(BYTE.vocab_size), BYTE, "x", 0) == ""
    assert generate(sensitive(BYTE.vocab_size), BYTE, ["x", ""], 0) == ["", ""]
    assert list(stream(sensitive(BYTE.vocab_size), BYTE, "x", 0)) == []


@pytest.mark.parametrize("wrong", [{"max_new_tokens": -1}, {"temperature": -0.1}, {"temperature": math.nan}, *SAMPLING])
def test_invalid_numbers_are_refused_by_name(wrong: dict) -> None:
    for function in (generate, lambda *args, **options: list(stream(*args, **options))):
        with pytest.raises(UserError, match=next(iter(wrong))):
            function(sensitive(BYTE.vocab_size), BYTE, "x", **wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tokenizer", [BYTE, CHAR], ids=["byte", "char"])
def test_a_joined_stream_equals_generate(tokenizer, temperature: float) -> None:
    for seed in range(4):
        options = {"max_new_tokens": 40, "temperature": temperature, "seed": seed}
        continuation = generate(sensitive(tokenizer.vocab_size), tokenizer, "abc", **options)
        assert "".join(stream(sensitive(tokenizer.vocab_size), tokenizer, "abc", **options)) == continuation


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_a_stream_of_bytes_yields_whole_characters(text: str) -> None:
    assert list(BYTE.stream(BYTE.encode(text))) == list(text)


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTE.vocab_size - 1)))
def test_a_joined_stream_of_any_bytes_equals_decode(ids: list[int]) -> None:
    assert "".join(BYTE.stream(ids)) == BYTE.decode(ids)


def test_a_stream_yields_a_character_as_soon_as_it_is_complete() -> None:
    ids = iter(BYTE.encode("é漢b"))
    pieces = BYTE.stream(ids)
    assert next(pieces) == "é"
    assert len(list(ids)) == 4  # the bytes of the other two characters have not been consumed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_logits_of_each_token_are_seen(temperature: float) -> None:
    """Also of those that were drafted."""
    net, rows, text = sensitive(seq_len=100), [], [5, 6, 7, 5, 6]
    sampling = Sampling(temperature=temperature)
    for (token,) in islice(decode(net, [text], sampling, observe=lambda logits: rows.append(logits[0].clone())), 60):
        with torch.no_grad():
            torch.testing.assert_close(rows[-1], net(torch.tensor([text]))[0, -1], rtol=1e-4, atol=1e-4)
        text.append(token)
    assert len(rows) == 60


def test_the_likeliest_tokens_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.randn(BYTE.vocab_size, generator=torch.Generator().manual_seed(0))
    expected, pairs = logits.softmax(-1).topk(3), likeliest(BYTE, logits, 3)
    assert [share for _, share in pairs] == pytest.approx(expected.values.tolist(), rel=1e-5)
    assert pairs[0][0] == BYTE.decode([int(expected.indices[0])])
    assert len(likeliest(BYTE, logits, 1000)) == BYTE.vocab_size
    assert "<|endoftext|>" in dict(likeliest(BYTE, logits, 1000))


def test_a_sample_depends_on_its_seed_and_temperature_alone() -> None:
    net = sensitive(BYTE.vocab_size)
    samples = [generate(net, BYTE, "x", 40, temperature=1.0, seed=seed) for seed in (0, 1, 2)]
    torch.manual_seed(5)  # the global random state has no effect
    assert generate(net, BYTE, "x", 40, temperature=1.0, seed=0) == samples[0]
    assert len({*samples, generate(net, BYTE, "x", 40)}) == 4
    assert generate(net, BYTE, "x", 40, temperature=1e-6) == generate(net, BYTE, "x", 40)


class NoSoftmax(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert "softmax" not in getattr(func, "__name__", "")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.1}])
def test_decoding_calls_no_softmax(options: dict) -> None:
    with NoSoftmax():
        assert generate(sensitive(BYTE.vocab_size), BYTE, ["x", "yz"], 20, **options)


@pytest.mark.parametrize("call", [torch.softmax, F.log_softmax, torch.Tensor.softmax])
def test_the_softmax_guard_sees_every_form(call) -> None:
    with NoSoftmax(), torch.inference_mode(), pytest.raises(AssertionError):
        call(torch.ones(2, 3), -1)


def test_decoding_disables_dropout_and_restores_training_mode() -> None:
    net = Transformer(tiny(dropout=0.5), TIED, vocab_size=VOCAB, seq_len=SEQ).train()
    first, second = (list(islice(decode(net, [[1, 2, 3]]), 8)) for _ in range(2))
    assert first == second
    assert net.training


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert Sampling(temperature=1e-39).next_token(logits, torch.Generator().manual_seed(0)).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mask_has_the_dtype_of_the_scores(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1], [2, 3]])
    _, mask = attention_inputs(positions, positions, KVCache(4), None, dtype)
    assert mask.dtype == dtype
    assert mask.isinf().logical_not().sum(-1).tolist() == [[[1, 2]], [[3, 4]]]
    net = copy.deepcopy(sensitive()).to(dtype)
    assert tokens(net, [[1, 2, 1, 2]], 2 * SEQ) == tokens(net, [[1, 2, 1, 2]], 2 * SEQ, max_draft_tokens=0)
