"""Chunked cross-entropy beside plain, and a step with activation checkpointing beside one without: time, memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from lm.benchmark.limits import precisions, spell
from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.memory import step_memory
from lm.benchmark.shapes import DEFAULT, Shape
from lm.config import ModelConfig
from lm.training.loss import HAS_CHUNKED, LOSSES

SHAPES = {f"vocabulary {size:,}": DEFAULT._replace(vocab_size=size) for size in (512, 1024, 2048, 8192)}
WIDE = Shape(ModelConfig(n_layers=1, d_model=512, n_heads=4, d_ff=1376), 50304, 8, 512)
DEEP = Shape(replace(DEFAULT.model, n_layers=16), 2048, 8, 256)
CHUNKED, CHECKPOINTING = "chunked cross-entropy", "activation checkpointing, 16 layers"


def loss(device: str, seconds: float) -> Iterator[Measurement]:
    if HAS_CHUNKED:
        for dtype, (name, shape) in product(precisions(device), SHAPES.items()):
            mixed, what = dtype == torch.bfloat16, f"step time, {CHUNKED}, {name}, {spell(dtype)}"
            times = alternate({kind: shape.step(device, kind, mixed=mixed) for kind in LOSSES}, seconds / 2)
            chunked, plain = paired(times["chunked"], times["plain"])
            yield Measurement("loss", what, 1000 * chunked, "ms", "plain", 1000 * plain)
        chunked, plain = (step_memory(WIDE, device, kind) / 1e6 for kind in ("chunked", "plain"))
        yield Measurement("loss", f"memory, {CHUNKED}, 4,096 x 50,304 logits", chunked, "MB", "plain", plain)
    times = alternate({"with": DEEP.step(device, checkpointing=True), "without": DEEP.step(device)}, seconds)
    ours, other = paired(times["with"], times["without"])
    yield Measurement("loss", f"step time, {CHECKPOINTING}", 1000 * ours, "ms", "without", 1000 * other)
    ours, other = (step_memory(DEEP, device, checkpointing=one) / 1e6 for one in (True, False))
    yield Measurement("loss", f"memory, {CHECKPOINTING}", ours, "MB", "without", other)
