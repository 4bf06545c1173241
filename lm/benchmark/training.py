"""A training step beside the same step of transformers, with and without a mask, and beside the GEMM throughput."""

from collections.abc import Iterator
from statistics import median

import torch

from lm.benchmark.limits import gemm_throughput, precisions, spell
from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.reference import step_in_transformers
from lm.benchmark.shapes import DEFAULT, GPT2, SHAKESPEARE
from lm.model.size import flops_per_token


def training(device: str, seconds: float) -> Iterator[Measurement]:
    """On a GPU ours is compiled and transformers is not; on a CPU neither is. Both in the same precision."""
    shapes = {"default": DEFAULT, "tiny Shakespeare": SHAKESPEARE} | ({"GPT-2 124M": GPT2} if device == "cuda" else {})
    for name, shape in shapes.items():
        for dtype in precisions(device):
            mixed, what = dtype == torch.bfloat16, f"{name}, {spell(dtype)}"
            net = shape.build(device)
            calls = {"ours": shape.step(device, compiled=device == "cuda", mixed=mixed)}
            if (theirs := step_in_transformers(net, shape.tokens(device), mixed)) is not None:
                calls["transformers"] = theirs
            times = alternate(calls, seconds)
            if theirs is not None:
                ours, other = paired(times["ours"], times["transformers"])
                yield Measurement("training", f"step time, {what}", 1000 * ours, "ms", "transformers", 1000 * other)
            flops = flops_per_token(net) * shape.batch * shape.time / median(times["ours"])
            limit = gemm_throughput(device, dtype)
            yield Measurement("training", f"throughput, {what}", flops / 1e9, "GFLOP/s", "GEMM throughput", limit / 1e9)


def documents(device: str, seconds: float) -> Iterator[Measurement]:
    """With the mask between documents and without, of equally many tokens. How many documents they are does not matter:
    the kernel computes all scores."""
    for time in (128, 512, 1024):
        shape = DEFAULT._replace(batch=1024 // time, time=time)
        times = alternate({"with": shape.step(device, document_mask=True), "without": shape.step(device)}, seconds)
        ours, other = (1000 * one for one in paired(times["with"], times["without"]))
        yield Measurement("documents", f"step time, document mask, context {time:,}", ours, "ms", "causal", other)
