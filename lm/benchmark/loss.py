"""The chunked loss beside the plain one, and recompute beside none: seconds and bytes of a training step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from lm.bare import bare_step
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.memory import of_a_step
from lm.benchmark.shapes import DEFAULT, Shape
from lm.config import HeadConfig, ModelConfig, OptimConfig
from lm.loss import CHUNKS, LOSSES
from lm.model.recompute import recompute
from lm.optim import build_optimizer

BODY = ModelConfig(n_layers=1)
SHAPES = {f"vocabulary {size:,}": Shape(BODY, size, 8, 128) for size in (256, 512, 1024, 2048, 8192, 32768)}
WIDE = Shape(ModelConfig(n_layers=1, d_model=512, n_heads=4, d_ff=1376), 50304, 8, 512)
DEEP = Shape(replace(DEFAULT.body, n_layers=16), 2048, 8, 256)


def loss(device: str, seconds: float) -> Iterator[Figure]:
    if CHUNKS:
        for name, shape in SHAPES.items():
            net, batches = shape.model(device), [shape.tokens(device)]
            optimizer = build_optimizer(net, OptimConfig(), HeadConfig())
            calls = {kind: partial(bare_step, partial(LOSSES[kind], net), optimizer, batches) for kind in LOSSES}
            times = alternate(calls, seconds / 2)
            chunked, plain = paired(times["chunked"], times["plain"])
            yield Figure("loss", f"step, chunked, {name}", 1000 * chunked, "ms", "plain", 1000 * plain)
        chunked, plain = (of_a_step(WIDE, device, kind) / 1e6 for kind in ("chunked", "plain"))
        yield Figure("loss", "chunked, 4,096 tokens x 50,304", chunked, "MB", "plain", plain)
    nets = {"recompute": DEEP.model(device), "none": DEEP.model(device)}
    recompute(nets["recompute"])
    calls = {
        name: partial(
            bare_step, partial(LOSSES["plain"], net), build_optimizer(net, OptimConfig(), HeadConfig()), [DEEP.tokens()]
        )
        for name, net in nets.items()
    }
    times = alternate(calls, seconds)
    ours, other = paired(times["recompute"], times["none"])
    yield Figure("loss", "step, recompute, 16 layers", 1000 * ours, "ms", "without", 1000 * other)
    ours, other = (of_a_step(DEEP, device, lean=lean) / 1e6 for lean in (True, False))
    yield Figure("loss", "recompute, 16 layers", ours, "MB", "without", other)
