"""A training step beside transformers, nanoGPT and the speed of a GEMM."""

from collections.abc import Callable, Iterator
from itertools import product

import torch

from lm.model.size import flops_per_token

from .measure import NAMES, Gemm, Measurement, compare, precisions
from .models import DEFAULT, GPT2, NANOGPT, NanoGPT, step, step_in_nanogpt, step_in_transformers

SUFFIX = ("", ", compiled")


def training(device: str, seconds: float, nanogpt: NanoGPT | None = None) -> Iterator[Measurement]:
    """Steps that are eager, then compiled: beside the limit of the machine, each other, and those of others."""
    shapes = {"default": DEFAULT} | ({"GPT-2 124M": GPT2} if device == "cuda" else {})
    for (name, shape), dtype, compiled in product(shapes.items(), precisions(device), (False, True)):
        mixed, gemm, what = dtype == torch.bfloat16, Gemm(device, dtype), f"{name}, {NAMES[dtype]}{SUFFIX[compiled]}"
        calls: dict[str, Callable[[], object]] = {"lm": step(shape, device, mixed, compiled), "GEMM": gemm}
        if compiled:
            calls["lm, eager"] = step(shape, device, mixed)
        if (other := step_in_transformers(shape, device, mixed, compiled)) is not None:
            calls[f"transformers{SUFFIX[compiled]}"] = other
        flops = flops_per_token(shape.build(device)) * shape.batch_size * shape.seq_len / 1e9
        for reference, mine, time in compare(calls, seconds):
            if reference == "GEMM":
                speeds = flops / mine, gemm.flops / 1e9 / time
                yield Measurement("training", f"throughput, {what}", speeds[0], "GFLOP/s", reference, speeds[1])
            else:
                yield Measurement("training", f"step time, {what}", 1000 * mine, "ms", reference, 1000 * time)
    if nanogpt is None:
        return
    shape = NANOGPT[device == "cuda"]
    for dtype, compiled in product(precisions(device), (False, True)):
        mixed, what = dtype == torch.bfloat16, f"step time, nanoGPT's shape, {NAMES[dtype]}{SUFFIX[compiled]}"
        theirs = step_in_nanogpt(nanogpt, shape, device, mixed, compiled)
        calls = {"lm": step(shape, device, mixed, compiled), f"nanoGPT{SUFFIX[compiled]}": theirs}
        for reference, mine, time in compare(calls, seconds):
            yield Measurement("training", what, 1000 * mine, "ms", reference, 1000 * time)
