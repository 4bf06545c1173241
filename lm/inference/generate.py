"""Prompts to text: `stream` yields a continuation as it is decoded, `generate` returns it."""

from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import TypedDict, TypeVar, Unpack

from torch import Tensor

from lm.config import require
from lm.data.tokenizer import Tokenizer
from lm.inference.decode import Sampling, decode
from lm.model.transformer import Transformer

Prompt = TypeVar("Prompt", str, list[str])


class Options(TypedDict, total=False):
    """The arguments of lm.inference.decode.Sampling."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    seed: int


def stream(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 128,
    observe: Callable[[Tensor], object] = lambda logits: None,
    **options: Unpack[Options],
) -> Iterator[str]:
    """Yield the continuation of one prompt, up to end of text, in pieces of whole characters as they are decoded.

    `observe` is called with the logits (1, V) of each new token.
    """
    require(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}", "0 or more")
    steps = decode(net, _encode(tokenizer, [prompt]), Sampling(**options), observe=observe)
    ids = (token for (token,) in islice(steps, max_new_tokens))
    yield from tokenizer.stream(takewhile(lambda token: token not in tokenizer.stops, ids))


def likeliest(tokenizer: Tokenizer, logits: Tensor, n: int) -> list[tuple[str, float]]:
    """The n likeliest next tokens by their logits (V,), each with its probability."""
    values, ids = (logits.float() - logits.float().logsumexp(-1)).topk(min(n, logits.shape[-1]))
    texts = (tokenizer.decode([token]) or tokenizer.backend.id_to_token(token) or "" for token in ids.tolist())
    return list(zip(texts, values.exp().tolist(), strict=True))


def generate(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_new_tokens: int = 128,
    **options: Unpack[Options],
) -> Prompt:
    """Continue a prompt, or each prompt of a list in one batch; returns the continuation without the prompt.

    Decoding is greedy at temperature 0, the default, and sampled above it; `top_k`, `top_p` and `min_p` restrict the
    sample. It stops at end of text or after `max_new_tokens`. If the text is longer than the model's context, the model
    sees its tokens from `window_start` on. Characters of a prompt that the tokenizer lacks are left out, with
    a warning. Raises UserError if an option is out of range.

    >>> from lm import HeadConfig, ModelConfig
    >>> from lm.data.tokenizer import byte_tokenizer
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
    steps = decode(net, _encode(tokenizer, prompts), Sampling(**options))
    for ids in islice(steps, max_new_tokens) if prompts else ():
        for row in tuple(unfinished):
            if ids[row] in tokenizer.stops:
                unfinished.discard(row)
            else:
                continuations[row].append(ids[row])
        if not unfinished:
            break
    texts = [tokenizer.decode(ids) for ids in continuations]
    return texts[0] if isinstance(prompt, str) else texts


def _encode(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    return [[tokenizer.begin, *tokenizer.encode(tokenizer.without_unknown(prompt))] for prompt in prompts]
