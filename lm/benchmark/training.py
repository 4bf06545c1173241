"""A training step beside the same step of transformers, and what the Trainer adds to a bare loop."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

from lm.benchmark.limits import matrix_rate
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import in_transformers
from lm.config import HeadConfig, ModelConfig, OptimConfig
from lm.model.size import flops_per_token
from lm.model.transformer import Transformer
from lm.optim import build_optimizer

SHAPES = {  # name -> (body, vocabulary, batch, time)
    "default": (ModelConfig(qk_norm=False), 2048, 8, 128),
    "tiny Shakespeare": (ModelConfig(n_heads=4, d_ff=344), 65, 12, 64),
}
LARGE = {
    "GPT-2 124M": (
        ModelConfig(n_layers=12, d_model=768, n_heads=12, d_ff=3072, ffn="gelu", norm="layernorm", position="learned"),
        *(50304, 16, 1024),
    )
}


def stepper(net: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, mixed: bool) -> Callable[[], None]:
    """Forward, backward, clip, update; on the next-token loss of fixed tokens (B, T)."""

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            out: Any = net(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(device: str, seconds: float) -> Iterator[Figure]:
    gpu = device == "cuda"
    limit = matrix_rate(device)
    for name, (config, vocab_size, batch, time) in (SHAPES | (LARGE if gpu else {})).items():
        net = Transformer(config, HeadConfig(), vocab_size=vocab_size, seq_len=time).to(device)
        theirs = in_transformers(net)
        tokens = torch.randint(vocab_size, (batch, time), device=device)
        flops = flops_per_token(net) * tokens.numel()
        if gpu:
            net.compile()
        calls = {"ours": stepper(net, build_optimizer(net, OptimConfig(), HeadConfig()), tokens, gpu)}
        if theirs is not None:
            theirs.train()
            optimizer = AdamW(theirs.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
            calls["transformers"] = stepper(theirs, optimizer, tokens, gpu)
        times = alternate(calls, seconds)
        ours, _ = paired(times, "ours", "ours")
        if theirs is not None:
            ours, other = paired(times, "ours", "transformers")
            yield Figure("training", f"step, {name}", 1000 * ours, "ms", "transformers", 1000 * other)
        yield Figure("training", f"rate, {name}", flops / ours / 1e9, "GFLOP/s", "matrix rate", limit / 1e9)
