"""The chunked loss beside the plain one, and recompute beside none: seconds and bytes of a training step."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from lm.benchmark.limits import precisions, spell
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.memory import of_a_step
from lm.benchmark.shapes import DEFAULT, Shape
from lm.config import ModelConfig
from lm.training.loss import CHUNKS, LOSSES

SHAPES = {f"vocabulary {size:,}": DEFAULT._replace(vocab_size=size) for size in (512, 1024, 2048, 8192)}
WIDE = Shape(ModelConfig(n_layers=1, d_model=512, n_heads=4, d_ff=1376), 50304, 8, 512)
DEEP = Shape(replace(DEFAULT.body, n_layers=16), 2048, 8, 256)


def loss(device: str, seconds: float) -> Iterator[Figure]:
    if CHUNKS:
        for dtype, (name, shape) in product(precisions(device), SHAPES.items()):
            mixed = dtype == torch.bfloat16
            times = alternate({kind: shape.step(device, kind, mixed=mixed) for kind in LOSSES}, seconds / 2)
            chunked, plain = paired(times["chunked"], times["plain"])
            yield Figure("loss", f"step, chunked, {name}, {spell(dtype)}", 1000 * chunked, "ms", "plain", 1000 * plain)
        chunked, plain = (of_a_step(WIDE, device, kind) / 1e6 for kind in ("chunked", "plain"))
        yield Figure("loss", "chunked, 4,096 tokens x 50,304", chunked, "MB", "plain", plain)
    times = alternate({"lean": DEEP.step(device, lean=True), "whole": DEEP.step(device)}, seconds)
    lean, whole = paired(times["lean"], times["whole"])
    yield Figure("loss", "step, recompute, 16 layers", 1000 * lean, "ms", "without", 1000 * whole)
    lean, whole = (of_a_step(DEEP, device, lean=one) / 1e6 for one in (True, False))
    yield Figure("loss", "recompute, 16 layers", lean, "MB", "without", whole)
