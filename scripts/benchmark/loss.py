"""Chunked cross-entropy beside plain, and activation checkpointing beside none: step time and peak memory."""

import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from lm.config import ModelConfig
from lm.training.loss import HAS_CHUNKED

from .limits import NAMES, precisions
from .measure import Measurement, compare
from .models import DEFAULT, Shape, step

VOCABULARIES = (512, 1024, 2048, 8192)
TINY = Shape(ModelConfig(), 300, 1, 8)
WIDE = Shape(ModelConfig(n_layers=1, d_model=512, n_heads=4, d_ff=1376), 50304, 8, 512)
DEEP = Shape(replace(DEFAULT.model, n_layers=16), 2048, 8, 256)
CHUNKED, CHECKPOINTING = "chunked cross-entropy", "activation checkpointing, 16 layers"
STATUS = Path("/proc/self/status")


def loss_memory(device: str, seconds: float) -> Iterator[Measurement]:
    for size, dtype in product(VOCABULARIES if HAS_CHUNKED else (), precisions(device)):
        shape, mixed = DEFAULT._replace(vocab_size=size), dtype == torch.bfloat16
        calls = {loss: step(shape, device, mixed, loss=loss) for loss in ("chunked", "plain")}
        for reference, mine, other in compare(calls, seconds / 2):
            what = f"step time, {CHUNKED}, vocabulary {size:,}, {NAMES[dtype]}"
            yield Measurement("loss", what, 1000 * mine, "ms", reference, 1000 * other)
    if HAS_CHUNKED:
        chunked, plain = (step_memory(WIDE, device, loss=loss) / 1e6 for loss in ("chunked", "plain"))
        yield Measurement("loss", f"memory, {CHUNKED}, 4,096 x 50,304 logits", chunked, "MB", "plain", plain)
    calls = {"with": step(DEEP, device, checkpointing=True), "without": step(DEEP, device)}
    for reference, mine, other in compare(calls, seconds):
        yield Measurement("loss", f"step time, {CHECKPOINTING}", 1000 * mine, "ms", reference, 1000 * other)
    less, more = (step_memory(DEEP, device, checkpointing=checkpointing) / 1e6 for checkpointing in (True, False))
    yield Measurement("loss", f"memory, {CHECKPOINTING}", less, "MB", "without", more)


def step_memory(shape: Shape, device: str, loss: str = "auto", checkpointing: bool = False) -> int:
    """Peak bytes of two training steps, less what a process holds after two steps of a tiny model.

    Each is measured in a process of its own, because the peak of a process never falls.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (shape, device, loss, checkpointing))


def _peak(shape: Shape, device: str, loss: str, checkpointing: bool) -> int:
    _two_calls(step(TINY, device, checkpointing=checkpointing))
    before = _resident()
    _two_calls(step(shape, device, loss=loss, checkpointing=checkpointing))
    return torch.cuda.max_memory_allocated() if device == "cuda" else _resident() - before


def _two_calls(call: Callable[[], object]) -> None:
    call(), call()


def _resident() -> int:
    """The peak resident set size of this process so far, in bytes."""
    if STATUS.exists():  # Linux: getrusage would include the parent process
        (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
