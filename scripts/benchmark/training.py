"""A training step beside transformers or nanoGPT, and beside the speed of a GEMM."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from lm.model.kernels import attention
from lm.model.size import flops_per_token

from .measure import NAMES, Gemm, Measurement, compare, precisions
from .models import DEFAULT, GPT2, NANOGPT, NanoGPT, step, step_in_nanogpt, step_in_transformers

SUFFIX = ("", ", compiled")


def training(device: str, seconds: float, nanogpt: NanoGPT | None = None) -> Iterator[Measurement]:
    """Steps that are eager, then compiled: beside the limit of the machine, each other, and other programs.

    The others are transformers, or where there is a clone nanoGPT for the shapes that it has. On a GPU with the memory
    that a step takes besides weights and moments.
    """
    shapes = {"GPT-2 124M": GPT2} if device == "cuda" else {}
    shapes |= {"nanoGPT's shape": NANOGPT[device == "cuda"]} if nanogpt else {}
    shapes |= {"default": DEFAULT}
    for (name, shape), dtype, compiled in product(shapes.items(), precisions(device), (False, True)):
        mixed, gemm, what = dtype == torch.bfloat16, Gemm(device, dtype), f"{name}, {NAMES[dtype]}{SUFFIX[compiled]}"
        calls: dict[str, Callable[[], object]] = {"lm": step(shape, device, mixed, compiled), "GEMM": gemm}
        if compiled:
            calls["lm, eager"] = step(shape, device, mixed)
        if nanogpt and shape is not DEFAULT:
            calls[f"nanoGPT{SUFFIX[compiled]}"] = step_in_nanogpt(nanogpt, shape, device, mixed, compiled)
        elif (other := step_in_transformers(shape, device, mixed, compiled)) is not None:
            calls[f"transformers{SUFFIX[compiled]}"] = other
        flops = flops_per_token(shape.build(device)) * shape.batch_size * shape.seq_len / 1e9
        for reference, mine, time in compare(calls, seconds):
            if reference == "GEMM":
                speeds = flops / mine, gemm.flops / 1e9 / time
                yield Measurement("training", f"throughput, {what}", speeds[0], "GFLOP/s", reference, speeds[1])
                continue
            yield Measurement("training", f"step time, {what}", 1000 * mine, "ms", reference, 1000 * time)
            if device == "cuda":
                memory = _memory(calls["lm"]), _memory(calls[reference])
                yield Measurement("training", f"memory, {what}", memory[0], "MB", reference, memory[1])
    if device == "cpu":
        yield from dropout(seconds)


def dropout(seconds: float) -> Iterator[Measurement]:
    """Attention with dropout of its weights, forward and backward, in the shape of experiment=chars_100k."""
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "lm": partial(attention, mask=None, dropout=0.2),
        "torch": partial(F.scaled_dot_product_attention, is_causal=True, dropout_p=0.2),
    }
    for dtype in precisions("cpu"):
        inputs = [torch.randn(4, 4, 256, 32, dtype=dtype, requires_grad=True) for _ in range(3)]  # (B, H, T, K)
        calls = {name: partial(_gradients, function, inputs) for name, function in functions.items()}
        for reference, mine, time in compare(calls, seconds):
            what = f"attention with dropout, {NAMES[dtype]}"
            yield Measurement("training", what, 1000 * mine, "ms", reference, 1000 * time)


def _gradients(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> object:
    return torch.autograd.grad(function(*inputs).sum(), inputs)


def _memory(call: Callable[[], object]) -> float:
    """Peak MB on the GPU that a call takes besides what is there before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e6
