"""How a training step grows: its time beside its FLOPs, its memory beside its bytes, along one axis at a time.

A step of the default model is the unit: `by FLOPs` is its measured time multiplied by the counted FLOPs. The corpus
is a sparse file, so that a billion tokens cost no disk.
"""

import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.memory import expected, of_a_step
from lm.benchmark.shapes import DEFAULT, Shape
from lm.data.batches import TrainingStream
from lm.model.size import flops_per_token

BODY = DEFAULT.body
AXES: dict[str, dict[int, Shape]] = {
    "width": {n: DEFAULT._replace(body=replace(BODY, d_model=n, n_heads=n // 64, d_ff=n * 5 // 2)) for n in (256, 512)},
    "depth": {n: DEFAULT._replace(body=replace(BODY, n_layers=n)) for n in (8, 16)},
    "context": {n: DEFAULT._replace(time=n) for n in (256, 512, 1024)},
    "vocabulary": {n: DEFAULT._replace(vocab_size=n) for n in (8192, 32768)},
    "batch": {n: DEFAULT._replace(batch=n) for n in (16, 32)},
}
CORPORA = (10**6, 10**9)  # tokens


def scale(device: str, seconds: float) -> Iterator[Figure]:
    for axis, shapes in AXES.items():
        for value, shape in shapes.items():
            times = alternate({"this": shape.step(device), "default": DEFAULT.step(device)}, seconds / 5, at_least=3)
            ours, unit = paired(times["this"], times["default"])
            by_flops = unit * flops(shape) / flops(DEFAULT)
            yield Figure("scale", f"{axis} {value:,}", 1000 * ours, "ms", "by FLOPs", 1000 * by_flops)
            held, counted = of_a_step(shape, device) / 1e6, expected(shape, device) / 1e6
            yield Figure("scale", f"{axis} {value:,}", held, "MB", "by bytes", counted)
    small, large = (corpus(n) / 1e6 for n in CORPORA)
    yield Figure("scale", f"corpus {CORPORA[1]:,}", large, "MB", f"{CORPORA[0]:,}", small)


def flops(shape: Shape) -> int:
    return flops_per_token(shape.model()) * shape.batch * shape.time


def corpus(n_tokens: int) -> int:
    """Bytes that a process holds at most, beside pages of the file, while it reads from a token file of this size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        with open(path, "wb") as file:
            file.truncate(2 * n_tokens)
        tokens = np.memmap(path, np.uint16, "r")
        tracemalloc.start()
        stream = TrainingStream(tokens, seq_len=DEFAULT.time, batch_size=DEFAULT.batch, seed=0)
        for k in range(100):
            stream.batch(k)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return held
