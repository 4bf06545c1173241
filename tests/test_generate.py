"""Decoding: the same tokens with a cache and in a batch, and no softmax anywhere."""

import copy
from itertools import islice, takewhile

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from lm.data.tokenizer import byte_tokenizer, char_tokenizer
from lm.decoding import Sampling, decode, generate, stream, window_start
from tests.helpers.decoding import by_definition, sensitive, tokens
from tests.helpers.models import build
from tests.helpers.refusals import refused
from tests.helpers.tiny import SEQ, VOCAB

BYTE, CHAR = byte_tokenizer(), char_tokenizer(["abcde"])
PROMPTS = [[1], [5, 6, 7, 8, 9], [*range(SEQ)], [*range(20, 51)], [*range(40, VOCAB)]]


@pytest.mark.parametrize("seq_len", [2, 3, 16, 255])
def test_the_window_fits_the_context_and_moves_by_half_of_it(seq_len):
    for length in range(1, 4 * seq_len):
        start, following = window_start(length, seq_len), window_start(length + 1, seq_len)
        assert 0 < length - start <= seq_len
        assert length - start > seq_len // 2 or start == 0
        assert (start == 0) == (length <= seq_len)
        assert following - start in (0, seq_len // 2)


@pytest.mark.parametrize(
    ("position", "qk_norm", "n_kv_heads", "seq_len"),
    [("rope", True, 1, SEQ), ("learned", False, None, 7), ("none", False, 1, 1), ("rope", False, None, 64)],
)
def test_cached_equals_uncached_far_past_the_context(position, qk_norm, n_kv_heads, seq_len):
    """The cache of the longest context grows before the window moves."""
    net, n = sensitive(position=position, qk_norm=qk_norm, n_kv_heads=n_kv_heads, seq_len=seq_len), 20
    expected = [by_definition(net, prompt, n) for prompt in PROMPTS]
    assert tokens(net, PROMPTS, n) == expected
    assert [tokens(net, [prompt], n)[0] for prompt in PROMPTS] == expected


def test_a_prompt_may_be_empty_and_is_continued_without_characters_that_the_model_does_not_know():
    net = sensitive(CHAR.vocab_size)
    assert generate(net, CHAR, "a~b", 9) == generate(net, CHAR, "ab", 9) == "".join(stream(net, CHAR, "~ab~", 9))
    assert (generate(net, CHAR, [], 9), generate(net, CHAR, ["a", ""], 0)) == ([], ["", ""])
    for tokenizer in (CHAR, BYTE):
        with refused("half of a character"):
            tokenizer.without_unknown("a é \ud800")


@pytest.mark.parametrize(("temperature", "ends"), [(0.0, ""), (1.0, ""), (0.0, "a")])
def test_it_stops_at_end_of_text_and_of_a_turn(temperature, ends, monkeypatch):
    """Each row of a batch stops by itself; what it decodes after end of text is dropped."""
    net, prompts = sensitive(CHAR.vocab_size), ["", "a", "bcd", "edcba" * 5, "cc", "dab"]
    monkeypatch.setattr(CHAR, "stops", {CHAR.eot, *CHAR.encode(ends)})
    continuations = generate(net, CHAR, prompts, 20, temperature=temperature)
    rows = tokens(net, [[CHAR.eot, *CHAR.encode(prompt)] for prompt in prompts], 20, Sampling(temperature=temperature))
    assert continuations == [CHAR.decode(takewhile(lambda token: token not in CHAR.stops, row)) for row in rows]
    if temperature == 0.0:
        assert continuations == ["".join(stream(net, CHAR, prompt, 20)) for prompt in prompts]
    assert len({len(continuation) for continuation in continuations}) > 2  # they stop, at different lengths


WRONG = """
    max_new_tokens=-1
    temperature=-0.1
    temperature=nan
    temperature=1 top_k=0
    temperature=1 min_p=1.1
    temperature=1 min_p=nan
    temperature=1 top_p=0
    temperature=1 top_p=1.1
    top_k=5
    top_p=0.5
    min_p=0.5
"""  # the last three have no effect on greedy decoding


def test_a_wrong_number_is_refused_by_name():
    for line in WRONG.split("\n")[1:-1]:
        options = {key: float(value) for key, value in (word.split("=") for word in line.split())}
        for call in (generate, stream):
            with refused(f"^{[*options][-1]}="):
                next(call(sensitive(BYTE.vocab_size), BYTE, "x", **options))


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")), st.lists(st.integers(0, 256)))
def test_a_stream_yields_whole_characters_that_equal_decode(text, ids):
    assert list(BYTE.stream(BYTE.encode(text))) == list(text)
    assert "".join(BYTE.stream(ids)) == BYTE.decode(ids)


def test_a_stream_yields_a_character_as_soon_as_it_is_complete():
    ids = iter(BYTE.encode("é漢b"))
    pieces = BYTE.stream(ids)
    assert next(pieces) == "é"
    assert len(list(ids)) == 4  # the bytes of the other two characters have not been consumed


def test_a_sample_depends_on_its_seed_and_temperature_alone():
    net = sensitive(BYTE.vocab_size)
    samples = [generate(net, BYTE, "x", 15, temperature=1.0, seed=seed) for seed in (0, 1, 2)]
    torch.manual_seed(5)  # the global random state has no effect
    torch.set_default_dtype(torch.float64)  # nor has what a notebook has set before
    try:
        assert generate(net, BYTE, "x", 15, temperature=1.0, seed=0) == samples[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert len({*samples, generate(net, BYTE, "x", 15)}) == 4
    assert generate(net, BYTE, "x", 15, temperature=1e-6) == generate(net, BYTE, "x", 15)


class NoSoftmax(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert "softmax" not in getattr(func, "__name__", "")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.1}])
def test_decoding_calls_no_softmax(options):
    with NoSoftmax():
        assert generate(sensitive(BYTE.vocab_size), BYTE, ["x", "yz"], 20, **options)
    for function in (torch.softmax, F.log_softmax, torch.Tensor.softmax):  # each of which is seen
        with NoSoftmax(), torch.inference_mode(), pytest.raises(AssertionError):
            function(torch.ones(2, 3), -1)


def test_decoding_disables_dropout_and_restores_training_mode():
    net = build("tied", dropout=0.5)
    first, second = (list(islice(decode(net, [[1, 2, 3]]), 8)) for _ in range(2))
    assert first == second
    assert net.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_decodes(dtype):
    net = copy.deepcopy(sensitive()).to(dtype)
    assert tokens(net, [[1, 2, 1, 2]], SEQ)[0] == by_definition(net, [1, 2, 1, 2], SEQ)
