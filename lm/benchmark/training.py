"""A training step beside the same step of transformers, and beside the machine's matrix rate."""

from collections.abc import Iterator
from statistics import median

import torch

from lm.benchmark.limits import matrix_rate, precisions, spell
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import step_in_transformers
from lm.benchmark.shapes import DEFAULT, GPT2, SHAKESPEARE
from lm.model.size import flops_per_token


def training(device: str, seconds: float) -> Iterator[Figure]:
    """On a GPU compiled, beside transformers as it comes; on a CPU neither is. Both in the same precision."""
    shapes = {"default": DEFAULT, "tiny Shakespeare": SHAKESPEARE} | ({"GPT-2 124M": GPT2} if device == "cuda" else {})
    for name, shape in shapes.items():
        for dtype in precisions(device):
            mixed, what = dtype == torch.bfloat16, f"{name}, {spell(dtype)}"
            net = shape.model(device)
            calls = {"ours": shape.step(device, compiled=device == "cuda", mixed=mixed)}
            if (theirs := step_in_transformers(net, shape.tokens(device), mixed)) is not None:
                calls["transformers"] = theirs
            times = alternate(calls, seconds)
            if theirs is not None:
                ours, other = paired(times["ours"], times["transformers"])
                yield Figure("training", f"step, {what}", 1000 * ours, "ms", "transformers", 1000 * other)
            rate = flops_per_token(net) * shape.batch * shape.time / median(times["ours"])
            limit = matrix_rate(device, dtype)
            yield Figure("training", f"rate, {what}", rate / 1e9, "GFLOP/s", "matrix rate", limit / 1e9)
