"""Greedy decoding beside transformers and the memory bandwidth; prompt-lookup decoding beside one token per pass."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lm.config import UserError
from lm.formats.folder import load_model
from lm.inference.decode import decode
from lm.inference.prompt_lookup import MAX_DRAFT_TOKENS
from lm.inference.text import own_validation
from lm.model.transformer import Transformer

from .measure import Measurement, MemoryRead, compare
from .models import DEFAULT, GPT2, in_transformers

LARGE = "GPT-2 124M, 1 prompt"  # its weights are read from memory for each token
CASES = {  # name -> shape, prompts, new tokens
    "default, 1 prompt": (DEFAULT, 1, 96),
    "default, 32 prompts": (DEFAULT, 32, 96),
    LARGE: (GPT2, 1, 24),
}
N_PROMPTS = 8  # from a run's validation text


class RunPrompts(NamedTuple):
    """A run's model, and prompts (N_PROMPTS, T) from its validation text, each a quarter of the context."""

    net: Transformer
    prompts: Tensor


def read_prompts(run_dir: str) -> RunPrompts:
    """Raises UserError if the run or its validation text cannot be read."""
    path = Path(run_dir).resolve()
    try:
        (net, _), (tokens, *_) = load_model(path), own_validation(path, trust=False)
    except UserError as error:
        raise UserError(f"run_dir={run_dir}: its validation text cannot be read; evaluate.py says: {error}") from error
    length = max(1, min(net.seq_len // 4, len(tokens)))
    starts = [(len(tokens) - length) * i // N_PROMPTS for i in range(N_PROMPTS)]
    return RunPrompts(net, torch.tensor([tokens[start : start + length].tolist() for start in starts]))


def decoding(device: str, seconds: float, run: RunPrompts | None = None) -> Iterator[Measurement]:
    """Random weights repeat themselves, so prompt-lookup decoding is measured on the weights of a run alone."""
    for name, (shape, rows, n) in CASES.items():
        net, prompts = shape.build(device).eval(), torch.randint(shape.vocab_size, (rows, 8), device=device)
        calls: dict[str, Callable[[], object]] = {"lm": partial(_decode, net, prompts, n, 0)}
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
    if run is not None:
        yield from prompt_lookup(run, device, seconds)


def prompt_lookup(run: RunPrompts, device: str, seconds: float) -> Iterator[Measurement]:
    """The rest of the context after each prompt, one prompt after the other."""
    net, prompts = run.net.to(device), run.prompts.to(device)
    n = max(1, net.seq_len - prompts.shape[1])

    def continue_each(max_draft_tokens: int) -> None:
        for prompt in prompts[:, None]:
            _decode(net, prompt, n, max_draft_tokens)

    calls = {"lm": partial(continue_each, MAX_DRAFT_TOKENS), "one token per pass": partial(continue_each, 0)}
    for reference, *times in compare(calls, seconds):
        mine, other = (N_PROMPTS * n / time for time in times)
        yield Measurement("decoding", "RUN, prompt-lookup decoding", mine, "tokens/s", reference, other)


def _decode(net: Transformer, prompts: Tensor, n: int, max_draft_tokens: int) -> None:
    for _ in islice(decode(net, prompts.tolist(), max_draft_tokens=max_draft_tokens), n):
        pass
