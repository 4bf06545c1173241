"""Greedy decoding beside transformers.generate on the same weights, and beside the memory bandwidth."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.benchmark.limits import MemoryRead
from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.reference import in_transformers
from lm.benchmark.shapes import DEFAULT, GPT2
from lm.config import UserError
from lm.exchange.portable import load_model
from lm.inference.decode import decode
from lm.inference.prompt_lookup import MAX_DRAFT_TOKENS
from lm.inference.text import own_validation
from lm.model.transformer import Transformer

LARGE = "GPT-2 124M, 1 prompt"  # its weights are read from memory for each token
CASES = {  # name -> shape, prompts, new tokens
    "default, 1 prompt": (DEFAULT, 1, 96),
    "default, 32 prompts": (DEFAULT, 32, 96),
    LARGE: (GPT2, 1, 24),
    "GPT-2 124M, 8 prompts": (GPT2, 8, 24),
}
N_PROMPTS = 8  # from a run's validation text


def ours(net: Transformer, prompts: list[list[int]], n: int, max_draft_tokens: int = MAX_DRAFT_TOKENS) -> None:
    for _ in islice(decode(net, prompts, max_draft_tokens=max_draft_tokens), n):
        pass


def theirs(model: Any, prompts: Tensor, n: int, **options: int) -> None:
    greedy = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False}
    model.generate(prompts, attention_mask=torch.ones_like(prompts), **greedy, **options)


class RunPrompts(NamedTuple):
    """A run's model, and prompts (N_PROMPTS, T) from its validation text, each a quarter of the context."""

    name: str
    net: Transformer
    prompts: Tensor


def run_prompts(run_dir: str) -> RunPrompts:
    """Raises UserError if the run or its validation text cannot be read."""
    path = Path(run_dir).expanduser().resolve()
    try:
        (net, _), (text, *_) = load_model(path), own_validation(path, trust=False)
    except UserError as error:
        raise UserError(f"run_dir={run_dir}: its validation text cannot be read; evaluate.py says: {error}") from error
    shown = max(1, min(net.seq_len // 4, len(text)))
    starts = [(len(text) - shown) * place // N_PROMPTS for place in range(N_PROMPTS)]
    return RunPrompts(path.name, net, torch.tensor([text[start : start + shown].tolist() for start in starts]))


def decoding(device: str, seconds: float, run: RunPrompts | None = None) -> Iterator[Measurement]:
    """Random weights repeat themselves, so prompt-lookup decoding is measured on the weights of a run alone."""
    for name, (shape, rows, n) in CASES.items():
        net = shape.build(device).eval()
        prompts = torch.randint(shape.vocab_size, (rows, 8), device=device)
        calls: dict[str, Callable[[], object]] = {"ours": partial(ours, net, prompts.tolist(), n, max_draft_tokens=0)}
        if (model := in_transformers(net)) is not None:
            calls["transformers"] = partial(theirs, model, prompts, n)
        if name == LARGE:
            calls["memory bandwidth"] = read = MemoryRead(device)
        times = alternate(calls, seconds)
        for reference in list(calls)[1:]:
            one, other = paired(times["ours"], times[reference])
            if reference == "memory bandwidth":  # the least time for a token: to read each weight
                other *= n * sum(parameter.nbytes for parameter in net.parameters()) / read.weights.nbytes
            yield Measurement("decoding", name, rows * n / one, "tokens/s", reference, rows * n / other)
    if run is not None:
        yield from prompt_lookup(run, device, seconds)


def prompt_lookup(run: RunPrompts, device: str, seconds: float) -> Iterator[Measurement]:
    """The rest of the context after each prompt, beside one token per pass, and beside transformers in both ways."""
    net, prompts = run.net.to(device), run.prompts.to(device)
    n = max(1, net.seq_len - prompts.shape[1])

    def at_each(call: Callable[[Tensor], object]) -> Callable[[], object]:
        return lambda: [call(prompt) for prompt in prompts[:, None]]

    calls = {
        "ours": at_each(lambda prompt: ours(net, prompt.tolist(), n)),
        "one token per pass": at_each(lambda prompt: ours(net, prompt.tolist(), n, max_draft_tokens=0)),
    }
    if (model := in_transformers(net)) is not None:
        calls["transformers"] = at_each(lambda prompt: theirs(model, prompt, n))
        calls["transformers, prompt lookup"] = at_each(
            lambda prompt: theirs(model, prompt, n, prompt_lookup_num_tokens=10)
        )
    times = alternate(calls, seconds)
    for reference in list(calls)[1:]:
        one, other = (N_PROMPTS * n / found for found in paired(times["ours"], times[reference]))
        yield Measurement("decoding", f"{run.name}, prompt-lookup decoding", one, "tokens/s", reference, other)
