"""Decoding: greedy argmax on raw logits, with a key-value cache. There is no softmax, not even for sampling.

The part of a long text that the model sees is a pure function of the text's length (`window_start`), so greedy
decoding gives the same tokens with or without the cache, alone or in a batch (except where rounding breaks a tie).
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lm.config import UserError
from lm.inference.sampling import GREEDY, Sampling
from lm.model.cache import KVCache
from lm.model.transformer import Transformer

MIN_CACHE_LENGTH = 32  # positions that a new cache has


def window_start(length: int, seq_len: int) -> int:
    """The index of the first token in the context, for a text of `length` tokens.

    It is 0 while the text fits into `seq_len`. After that it moves by half a context at a time, so the cache is
    rebuilt only once in seq_len/2 tokens.
    """
    half = max(1, seq_len // 2)
    return half * max(0, -(-(length - seq_len) // half))


@torch.inference_mode()
def decode(
    net: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = GREEDY,
    *,
    observe: Callable[[Tensor], object] = lambda logits: None,
) -> Iterator[list[int]]:
    """Yield, without end, the next token id of each prompt. Prompts may differ in length; none may be empty.

    Before that, `observe` is called with the logits (B, V) that decided it.
    """
    texts = [list(prompt) for prompt in prompts]
    if not all(texts):
        raise ValueError("decode: a prompt is empty; begin it with the end-of-text token")
    device = net.embed.weight.device
    generator = torch.Generator(device).manual_seed(sampling.seed) if sampling.temperature else None
    training = net.training
    net.eval()
    try:
        starts: list[int] = []
        while True:
            now = [window_start(len(text), net.seq_len) for text in texts]
            windows = [text[start:] for text, start in zip(texts, now, strict=True)]
            longest = max(map(len, windows))
            if now != starts:
                starts, cache = now, KVCache(cache_length(longest, net.seq_len))
                logits = prefill(net, windows, cache)
                if logits.isnan().any():
                    raise UserError("the model's logits are not numbers; its weights are not those of a model")
            else:
                if longest > cache.length:
                    cache.grow(cache_length(longest, net.seq_len))
                tokens = torch.tensor([[window[-1]] for window in windows], device=device)
                ends = torch.tensor([[len(window) - 1] for window in windows], device=device)
                logits = net(tokens, ends, cache)  # (B, 1, V)
            ids = sampling.next_token(logits, generator)[:, 0].tolist()
            observe(logits[:, 0])
            yield ids
            for text, token in zip(texts, ids, strict=True):
                text.append(token)
    finally:
        net.train(training)


def prefill(net: Transformer, texts: list[list[int]], cache: KVCache) -> Tensor:
    """Fill a cache with texts of any lengths; returns the logits (B, 1, V) of the token after each."""
    device = net.embed.weight.device
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    last = torch.tensor([[len(text) - 1] for text in texts], device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    x = net.hidden_states(tokens, positions, cache)[torch.arange(len(texts), device=device)[:, None], last]
    return net.head(x, net.embed.weight)


def cache_length(length: int, seq_len: int) -> int:
    """The number of positions to allocate where `length` are needed: attention costs as much as is allocated."""
    return min(seq_len, max(MIN_CACHE_LENGTH, 2 ** math.ceil(math.log2(length))))
