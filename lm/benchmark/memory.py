"""What a training step holds: measured in a process of its own, beside what must be there."""

import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lm.benchmark.shapes import Shape
from lm.config import ModelConfig
from lm.training.loss import LOSSES, ROWS, which_loss

STATUS = Path("/proc/self/status")
TINY = Shape(ModelConfig(), 300, 1, 8)


def of_a_step(shape: Shape, device: str, loss: str = "auto", lean: bool = False) -> int:
    """Bytes at the peak of two training steps, over what a process holds that has made two of a tiny model."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak, (shape, device, loss, lean))


def peak(shape: Shape, device: str, loss: str, lean: bool) -> int:
    two_steps(TINY.step(device, lean=lean))
    before = resident()
    two_steps(shape.step(device, loss, lean))
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident() - before


def two_steps(step: Callable[[], object]) -> None:
    step(), step()


def resident() -> int:
    """The most bytes of memory that this process has ever held."""
    if STATUS.exists():  # Linux: what getrusage says includes the process that started this one
        (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def expected(shape: Shape, device: str = "cpu") -> int:
    """Bytes of such a step, counted.

    Weights, their gradients and AdamW's two moments; what the forward pass keeps for the backward one; and the
    gradient of the logits that are there at a time.
    """
    net, (tokens, targets) = shape.model(), shape.tokens()
    name = which_loss("auto", net, device, compiled=False)
    weights = sum(parameter.nbytes for parameter in net.parameters())
    rows = min(ROWS, tokens.numel()) if name == "chunked" else tokens.numel()
    return 4 * weights + kept(net, lambda: LOSSES[name](net, tokens, targets)) + 4 * rows * shape.vocab_size


def kept(net: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, parameters aside."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    assert y.requires_grad  # it keeps alive what was counted: no address counts for two
    for parameter in net.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
