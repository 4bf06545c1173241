"""Draft tokens come from the last occurrence of the last tokens, and they leave the output unchanged."""

from collections.abc import Iterator
from itertools import islice, takewhile

import pytest
from conftest import SEQ
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.inference.decode import decode
from lm.inference.prompt_lookup import MAX_DRAFT_TOKENS, NGRAM_SIZES, PromptLookup
from lm.inference.sampling import Sampling
from lm.model.transformer import Transformer
from tests.helpers.decoding import by_definition, sensitive

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_search(text: list[int], n: int) -> list[int]:
    """Search the last tokens backwards from the end of the text; a copy that runs out repeats itself."""
    for order in NGRAM_SIZES:
        for at in range(len(text) - 1, order - 1, -1):
            if text[at - order : at] == text[-order:]:
                return [(text[at:] * n)[i] for i in range(min(n, 2**order))]
    return []


@settings(deadline=None)
@given(TEXTS, st.integers(0, 40), st.lists(st.integers(1, 4), max_size=6))
def test_a_draft_is_what_followed_the_last_occurrence(text: list[int], n: int, steps: list[int]) -> None:
    """In an index built at once, and in one that has grown with the text."""
    assert PromptLookup(text).draft(n) == by_search(text, n)
    grown = text[:1]
    lookup = PromptLookup(grown)
    for step in steps:
        assert lookup.draft(n) == by_search(grown, n)
        grown.extend(text[len(grown) : len(grown) + step])


def widths(
    net: Transformer, prompts: list[list[int]], n: int, *sampling: Sampling, **options: int
) -> tuple[list[int], list[int]]:
    """n new tokens of the first prompt, and how many tokens of it each forward pass read."""
    seen: list[int] = []
    hook = net.blocks[0].register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    continuation = [ids[0] for ids in islice(decode(net, prompts, *sampling, **options), n)]
    hook.remove()
    return continuation, seen


@pytest.mark.parametrize("max_draft_tokens", [1, 16])
def test_the_tokens_are_equal_in_fewer_forward_passes(max_draft_tokens: int) -> None:
    """With accepted and rejected draft tokens, across the end of the context and the growth of the cache."""
    net, n, accepted, rejected = sensitive(), 3 * SEQ, 0, 0
    for prompt in ([5, 6, 7, 5, 6], [*range(20)] * 3):
        continuation, seen = widths(net, [prompt], n, max_draft_tokens=max_draft_tokens)
        plain, each = widths(net, [prompt], n, max_draft_tokens=0)
        assert continuation == plain == by_definition(net, prompt, n)
        assert len(each) == n
        accepted += n - len(seen)
        rejected += sum(seen) - sum(each)
    assert accepted > 0
    assert rejected > 0


def by_rule(prompt: list[int], continuation: list[int], max_draft_tokens: int) -> Iterator[int]:
    """Tokens that each pass after the first reads: long drafts only after a pass that accepted two tokens."""
    text, n_accepted = [*prompt, continuation[0]], 0
    while coming := continuation[len(text) - len(prompt) :]:
        draft = by_search(text, min(max_draft_tokens, MAX_DRAFT_TOKENS if n_accepted >= 2 else 2))
        n_accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(draft, coming, strict=False))))
        text += coming[: n_accepted + 1]
        yield 1 + len(draft)


@pytest.mark.parametrize("max_draft_tokens", [3, MAX_DRAFT_TOKENS])
def test_drafts_grow_with_the_matching_ngram_and_after_accepted_tokens(max_draft_tokens: int) -> None:
    """In a context that is never full, so that every pass after the first reads a token and its draft."""
    net, n, prompt = sensitive(seq_len=400), 250, [1, 2, 1, 2, 1]
    continuation, (_, *seen) = widths(net, [prompt], n, max_draft_tokens=max_draft_tokens)
    assert seen == list(by_rule(prompt, continuation, max_draft_tokens))
    assert max(seen) == 1 + max_draft_tokens  # the model repeats itself, so every draft token is accepted


def test_samples_and_batches_use_no_draft_tokens() -> None:
    net = sensitive(seq_len=100)
    for prompts, sampling in (([[1, 2, 1, 2, 1]], Sampling(temperature=0.01)), ([[5, 6, 5], [1, 1, 1]], Sampling())):
        _, (_, *seen) = widths(net, prompts, 50, sampling)
        assert seen == [1] * 49
