"""Prompts to text: greedy argmax on raw logits, with a key-value cache. There is no softmax, not even for sampling.

`stream` yields a continuation during decoding, `generate` returns a whole continuation. Both call `decode`.

The part of a long text that the model sees is a pure function of the length of the text (`window_start`). Greedy
decoding therefore gives the same tokens with or without the cache, alone or in a batch (except where rounding breaks a
tie).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.config import user_classes
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError, check_settings, check_unused, require
from lm.model.transformer import KVCache, Transformer
from lm.registry import from_lab

Prompt = TypeVar("Prompt", str, list[str])

MIN_CACHE_LENGTH = {"cpu": 32, "cuda": 256, "mps": 32}  # positions of a new cache; a CUDA graph is for one length


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """The rule by which the next token follows from its logits. The default is greedy.

    Three settings restrict a sample. top_k: only the k tokens of the largest logits. top_p: only the most probable
    tokens that together have at least this probability (Holtzman et al., 2020). min_p: only tokens at least this many
    times as probable as the most probable token (Nguyen et al., 2024). Probabilities are at `temperature`. Raises
    UserError for a wrong value.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        is_finite = self.temperature == 0 or 1e-6 <= self.temperature <= 2**53  # logits divided by it stay finite
        require(is_finite, f"temperature={self.temperature}", "0 (greedy), or 1e-6 to 2**53")
        check_settings("", self, "top_k", "top_p")
        require(self.top_p <= 1, f"top_p={self.top_p}", "a number above 0, at most 1 (all tokens)")
        require(self.min_p <= 1, f"min_p={self.min_p}", "0 (all tokens) to 1")
        if self.temperature == 0:
            check_unused("", self, "temperature=0 (greedy; temperature=1 samples)", "top_k", "top_p", "min_p")

    def next_token(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return token ids (...) of raw logits (..., V): argmax at temperature 0, else a Gumbel-max sample.

        argmax(logits + temperature * Gumbel noise) is distributed as softmax(logits / temperature) (Gumbel, 1954).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = self.restrict(logits.float())
        uniform = torch.rand(logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)
        uniform.clamp_(min=1e-20)
        return (logits - self.temperature * uniform.log().neg().log()).argmax(-1)

    def restrict(self, logits: Tensor) -> Tensor:
        """Return the logits (..., V), with -inf for each token that may not be drawn. The temperature is above 0."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            descending = logits.sort(-1, descending=True).values
            cumulative = (descending / self.temperature).logcumsumexp(-1)  # log probability, up to a constant
            n_below = (cumulative < cumulative[..., -1:] + math.log(self.top_p)).sum(-1, keepdim=True)
            logits = logits.masked_fill(logits < descending.gather(-1, n_below), -torch.inf)
        if self.min_p:
            least = logits.amax(-1, keepdim=True) + self.temperature * math.log(self.min_p)
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits


GREEDY = Sampling()


def window_start(length: int, seq_len: int) -> int:
    """Return the index of the first token in the context, for a text of `length` tokens.

    The index is 0 while the text fits into `seq_len`. Then the index moves by half a context at a time, so `decode`
    rebuilds the cache only once in seq_len/2 tokens.
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
    """Yield, without end, the next token id of each prompt. Prompts may differ in length.

    Before each yield, call `observe` with the logits (B, V) that decided these ids. Raises ValueError if a prompt is
    empty, and UserError if the logits of a prompt are NaN.
    """
    texts = [list(prompt) for prompt in prompts]
    if not all(texts):
        raise ValueError("decode: a prompt is empty; begin it with the end-of-text token")
    device = net.embed.weight.device
    generator = torch.Generator(device).manual_seed(sampling.seed) if sampling.temperature else None
    training = net.training
    net.eval()
    try:
        starts, ids, cache = list[int](), torch.empty(0), KVCache(0)
        can_cache = True
        if user_classes(net.config):
            can_cache = from_lab("lm.lab.user_class.computes_tokens_alone")(net)
        while True:
            now = [window_start(len(text), net.seq_len) for text in texts]
            windows = [text[start:] for text, start in zip(texts, now, strict=True)]
            longest = max(map(len, windows))
            if now != starts or longest > cache.length or not can_cache:  # a cache that is full is made twice as long
                starts, cache = now, KVCache(cache_length(longest, net.seq_len, device.type))
                step, logits = DecodingStep(net, cache), prefill(net, windows, cache)
                positions = torch.tensor([[len(window)] for window in windows], device=device)  # of the next tokens
                if logits.isnan().any():
                    raise UserError("the model's logits are NaN; its weights are damaged, or its training diverged")
            else:
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


class DecodingStep:
    """The forward pass of the next token of each row: tokens (B, 1) at positions (B, 1) to logits (B, 1, V).

    On CUDA a graph captures the pass and launches its kernels at once: one by one, each kernel would wait for Python. A
    model with a class of the user has no graph, because such a class may do what a graph cannot hold.
    """

    def __init__(self, net: Transformer, cache: KVCache) -> None:
        self.net, self.cache = net, cache
        self.captures = net.embed.weight.is_cuda and not user_classes(net.config)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.graph is None:
            with sdpa_kernel(SDPBackend.MATH) if self.captures else nullcontext():  # the fastest for a single query
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
    """Fill a cache with texts of any lengths. Return the logits (B, 1, V) of the token after each text."""
    device = net.embed.weight.device
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    last = torch.tensor([[len(text) - 1] for text in texts], device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    x = net.hidden_states(tokens, positions, cache)[torch.arange(len(texts), device=device)[:, None], last]
    return net.head(x, net.embed.weight)


def cache_length(length: int, seq_len: int, device: str) -> int:
    """Return the number of positions to allocate for `length` positions: attention costs as much as is allocated."""
    return min(seq_len, max(MIN_CACHE_LENGTH[device], 2 ** math.ceil(math.log2(length))))


# --- text


class Options(TypedDict, total=False):
    """The arguments of Sampling, for editors and type checkers."""

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
    """Yield the continuation of one prompt, up to end of text, in pieces of whole characters during decoding.

    Call `observe` with the logits (1, V) of each new token.
    """
    require(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}", "0 or more")
    (before,) = _encode(tokenizer, [prompt])
    steps = decode(net, [before], Sampling(**options), observe=observe)
    ids = (token for (token,) in islice(steps, max_new_tokens))
    yield from tokenizer.stream(takewhile(lambda token: token not in tokenizer.stops, ids), after=before)


def likeliest(tokenizer: Tokenizer, logits: Tensor, n: int) -> list[tuple[str, float]]:
    """Return the n likeliest next tokens by their logits (V,), each with its probability."""
    values, ids = (logits.float() - logits.float().logsumexp(-1)).topk(min(n, logits.shape[-1]))
    return list(zip(map(tokenizer.label, ids.tolist()), values.exp().tolist(), strict=True))


def generate(
    net: Transformer,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_new_tokens: int = 128,
    **options: Unpack[Options],
) -> Prompt:
    """Continue a prompt, or each prompt of a list in one batch. Return the continuation without the prompt.

    Decoding is greedy at temperature 0, the default, and draws samples above 0. `top_k`, `top_p` and `min_p` restrict
    a sample. Decoding stops at end of text or after `max_new_tokens`. The model sees the tokens of a text from
    `window_start` on, if the text is longer than the context of the model. Leave out characters of a prompt that the
    tokenizer lacks, with a warning. Raises UserError if an option is out of range.

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
    encoded = _encode(tokenizer, prompts)
    steps = decode(net, encoded, Sampling(**options))
    for ids in islice(steps, max_new_tokens) if prompts else ():
        for row in tuple(unfinished):
            if ids[row] in tokenizer.stops:
                unfinished.discard(row)
            else:
                continuations[row].append(ids[row])
        if not unfinished:
            break
    texts = [tokenizer.decode(ids, after) for ids, after in zip(continuations, encoded, strict=True)]
    return texts[0] if isinstance(prompt, str) else texts


def _encode(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    return [[tokenizer.begin, *tokenizer.encode(tokenizer.without_unknown(prompt))] for prompt in prompts]
