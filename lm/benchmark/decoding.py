"""Greedy decoding beside transformers.generate on the same weights, and beside the memory's bandwidth."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.benchmark.limits import Reading
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import in_transformers
from lm.benchmark.shapes import DEFAULT, GPT2
from lm.config import BadInput
from lm.exchange.portable import load_model
from lm.inference.decode import decode
from lm.inference.evaluate import own_validation
from lm.model.transformer import Transformer

CASES = {  # what -> shape, prompts, tokens to write
    "default": (DEFAULT, 1, 96),
    "default, 32 prompts": (DEFAULT, 32, 96),
    "GPT-2 124M": (GPT2, 1, 24),
    "GPT-2 124M, 8 prompts": (GPT2, 8, 24),
}
PLACES = 8  # in a run's validation text


def write(net: Transformer, prompts: list[list[int]], n: int, **options: int) -> None:
    for _ in islice(decode(net, prompts, **options), n):
        pass


def writes_alike(theirs: Any, prompts: Tensor, n: int, **options: int) -> Callable[[], object]:
    greedy = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False}
    return partial(theirs.generate, prompts, attention_mask=torch.ones_like(prompts), **greedy, **options)


class OwnText(NamedTuple):
    """A run's model, and ids (PLACES, T) from its validation text: a quarter of a context each."""

    name: str
    net: Transformer
    prompts: Tensor


def own_text(run_dir: str) -> OwnText:
    """Raises BadInput where the run or its text cannot be read."""
    path = Path(run_dir).expanduser().resolve()
    try:
        (net, _), (text, *_) = load_model(path), own_validation(path, trust=False)
    except BadInput as error:
        raise BadInput(
            f"run_dir={run_dir}: cannot be continued where its text was; evaluate.py says: {error}"
        ) from error
    shown = max(1, min(net.seq_len // 4, len(text)))
    starts = [(len(text) - shown) * place // PLACES for place in range(PLACES)]
    return OwnText(path.name, net, torch.tensor([text[start : start + shown].tolist() for start in starts]))


def decoding(device: str, seconds: float, own: OwnText | None = None) -> Iterator[Figure]:
    """Weights without training say nothing that could be guessed, or the same for ever: they are read without."""
    for name, (shape, rows, n) in CASES.items():
        net = shape.model(device).eval()
        theirs = in_transformers(net)
        prompts = torch.randint(shape.vocab_size, (rows, 8), device=device)
        calls: dict[str, Callable[[], object]] = {"ours": partial(write, net, prompts.tolist(), n, guesses=0)}
        if theirs is not None:
            calls["transformers"] = writes_alike(theirs, prompts, n)
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
    if own is not None:
        yield from reading_ahead(own, device, seconds)


def reading_ahead(own: OwnText, device: str, seconds: float) -> Iterator[Figure]:
    """The rest of a context after each prompt, beside no guesses, and beside transformers without and with some."""
    net, prompts = own.net.to(device), own.prompts.to(device)
    n = max(1, net.seq_len - prompts.shape[1])

    def at_each(call: Callable[[Tensor], object]) -> Callable[[], object]:
        return lambda: [call(prompt) for prompt in prompts[:, None]]

    calls = {
        "ours": at_each(lambda prompt: write(net, prompt.tolist(), n)),
        "a token a pass": at_each(lambda prompt: write(net, prompt.tolist(), n, guesses=0)),
    }
    if (theirs := in_transformers(net)) is not None:
        calls["transformers"] = at_each(lambda prompt: writes_alike(theirs, prompt, n)())
        calls["transformers, ahead"] = at_each(
            lambda prompt: writes_alike(theirs, prompt, n, prompt_lookup_num_tokens=10)()
        )
    times = alternate(calls, seconds)
    for peer in list(calls)[1:]:
        ours, other = (PLACES * n / found for found in paired(times["ours"], times[peer]))
        yield Figure("decoding", f"{own.name}, reading ahead", ours, "tokens/s", peer, other)
