"""A guess is what followed the last time, and decoding with guesses is decoding."""

from collections.abc import Iterator
from itertools import islice, takewhile

import pytest
from conftest import SEQ
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import by_definition, talker

from lm.inference.decode import decode
from lm.inference.prompt_lookup import LONGEST, ORDERS, PromptLookup
from lm.model.transformer import Transformer

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_search(text: list[int], n: int) -> list[int]:
    """Look for the last tokens from the end of the text backwards; if the copy runs out, it goes on with itself."""
    for order in ORDERS:
        for at in range(len(text) - 1, order - 1, -1):
            if text[at - order : at] == text[-order:]:
                return [(text[at:] * n)[i] for i in range(min(n, 2**order))]
    return []


@settings(deadline=None)
@given(TEXTS, st.integers(0, 40))
def test_a_guess_is_what_followed_the_last_time(text: list[int], n: int) -> None:
    assert PromptLookup(text).guess(n) == by_search(text, n)


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(1, 4), max_size=10))
def test_a_text_that_grows_is_as_one_that_was_there(text: list[int], steps: list[int]) -> None:
    grown = text[:1]
    lookup = PromptLookup(grown)
    for step in steps:
        assert lookup.guess(5) == by_search(grown, 5)
        grown.extend(text[len(grown) : len(grown) + step])
    assert lookup.guess(5) == by_search(grown, 5)


def widths(net: Transformer, prompt: list[int], n: int, **options) -> tuple[list[int], list[int]]:
    """n new tokens, and how many tokens each pass through the model read."""
    seen: list[int] = []
    hook = net.blocks[0].register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    answer = [one for (one,) in islice(decode(net, [prompt], **options), n)]
    hook.remove()
    return answer, seen


@pytest.mark.parametrize("seq_len", [SEQ, 100])
@pytest.mark.parametrize("guesses", [1, 3, 16])
def test_the_tokens_are_the_same_in_fewer_passes(guesses: int, seq_len: int) -> None:
    """Right and wrong guesses, across the end of the context and the growth of the cache."""
    net, n, accepted, refused = talker(seq_len=seq_len), 3 * seq_len, 0, 0
    for prompt in ([1], [5, 6, 7, 5, 6], [*range(20)] * 3):
        expected = by_definition(net, prompt, n)
        plain, one_each = widths(net, prompt, n, guesses=0)
        ahead, seen = widths(net, prompt, n, guesses=guesses)
        assert plain == ahead == expected
        assert len(one_each) == n
        accepted += n - len(seen)
        refused += sum(seen) - sum(one_each)
    assert accepted > 0
    assert refused > 0


def by_rule(prompt: list[int], answer: list[int], guesses: int) -> Iterator[int]:
    """Tokens that each pass after the first reads: a long guess only after one of which two were right."""
    text, right = [*prompt, answer[0]], 0
    while coming := answer[len(text) - len(prompt) :]:
        guess = by_search(text, min(guesses, LONGEST if right >= 2 else 2))
        right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(guess, coming, strict=False))))
        text += coming[: right + 1]
        yield 1 + len(guess)


@pytest.mark.parametrize("guesses", [0, 1, 3, LONGEST])
def test_a_guess_is_long_where_much_agrees_and_the_last_was_right(guesses: int) -> None:
    """Within a context that is never filled, so that every pass but the first is one of a token and its guess."""
    net, n, prompt = talker(seq_len=400), 300, [1, 2, 1, 2, 1]
    answer, (_, *seen) = widths(net, prompt, n, guesses=guesses)
    assert answer == by_definition(net, prompt, n)
    assert seen == list(by_rule(prompt, answer, guesses))
    assert max(seen) == 1 + guesses  # it has come to a loop, and every guess is right


def test_what_is_sampled_is_not_guessed() -> None:
    _, (_, *seen) = widths(talker(seq_len=100), [1, 2, 1, 2, 1], 50, temperature=0.01)
    assert seen == [1] * 49


def test_a_batch_does_not_guess() -> None:
    net, prompts, n = talker(seq_len=100), [[5, 6, 7, 5, 6], [1, 1, 1]], 90
    seen: list[int] = []
    hook = net.blocks[0].register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    rows = list(islice(decode(net, prompts), n))
    hook.remove()
    assert seen[1:] == [1] * (n - 1)
    assert [list(row) for row in zip(*rows, strict=True)] == [by_definition(net, prompt, n) for prompt in prompts]
