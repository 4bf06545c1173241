"""What a training step holds: measured in a process of its own, beside what must be there."""

import multiprocessing
import resource
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lm.bare import bare_step
from lm.benchmark.shapes import Shape
from lm.config import HeadConfig, ModelConfig, OptimConfig
from lm.loss import LOSSES, ROWS
from lm.model.recompute import recompute
from lm.optim import build_optimizer

STATUS = Path("/proc/self/status")


def of_a_step(shape: Shape, device: str, loss: str = "plain", lean: bool = False) -> int:
    """Bytes at the peak of two training steps, over what a process holds that has made two of a tiny model."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak, (shape, device, loss, lean))


def peak(shape: Shape, device: str, loss: str, lean: bool) -> int:
    two_steps(Shape(ModelConfig(), 300, 1, 8), device, loss, lean)
    before = resident()
    two_steps(shape, device, loss, lean)
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident() - before


def resident() -> int:
    """The most bytes of memory that this process has ever held."""
    if STATUS.exists():  # Linux: what getrusage says includes the process that started this one
        (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def two_steps(shape: Shape, device: str, loss: str, lean: bool) -> None:
    net = shape.model(device)
    if lean:
        recompute(net)
    optimizer = build_optimizer(net, OptimConfig(), HeadConfig())
    for _ in range(2):
        bare_step(partial(LOSSES[loss], net), optimizer, [shape.tokens(device)])


def expected(shape: Shape, loss: str = "plain") -> int:
    """Bytes of such a step, counted.

    Weights, their gradients and AdamW's two moments; what the forward pass keeps for the backward one; and the
    gradient of the logits that are there at a time.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    net, (tokens, targets) = shape.model(), shape.tokens()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = LOSSES[loss](net, tokens, targets)
    assert alive.requires_grad  # so that no address above counts for two
    for parameter in net.parameters():
        kept[parameter.untyped_storage().data_ptr()] = parameter.nbytes
    rows = min(ROWS, tokens.numel()) if loss == "chunked" else tokens.numel()
    return (
        3 * sum(parameter.nbytes for parameter in net.parameters()) + sum(kept.values()) + 4 * rows * shape.vocab_size
    )
