"""Decoding: greedy argmax on raw logits, with a key-value cache. There is no softmax, not even for sampling.

The part of a long text that the model sees is a pure function of the text's length (`window_start`), so greedy
decoding gives the same tokens with or without the cache, alone or in a batch (except where rounding breaks a tie).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.config import UserError, foreign_classes
from lm.inference.sampling import GREEDY, Sampling
from lm.model.cache import KVCache
from lm.model.transformer import Transformer

MIN_CACHE_LENGTH = {"cpu": 32, "cuda": 256, "mps": 32}  # positions that a new cache has; a graph is for one length


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
        starts, ids = list[int](), torch.empty(0)
        while True:
            now = [window_start(len(text), net.seq_len) for text in texts]
            windows = [text[start:] for text, start in zip(texts, now, strict=True)]
            longest = max(map(len, windows))
            if now != starts:
                starts, cache = now, KVCache(cache_length(longest, net.seq_len, device.type))
                step, logits = Step(net, cache), prefill(net, windows, cache)
                positions = torch.tensor([[len(window)] for window in windows], device=device)  # of the next tokens
                if logits.isnan().any():
                    raise UserError("the model's logits are not numbers; its weights are not those of a model")
            else:
                if longest > cache.length:
                    cache.grow(cache_length(longest, net.seq_len, device.type))
                    step = Step(net, cache)
                logits = step(ids, positions)  # (B, 1, V)
                positions = positions + 1
            ids = sampling.next_token(logits, generator)  # (B, 1)
            observe(logits[:, 0])
            tokens = ids[:, 0].tolist()
            yield tokens
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
    finally:
        net.train(training)


class Step:
    """The forward pass of the next token of each row: tokens (B, 1) at positions (B, 1) to logits (B, 1, V).

    On CUDA it is captured as a graph, which launches its kernels at once: one by one, each would wait for Python. A
    class of the user's own may do what a graph cannot hold.
    """

    def __init__(self, net: Transformer, cache: KVCache) -> None:
        self.net, self.cache = net, cache
        self.captures = net.embed.weight.is_cuda and not foreign_classes(net.config)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.graph is None:
            with sdpa_kernel(SDPBackend.MATH) if self.captures else nullcontext():  # for a single query the fastest
                logits: Tensor = self.net(tokens, positions, self.cache)
                if self.captures:
                    self.inputs, self.graph = (tokens, positions), torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):  # nothing is computed here
                        self.logits = self.net(*self.inputs, self.cache)
            return logits
        for static, value in zip(self.inputs, (tokens, positions), strict=True):
            static.copy_(value)
        self.graph.replay()
        return self.logits.clone()  # the next replay writes over it


def prefill(net: Transformer, texts: list[list[int]], cache: KVCache) -> Tensor:
    """Fill a cache with texts of any lengths; returns the logits (B, 1, V) of the token after each."""
    device = net.embed.weight.device
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    last = torch.tensor([[len(text) - 1] for text in texts], device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    x = net.hidden_states(tokens, positions, cache)[torch.arange(len(texts), device=device)[:, None], last]
    return net.head(x, net.embed.weight)


def cache_length(length: int, seq_len: int, device: str) -> int:
    """The number of positions to allocate where `length` are needed: attention costs as much as is allocated."""
    return min(seq_len, max(MIN_CACHE_LENGTH[device], 2 ** math.ceil(math.log2(length))))
