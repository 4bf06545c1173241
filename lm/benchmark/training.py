"""A training step beside the same step of transformers, and beside the machine's matrix rate."""

from collections.abc import Iterator
from functools import partial
from statistics import median

from torch.optim import AdamW

from lm.bare import bare_step
from lm.benchmark.limits import matrix_rate
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import in_transformers, loss_of
from lm.benchmark.shapes import DEFAULT, GPT2, SHAKESPEARE
from lm.model.size import flops_per_token


def training(device: str, seconds: float) -> Iterator[Figure]:
    """On a GPU compiled and in bf16, beside transformers in bf16 as it comes; on a CPU neither is compiled."""
    gpu = device == "cuda"
    shapes = {"default": DEFAULT, "tiny Shakespeare": SHAKESPEARE} | ({"GPT-2 124M": GPT2} if gpu else {})
    for name, shape in shapes.items():
        net = shape.model(device)
        calls = {"ours": shape.step(device, compiled=gpu)}
        if (theirs := in_transformers(net)) is not None:
            adamw = AdamW(theirs.train().parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
            calls["transformers"] = partial(bare_step, loss_of(theirs), adamw, [shape.tokens(device)], gpu)
        times = alternate(calls, seconds)
        if theirs is not None:
            ours, other = paired(times["ours"], times["transformers"])
            yield Figure("training", f"step, {name}", 1000 * ours, "ms", "transformers", 1000 * other)
        rate = flops_per_token(net) * shape.batch * shape.time / median(times["ours"])
        yield Figure("training", f"rate, {name}", rate / 1e9, "GFLOP/s", "matrix rate", matrix_rate(device) / 1e9)
