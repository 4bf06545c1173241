"""A training step beside nanoGPT's, of the same shape and in the same precision: from a clone of it."""

import importlib.util
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.benchmark.limits import precisions, spell
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.shapes import DEFAULT, GPT2, Shape
from lm.config import BadInput
from lm.training.step import train_step

Theirs = tuple[Any, Any]  # the classes of its model and of that one's configuration


def like_gpt2(n_layers: int, width: int, n_heads: int, vocab_size: int, batch: int, time: int) -> Shape:
    body = replace(GPT2.body, n_layers=n_layers, d_model=width, n_heads=n_heads, d_ff=4 * width)
    return Shape(body, vocab_size, batch, time)


SHAPES = {  # device -> what -> shape
    "cpu": {"its CPU shape": like_gpt2(4, 128, 4, 65, 12, 64), "default": like_gpt2(4, 128, 2, *DEFAULT[1:])},
    "cuda": {"its baby GPT": like_gpt2(6, 384, 6, 65, 64, 256), "GPT-2 124M": GPT2},
}


def nanogpt(device: str, seconds: float, theirs: Theirs | None = None) -> Iterator[Figure]:
    """On a GPU both are compiled, on a CPU neither is. Nothing without a clone."""
    if theirs is None:
        return
    for name, shape in SHAPES["cuda" if device == "cuda" else "cpu"].items():
        for dtype in precisions(device):
            mixed, compiled = dtype == torch.bfloat16, device == "cuda"
            calls = {
                "ours": shape.step(device, compiled=compiled, mixed=mixed),
                "nanoGPT": their_step(theirs, shape, device, compiled, mixed),
            }
            times = alternate(calls, seconds)
            ours, other = (1000 * one for one in paired(times["ours"], times["nanoGPT"]))
            yield Figure("nanogpt", f"step, {name}, {spell(dtype)}", ours, "ms", "nanoGPT", other)


def their_model(clone: str) -> Theirs:
    """What a clone holds. Raises BadInput where it is none."""
    path = Path(clone).expanduser() / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.GPT, module.GPTConfig
    except Exception as error:  # whatever another file of that name does
        raise BadInput(f"nanogpt={clone}: expected a clone of nanoGPT ({type(error).__name__}: {error})") from error


def their_step(theirs: Theirs, shape: Shape, device: str, compiled: bool, mixed: bool) -> partial[None]:
    """To be called: the training step of its train.py, with its optimizer."""
    (model, config), body, (tokens, targets) = theirs, shape.body, shape.tokens(device)
    sizes = {"n_layer": body.n_layers, "n_embd": body.d_model, "n_head": body.n_heads}
    with redirect_stdout(io.StringIO()):  # it tells its size
        net = model(config(block_size=shape.time, vocab_size=shape.vocab_size, bias=body.bias, **sizes)).to(device)
        optimizer = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device)
    call = torch.compile(net) if compiled else net

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = call(tokens, targets)[1]
        return found

    return partial(train_step, loss, optimizer, [(tokens.contiguous(), targets.contiguous())], mixed)
