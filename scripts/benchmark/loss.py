"""Chunked cross-entropy beside plain, and activation checkpointing beside none: step time and peak memory."""

import multiprocessing
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from lm.config import ModelConfig
from lm.training.loss import HAS_CHUNKED

from .measure import Measurement, compare
from .models import DEFAULT, Shape, step

TINY = Shape(ModelConfig(), 300, 1, 8)
WIDE = Shape(ModelConfig(n_layers=1, d_model=512, n_heads=4, d_ff=1376), 50304, 8, 512)
DEEP = Shape(replace(DEFAULT.model, n_layers=16), 2048, 8, 256)
CHUNKED = ({"loss": "chunked"}, {"loss": "plain"})  # a step, and the one without what is measured
CHECKPOINTING = ({"checkpointing": True}, {"checkpointing": False})
TIMED = {"activation checkpointing, 16 layers": (DEEP, CHECKPOINTING)}
SIZED = {"activation checkpointing, 16 layers": (DEEP, CHECKPOINTING)}
if HAS_CHUNKED:
    TIMED["chunked cross-entropy, vocabulary 2,048"] = (DEFAULT, CHUNKED)
    SIZED["chunked cross-entropy, vocabulary 50,304"] = (WIDE, CHUNKED)
STATUS = Path("/proc/self/status")


def loss_memory(device: str, seconds: float) -> Iterator[Measurement]:
    for name, (shape, ways) in TIMED.items():
        calls = {str(i): step(shape, device, compiled=device == "cuda", **way) for i, way in enumerate(ways)}
        for _, mine, plain in compare(calls, seconds):
            yield Measurement("loss", f"step time, {name}", 1000 * mine, "ms", "without", 1000 * plain)
    for name, (shape, ways) in SIZED.items() if device == "cuda" or STATUS.exists() else ():  # Linux alone has it
        mine, plain = (step_memory(shape, device, **way) / 1e6 for way in ways)
        yield Measurement("loss", f"memory, {name}", mine, "MB", "without", plain)


def step_memory(shape: Shape, device: str, **way: str | bool) -> int:
    """Peak bytes of two training steps, less what a process holds after two steps of a tiny model.

    Each is measured in a process of its own, because the peak of a process never falls.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (shape, device, way))


def _peak(shape: Shape, device: str, way: dict[str, str | bool]) -> int:
    peaks = []
    for case in (TINY, shape):
        call = step(case, device, compiled=device == "cuda", **way)  # type: ignore[arg-type]
        call(), call()
        peaks.append(_resident() if device != "cuda" else 0)
    return torch.cuda.max_memory_allocated() if device == "cuda" else peaks[1] - peaks[0]


def _resident() -> int:
    """The peak resident set size of this process so far, in bytes. getrusage would include the parent process."""
    match = re.search(r"VmHWM:\s*(\d+)", STATUS.read_text())
    assert match is not None
    return 1024 * int(match[1])
