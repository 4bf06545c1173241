"""Greedy decoding beside transformers.generate on the same weights, and beside the memory's bandwidth."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch

from lm.benchmark.limits import Reading
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import in_transformers
from lm.benchmark.shapes import DEFAULT, GPT2
from lm.decode import decode
from lm.model.transformer import Transformer

CASES = {  # what -> shape, prompts, tokens to write
    "default": (DEFAULT, 1, 96),
    "default, 32 prompts": (DEFAULT, 32, 96),
    "GPT-2 124M": (GPT2, 1, 24),
    "GPT-2 124M, 8 prompts": (GPT2, 8, 24),
}


def write(net: Transformer, prompts: list[list[int]], n: int) -> None:
    for _ in islice(decode(net, prompts), n):
        pass


def decoding(device: str, seconds: float) -> Iterator[Figure]:
    for name, (shape, rows, n) in CASES.items():
        net = shape.model(device).eval()
        theirs = in_transformers(net)
        prompts = torch.randint(shape.vocab_size, (rows, 8), device=device)
        calls: dict[str, Callable[[], object]] = {"ours": partial(write, net, prompts.tolist(), n)}
        if theirs is not None:
            greedy = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False}
            calls["transformers"] = partial(theirs.generate, prompts, attention_mask=prompts * 0 + 1, **greedy)
        if heavy := name == "GPT-2 124M":
            calls["memory"] = read = Reading(device)
        times = alternate(calls, seconds)
        if theirs is not None:
            ours, other = paired(times["ours"], times["transformers"])
            yield Figure("decoding", name, rows * n / ours, "tokens/s", "transformers", rows * n / other)
        if heavy:
            ours, reading = paired(times["ours"], times["memory"])
            least = reading * sum(parameter.nbytes for parameter in net.parameters()) / read.weights.nbytes
            yield Figure("decoding", name, n / ours, "tokens/s", "memory bandwidth", 1 / least)
