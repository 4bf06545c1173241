"""Peak memory of a training step: measured in a process of its own, and counted from the tensors it needs."""

import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lm.benchmark.shapes import Shape
from lm.config import ModelConfig
from lm.training.loss import CHUNK_ROWS, LOSSES

STATUS = Path("/proc/self/status")
TINY = Shape(ModelConfig(), 300, 1, 8)


def step_memory(shape: Shape, device: str, loss: str = "auto", checkpointing: bool = False) -> int:
    """Peak bytes of two training steps, less what a process holds after two steps of a tiny model."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak, (shape, device, loss, checkpointing))


def peak(shape: Shape, device: str, loss: str, checkpointing: bool) -> int:
    two_steps(TINY.step(device, checkpointing=checkpointing))
    before = resident()
    two_steps(shape.step(device, loss, checkpointing))
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident() - before


def two_steps(step: Callable[[], object]) -> None:
    step(), step()


def resident(field: str = "VmHWM") -> int:
    """The peak resident set size of this process so far, in bytes; on Linux with VmRSS that of now."""
    if STATUS.exists():  # Linux: getrusage would include the parent process
        (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def expected(shape: Shape, device: str = "cpu") -> int:
    """Bytes of a training step, counted from its tensors.

    Parameters, their gradients and AdamW's two moments; the activations that autograd saves for the backward pass;
    and the gradient of the logits that are in memory at a time.
    """
    net, (tokens, targets) = shape.build(), shape.tokens()
    name = shape.run(device).loss
    weights = sum(parameter.nbytes for parameter in net.parameters())
    rows = min(CHUNK_ROWS, tokens.numel()) if name == "chunked" else tokens.numel()
    return 4 * weights + kept(net, lambda: LOSSES[name](net, tokens, targets)) + 4 * rows * shape.vocab_size


def kept(net: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd saves for the backward pass, parameters not included."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    assert y.requires_grad  # `y` keeps the saved tensors alive, so no address is used twice
    for parameter in net.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
