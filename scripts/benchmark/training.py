"""A training step beside transformers, nanoGPT and the speed of a GEMM."""

from collections.abc import Callable, Iterator
from itertools import product

import torch

from lm.model.size import flops_per_token

from .measure import NAMES, Gemm, Measurement, compare, precisions
from .models import DEFAULT, GPT2, NANOGPT, NanoGPT, step, step_in_nanogpt, step_in_transformers


def training(device: str, seconds: float, nanogpt: NanoGPT | None = None) -> Iterator[Measurement]:
    """On a GPU our step and nanoGPT's are compiled and that of transformers is not; on a CPU none is."""
    shapes = {"default": DEFAULT} | ({"GPT-2 124M": GPT2} if device == "cuda" else {})
    for (name, shape), dtype in product(shapes.items(), precisions(device)):
        mixed, gemm, what = dtype == torch.bfloat16, Gemm(device, dtype), f"{name}, {NAMES[dtype]}"
        calls: dict[str, Callable[[], object]] = {"lm": step(shape, device, mixed), "GEMM": gemm}
        if (other := step_in_transformers(shape, device, mixed)) is not None:
            calls["transformers"] = other
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
    for dtype in precisions(device):
        mixed, what = dtype == torch.bfloat16, f"step time, nanoGPT's shape, {NAMES[dtype]}"
        calls = {"lm": step(shape, device, mixed), "nanoGPT": step_in_nanogpt(nanogpt, shape, device, mixed)}
        for reference, mine, time in compare(calls, seconds):
            yield Measurement("training", what, 1000 * mine, "ms", reference, 1000 * time)
