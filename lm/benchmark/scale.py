"""How a training step grows along one axis at a time: time beside FLOPs, memory beside the bytes of its tensors.

`predicted from FLOPs` is the measured step time of the default shape times the ratio of the counted FLOPs. The corpus
is a sparse file, so a billion tokens take no disk space.
"""

import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.memory import expected, step_memory
from lm.benchmark.shapes import DEFAULT, Shape
from lm.data.batches import TrainingStream
from lm.model.size import flops_per_token

MODEL = DEFAULT.model
AXES: dict[str, dict[int, Shape]] = {
    "width": {
        n: DEFAULT._replace(model=replace(MODEL, d_model=n, n_heads=n // 64, d_ff=n * 5 // 2)) for n in (256, 512)
    },
    "depth": {n: DEFAULT._replace(model=replace(MODEL, n_layers=n)) for n in (8, 16)},
    "context": {n: DEFAULT._replace(time=n) for n in (256, 512, 1024)},
    "vocabulary": {n: DEFAULT._replace(vocab_size=n) for n in (8192, 32768)},
    "batch": {n: DEFAULT._replace(batch=n) for n in (16, 32)},
}
CORPORA = (10**6, 10**9)  # tokens


def scale(device: str, seconds: float) -> Iterator[Measurement]:
    for axis, shapes in AXES.items():
        for value, shape in shapes.items():
            times = alternate({"this": shape.step(device), "default": DEFAULT.step(device)}, seconds / 5, at_least=3)
            ours, default = paired(times["this"], times["default"])
            predicted, what = default * flops(shape) / flops(DEFAULT), f"{axis} {value:,}"
            yield Measurement(
                "scale", f"step time, {what}", 1000 * ours, "ms", "predicted from FLOPs", 1000 * predicted
            )
            held, counted = step_memory(shape, device) / 1e6, expected(shape, device) / 1e6
            yield Measurement("scale", f"memory, {what}", held, "MB", "counted tensors", counted)
    small, large = (corpus_memory(n) / 1e6 for n in CORPORA)
    yield Measurement("scale", f"memory, {CORPORA[1]:,} tokens of text", large, "MB", f"{CORPORA[0]:,} tokens", small)


def flops(shape: Shape) -> int:
    return flops_per_token(shape.build()) * shape.batch * shape.time


def corpus_memory(n_tokens: int) -> int:
    """Peak bytes, mapped pages of the file not included, while batches are read from a token file of this size."""
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
