"""A training step beside that of nanoGPT, from a clone of it: the same shape, the same precision."""

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

from lm.ablation.plan.timing import train_step
from lm.benchmark.limits import precisions, spell
from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.shapes import DEFAULT, GPT2, Shape
from lm.config import UserError

Theirs = tuple[Any, Any]  # nanoGPT's classes GPT and GPTConfig


def like_gpt2(n_layers: int, width: int, n_heads: int, vocab_size: int, batch: int, time: int) -> Shape:
    model = replace(GPT2.model, n_layers=n_layers, d_model=width, n_heads=n_heads, d_ff=4 * width)
    return Shape(model, vocab_size, batch, time)


SHAPES = {  # device -> name -> shape
    "cpu": {"nanoGPT on a CPU": like_gpt2(4, 128, 4, 65, 12, 64), "default": like_gpt2(4, 128, 2, *DEFAULT[1:])},
    "cuda": {"baby GPT": like_gpt2(6, 384, 6, 65, 64, 256), "GPT-2 124M": GPT2},
}


def nanogpt(device: str, seconds: float, theirs: Theirs | None = None) -> Iterator[Measurement]:
    """On a GPU both are compiled, on a CPU neither is. No rows without a clone."""
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
            yield Measurement("nanogpt", f"step time, {name}, {spell(dtype)}", ours, "ms", "nanoGPT", other)


def their_model(clone: str) -> Theirs:
    """The model classes of a clone. Raises UserError if the folder is no clone of nanoGPT."""
    path = Path(clone).expanduser() / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.GPT, module.GPTConfig
    except Exception as error:  # whatever another file of that name does
        raise UserError(f"nanogpt={clone}: expected a clone of nanoGPT ({type(error).__name__}: {error})") from error


def their_step(theirs: Theirs, shape: Shape, device: str, compiled: bool, mixed: bool) -> partial[None]:
    """A callable that makes the training step of nanoGPT's train.py, with its optimizer."""
    (gpt, config), model, (tokens, targets) = theirs, shape.model, shape.tokens(device)
    sizes = {"n_layer": model.n_layers, "n_embd": model.d_model, "n_head": model.n_heads}
    with redirect_stdout(io.StringIO()):  # it prints its number of parameters
        net = gpt(config(block_size=shape.time, vocab_size=shape.vocab_size, bias=model.bias, **sizes)).to(device)
        optimizer = net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device)
    call = torch.compile(net) if compiled else net

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = call(tokens, targets)[1]
        return found

    return partial(train_step, loss, optimizer, [(tokens.contiguous(), targets.contiguous())], mixed)
