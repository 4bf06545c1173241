"""Greedy decoding beside transformers and the memory bandwidth."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from lm.decoding import decode
from lm.model.transformer import Transformer

from .measure import Measurement, MemoryRead, compare
from .models import DEFAULT, GPT2, in_transformers

LARGE = "GPT-2 124M, 1 prompt"  # its weights are read from memory for each token
CASES = {"default, 1 prompt": (DEFAULT, 1), "default, 32 prompts": (DEFAULT, 32), LARGE: (GPT2, 1)}  # shape, prompts


def decoding(device: str, seconds: float) -> Iterator[Measurement]:
    for name, (shape, rows) in CASES.items():
        n = 24 if name == LARGE and device == "cpu" else 96  # new tokens
        net, prompts = shape.build(device).eval(), torch.randint(shape.vocab_size, (rows, 8), device=device)
        calls: dict[str, Callable[[], object]] = {"lm": partial(_decode, net, prompts, n)}
        if (model := in_transformers(net)) is not None:
            mask = torch.ones_like(prompts)
            options = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False}
            calls["transformers"] = partial(model.generate, prompts, attention_mask=mask, **options)
        if name == LARGE:
            calls["memory bandwidth"] = read = MemoryRead(device)
        for reference, mine, other in compare(calls, seconds):
            if reference == "memory bandwidth":  # the least time for a token: to read each weight
                other *= n * sum(parameter.nbytes for parameter in net.parameters()) / read.weights.nbytes
            yield Measurement("decoding", name, rows * n / mine, "tokens/s", reference, rows * n / other)


def _decode(net: Transformer, prompts: Tensor, n: int) -> None:
    for _ in islice(decode(net, prompts.tolist()), n):
        pass
