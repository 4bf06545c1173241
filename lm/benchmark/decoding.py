"""Greedy decoding of one prompt beside transformers.generate on the same weights, and beside the memory."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from statistics import median

import torch

from lm.benchmark.limits import bandwidth
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import GPT2, in_transformers
from lm.config import HeadConfig, ModelConfig
from lm.decode import decode
from lm.model.transformer import Transformer

SHAPES = {"default": (ModelConfig(), 2048, 128, 96), "GPT-2 124M": (GPT2, 50257, 1024, 24)}
# name -> (body, vocabulary, context, tokens to write)


def write(net: Transformer, prompts: list[list[int]], n: int) -> None:
    for _ in islice(decode(net, prompts), n):
        pass


def decoding(device: str, seconds: float) -> Iterator[Figure]:
    for name, (config, vocab_size, seq_len, n) in SHAPES.items():
        net = Transformer(config, HeadConfig(), vocab_size=vocab_size, seq_len=seq_len).to(device).eval()
        theirs = in_transformers(net)
        prompt = torch.randint(vocab_size, (1, 8), device=device)
        calls: dict[str, Callable[[], object]] = {"ours": partial(write, net, prompt.tolist(), n)}
        if theirs is not None:
            greedy = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False}
            calls["transformers"] = partial(theirs.generate, prompt, attention_mask=prompt * 0 + 1, **greedy)
        times = alternate(calls, seconds)
        if theirs is not None:
            ours, other = paired(times["ours"], times["transformers"])
            yield Figure("decoding", name, n / ours, "tokens/s", "transformers", n / other)
        bound = bandwidth(device) / sum(parameter.nbytes for parameter in net.parameters())
        yield Figure("decoding", name, n / median(times["ours"]), "tokens/s", "memory bandwidth", bound)
