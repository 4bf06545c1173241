"""A training step with the mask between documents beside one without, at three lengths of the context."""

from collections.abc import Iterator

from lm.benchmark.measure import Measurement, alternate, paired
from lm.benchmark.shapes import DEFAULT

SHAPES = {f"context {time:,}": DEFAULT._replace(batch=1024 // time, time=time) for time in (128, 512, 1024)}


def documents(device: str, seconds: float) -> Iterator[Measurement]:
    """Of equally many tokens. How many documents they are does not matter: the kernel computes all scores."""
    for name, shape in SHAPES.items():
        calls = {"with": shape.step(device, document_mask=True), "without": shape.step(device)}
        times = alternate(calls, seconds)
        ours, other = paired(times["with"], times["without"])
        yield Measurement("documents", f"step time, document mask, {name}", 1000 * ours, "ms", "causal", 1000 * other)
