"""A training step beside the same step of transformers, and beside the machine's matrix rate."""

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from torch.optim import AdamW

from lm.bare import bare_step
from lm.benchmark.limits import matrix_rate
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import GPT2, in_transformers, loss_of
from lm.config import HeadConfig, ModelConfig, OptimConfig
from lm.loss import build_loss
from lm.model.size import flops_per_token
from lm.model.transformer import Transformer
from lm.optim import build_optimizer

SHAPES = {  # name -> (body, vocabulary, batch, time)
    "default": (ModelConfig(), 2048, 8, 128),
    "tiny Shakespeare": (ModelConfig(n_heads=4, d_ff=344), 65, 12, 64),
}
LARGE = {"GPT-2 124M": (GPT2, 50304, 16, 1024)}


def training(device: str, seconds: float) -> Iterator[Figure]:
    gpu, head, optim = device == "cuda", HeadConfig(), OptimConfig()
    for name, (config, vocab_size, batch, time) in (SHAPES | (LARGE if gpu else {})).items():
        net = Transformer(config, head, vocab_size=vocab_size, seq_len=time).to(device)
        theirs = in_transformers(net)
        tokens = torch.randint(vocab_size, (batch, time + 1), device=device)
        batches = [(tokens[:, :-1], tokens[:, 1:])]
        flops = flops_per_token(net) * batch * time
        loss = partial(build_loss("auto", vocab_size, device, gpu), net)
        optimizer = build_optimizer(net, optim, head)
        calls = {"ours": partial(bare_step, loss, optimizer, batches, gpu)}
        if theirs is not None:
            adamw = AdamW(theirs.train().parameters(), lr=optim.lr, betas=(0.9, 0.95), fused=True)
            calls["transformers"] = partial(bare_step, loss_of(theirs), adamw, batches, gpu)
        times = alternate(calls, seconds)
        if theirs is not None:
            ours, other = paired(times["ours"], times["transformers"])
            yield Figure("training", f"step, {name}", 1000 * ours, "ms", "transformers", 1000 * other)
        rate = flops / median(times["ours"])
        yield Figure("training", f"rate, {name}", rate / 1e9, "GFLOP/s", "matrix rate", matrix_rate(device) / 1e9)
