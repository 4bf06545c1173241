"""Decoding: greedy argmax on raw logits, with a key-value cache. There is no softmax, not even for sampling.

What the model sees of a long text is a pure function of its length (`window_start`), so greedy decoding gives the
same tokens with or without the cache, reading ahead or not, alone or in a batch (but for ties that rounding decides).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

import torch
from torch import Tensor

from lm.config import BadInput
from lm.data.tokenizer import Tokenizer
from lm.inference.prompt_lookup import LONGEST, PromptLookup
from lm.model.cache import KVCache
from lm.model.transformer import Transformer

LEAST_ROOM = 32  # positions of a new cache
TRIED = 2  # tokens guessed until as many were right


def window_start(length: int, seq_len: int) -> int:
    """Where the context begins when `length` tokens lie before the next one.

    The whole text while it fits; after that the text is cut half a context at a time, so the cache has to be
    rebuilt only once in seq_len/2 tokens.
    """
    half = max(1, seq_len // 2)
    return half * max(0, -(-(length - seq_len) // half))


def pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """(..., V) raw logits to (...) ids: argmax, or at a temperature an exact draw by the Gumbel-max trick.

    argmax(logits + temperature * Gumbel noise) is distributed as softmax(logits / temperature) (Gumbel, 1954).
    """
    if temperature == 0:
        return logits.argmax(-1)
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(min=1e-20)
    return (logits.float() - temperature * uniform.log().neg().log()).argmax(-1)


@torch.inference_mode()
def decode(
    net: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    guesses: int = LONGEST,
) -> Iterator[list[int]]:
    """Yield, without end, the next id of each prompt. Prompts may differ in length; none may be empty.

    Greedy and with a single prompt, a pass reads ahead (see lm/lookup.py) by two tokens, and by up to `guesses` where
    two were right the last time; 0 reads one token at a time. A batch shares its passes already, and what is sampled
    is seldom guessed.
    """
    texts = [list(prompt) for prompt in prompts]
    if not all(texts):
        raise ValueError("decode: a prompt is empty; begin it with the end-of-text token")
    device = net.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed) if temperature else None
    lookup, right = PromptLookup(texts[0]), 0
    most = 0 if temperature or len(texts) > 1 else guesses
    training = net.training
    net.eval()
    try:
        starts: list[int] = []
        while True:
            now = [window_start(len(text), net.seq_len) for text in texts]
            windows = [text[start:] for text, start in zip(texts, now, strict=True)]
            longest = max(map(len, windows))
            guess: list[int] = []
            if now != starts:
                starts, cache = now, KVCache(room(longest, net.seq_len))
                logits = read(net, windows, cache)
            else:
                guess = lookup.guess(min(most, LONGEST if right >= TRIED else TRIED, net.seq_len - longest))
                if longest + len(guess) > cache.length:
                    cache.grow(room(longest + len(guess), net.seq_len))
                tokens = torch.tensor([[window[-1], *guess] for window in windows], device=device)
                ends = torch.tensor([[len(window) - 1] for window in windows], device=device)
                logits = net(tokens, ends + torch.arange(tokens.shape[1], device=device), cache)
            for right, answer in enumerate(pick(logits, temperature, generator).T.tolist()):
                yield answer
                for text, one in zip(texts, answer, strict=True):
                    text.append(one)
                if answer != guess[right : right + 1]:
                    break
    finally:
        net.train(training)


def read(net: Transformer, texts: list[list[int]], cache: KVCache) -> Tensor:
    """Fill a cache with texts of any lengths; return the logits (B, 1, V) of what follows each."""
    device = net.embed.weight.device
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    last = torch.tensor([[len(text) - 1] for text in texts], device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    x = net.hidden_states(tokens, positions, cache)[torch.arange(len(texts), device=device)[:, None], last]
    return net.head(x, net.embed.weight)


def room(length: int, seq_len: int) -> int:
    """Positions that a cache is made for when `length` are needed: few, for each token looks through all of them."""
    return min(seq_len, max(LEAST_ROOM, 2 ** math.ceil(math.log2(length))))


def stream(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """The continuation of one prompt as it comes, in pieces of whole characters, up to end of text."""
    check(max_new_tokens, temperature)
    texts = [[tokenizer.eot, *tokenizer.encode(prompt)]]
    ids = (one for (one,) in decode(net, texts, temperature=temperature, seed=seed))
    yield from tokenizer.stream(islice(iter(ids.__next__, tokenizer.eot), max_new_tokens))


@overload
def generate(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = ...,
    *,
    temperature: float = ...,
    seed: int = ...,
) -> str: ...


@overload
def generate(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: list[str],
    max_new_tokens: int = ...,
    *,
    temperature: float = ...,
    seed: int = ...,
) -> list[str]: ...


def generate(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: str | list[str],
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> str | list[str]:
    """Continue a prompt, or each of several at once, and return the continuation without the prompt.

    Greedy at temperature 0, the default; above it, a sample. It stops at end of text or after `max_new_tokens`.
    A text longer than the model's context is seen from `window_start` on.

    >>> from lm import HeadConfig, ModelConfig
    >>> from lm.data.tokenizer import byte_tokenizer
    >>> tokenizer, config = byte_tokenizer(), ModelConfig(d_model=32, n_heads=2, d_ff=64)
    >>> net = Transformer(config, HeadConfig(), vocab_size=tokenizer.vocab_size, seq_len=16)
    >>> generate(net, tokenizer, "def ", 8) == "".join(stream(net, tokenizer, "def ", 8))
    True
    >>> generate(net, tokenizer, ["def ", "class"], 8)[0] == generate(net, tokenizer, "def ", 8)
    True
    """
    check(max_new_tokens, temperature)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    columns: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    texts = [[tokenizer.eot, *tokenizer.encode(one)] for one in prompts]
    steps = decode(net, texts, temperature=temperature, seed=seed)
    for ids in islice(steps, max_new_tokens) if prompts else ():
        for row in tuple(open_rows):
            if ids[row] == tokenizer.eot:
                open_rows.discard(row)
            else:
                columns[row].append(ids[row])
        if not open_rows:
            break
    answers = [tokenizer.decode(column) for column in columns]
    return answers[0] if isinstance(prompt, str) else answers


def check(max_new_tokens: int, temperature: float) -> None:
    if max_new_tokens < 0:
        raise BadInput(f"max_new_tokens={max_new_tokens}: expected 0 or more")
    if not 0 <= temperature < math.inf:
        raise BadInput(f"temperature={temperature}: expected 0 (greedy) or a number above")
