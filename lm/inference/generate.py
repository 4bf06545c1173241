"""Prompts to text: `stream` yields a continuation as it is decoded, `generate` returns it."""

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import TypedDict, TypeVar, Unpack

from lm.config import require
from lm.data.tokenizer import Tokenizer
from lm.inference.decode import decode
from lm.inference.sampling import Sampling
from lm.model.transformer import Transformer

Prompt = TypeVar("Prompt", str, list[str])


class Options(TypedDict, total=False):
    """The arguments of lm.inference.sampling.Sampling."""

    temperature: float
    top_k: int | None
    min_p: float
    seed: int


def stream(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 128,
    **options: Unpack[Options],
) -> Iterator[str]:
    """Yield the continuation of one prompt, up to end of text, in pieces of whole characters as they are decoded."""
    require(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}", "0 or more")
    ids = (one for (one,) in decode(net, begun(tokenizer, [prompt]), Sampling(**options)))
    yield from tokenizer.stream(islice(takewhile(lambda one: one not in tokenizer.separator, ids), max_new_tokens))


def generate(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_new_tokens: int = 128,
    **options: Unpack[Options],
) -> Prompt:
    """Continue a prompt, or each prompt of a list in one batch; returns the continuation without the prompt.

    Decoding is greedy at temperature 0, the default, and sampled above it; `top_k` and `min_p` restrict the sample. It
    stops at end of text or after `max_new_tokens`. If the text is longer than the model's context, the model sees its
    tokens from `window_start` on. Raises UserError if an option is out of range.

    >>> from lm import HeadConfig, ModelConfig
    >>> from lm.data.vocabulary import byte_tokenizer
    >>> tokenizer, config = byte_tokenizer(), ModelConfig(d_model=32, n_heads=2, d_ff=64)
    >>> net = Transformer(config, HeadConfig(), vocab_size=tokenizer.vocab_size, seq_len=16)
    >>> generate(net, tokenizer, "def ", 8) == "".join(stream(net, tokenizer, "def ", 8))
    True
    >>> generate(net, tokenizer, ["def ", "class"], 8)[0] == generate(net, tokenizer, "def ", 8)
    True
    """
    require(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}", "0 or more")
    prompts: list[str] = [prompt] if isinstance(prompt, str) else prompt
    continuations: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    steps = decode(net, begun(tokenizer, prompts), Sampling(**options))
    for ids in islice(steps, max_new_tokens) if prompts else ():
        for row in tuple(unfinished):
            if ids[row] in tokenizer.separator:
                unfinished.discard(row)
            else:
                continuations[row].append(ids[row])
        if not unfinished:
            break
    found = [tokenizer.decode(ids) for ids in continuations]
    return found[0] if isinstance(prompt, str) else found


def begun(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    return [[tokenizer.begin, *tokenizer.encode(one)] for one in prompts]
