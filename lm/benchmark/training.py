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
from lm.config import HeadConfig, OptimConfig
from lm.loss import build_loss
from lm.model.size import flops_per_token
from lm.optim import build_optimizer


def training(device: str, seconds: float) -> Iterator[Figure]:
    gpu, head, optim = device == "cuda", HeadConfig(), OptimConfig()
    shapes = {"default": DEFAULT, "tiny Shakespeare": SHAKESPEARE} | ({"GPT-2 124M": GPT2} if gpu else {})
    for name, shape in shapes.items():
        net, batches = shape.model(device), [shape.tokens(device)]
        theirs = in_transformers(net)
        flops = flops_per_token(net) * shape.batch * shape.time
        loss = partial(build_loss("auto", shape.vocab_size, device, gpu), net)
        calls = {"ours": partial(bare_step, loss, build_optimizer(net, optim, head), batches, gpu)}
        if theirs is not None:
            adamw = AdamW(theirs.train().parameters(), lr=optim.lr, betas=(0.9, 0.95), fused=True)
            calls["transformers"] = partial(bare_step, loss_of(theirs), adamw, batches, gpu)
        times = alternate(calls, seconds)
        if theirs is not None:
            ours, other = paired(times["ours"], times["transformers"])
            yield Figure("training", f"step, {name}", 1000 * ours, "ms", "transformers", 1000 * other)
        rate = flops / median(times["ours"])
        yield Figure("training", f"rate, {name}", rate / 1e9, "GFLOP/s", "matrix rate", matrix_rate(device) / 1e9)
