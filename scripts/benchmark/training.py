"""A training step beside the same step of transformers, beside nanoGPT's, and beside the GEMM throughput."""

from collections.abc import Iterator
from itertools import product
from statistics import median

import torch

from lm.model.size import flops_per_token

from .limits import NAMES, gemm_throughput, precisions
from .measure import Measurement, alternate, beside, compare
from .models import DEFAULT, GPT2, NANOGPT, SHAKESPEARE, NanoGPT, step, step_in_nanogpt, step_in_transformers


def training(device: str, seconds: float, nanogpt: NanoGPT | None = None) -> Iterator[Measurement]:
    """On a GPU our step and nanoGPT's are compiled and that of transformers is not; on a CPU none is."""
    shapes = {"default": DEFAULT, "tiny Shakespeare": SHAKESPEARE} | ({"GPT-2 124M": GPT2} if device == "cuda" else {})
    for (name, shape), dtype in product(shapes.items(), precisions(device)):
        mixed, what = dtype == torch.bfloat16, f"{name}, {NAMES[dtype]}"
        calls = {"lm": step(shape, device, mixed)}
        if (other := step_in_transformers(shape, device, mixed)) is not None:
            calls["transformers"] = other
        times = alternate(calls, seconds)
        for reference, value, limit in beside(times):
            yield Measurement("training", f"step time, {what}", 1000 * value, "ms", reference, 1000 * limit)
        flops = flops_per_token(shape.build(device)) * shape.batch_size * shape.seq_len
        throughput, peak = flops / median(times["lm"]), gemm_throughput(device, dtype)
        yield Measurement("training", f"throughput, {what}", throughput / 1e9, "GFLOP/s", "GEMM throughput", peak / 1e9)
    if nanogpt is None:
        return
    for (name, shape), dtype in product(NANOGPT["cuda" if device == "cuda" else "cpu"].items(), precisions(device)):
        mixed, what = dtype == torch.bfloat16, f"GPT-2 as {name}, {NAMES[dtype]}"
        calls = {"lm": step(shape, device, mixed), "nanoGPT": step_in_nanogpt(nanogpt, shape, device, mixed)}
        for reference, value, limit in compare(calls, seconds):
            yield Measurement("training", f"step time, {what}", 1000 * value, "ms", reference, 1000 * limit)
