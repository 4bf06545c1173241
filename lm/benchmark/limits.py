"""What the machine can do: multiply matrices, read memory."""

from collections.abc import Iterator
from functools import cache
from statistics import median

import torch

from lm.benchmark.measure import Figure, alternate
from lm.model.linear import linear
from lm.system.device import has_native_bf16


def precisions(device: str) -> list[torch.dtype]:
    """In which steps are measured: those that are in use there."""
    cpu = [torch.float32] if device == "cpu" else []
    return cpu + [torch.bfloat16] * has_native_bf16(device)


def spell(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


@cache
def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """FLOPs per second of a large product."""
    n = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median(alternate({"product": lambda: a @ b}, 2.0)["product"])


class Reading:
    """Called, it reads 256 MB of matrices that no cache holds, as decoding does: a vector times each of them."""

    def __init__(self, device: str) -> None:
        self.weights, self.x = torch.randn(16, 2048, 2048, device=device), torch.randn(1, 2048, device=device)

    @torch.inference_mode()
    def __call__(self) -> None:
        for weight in self.weights:
            linear(self.x, weight)


def limits(device: str, seconds: float) -> Iterator[Figure]:
    for dtype in precisions(device):
        yield Figure("limits", f"matrix rate, {spell(dtype)}", matrix_rate(device, dtype) / 1e9, "GFLOP/s")
    read = Reading(device)
    rate = read.weights.nbytes / median(alternate({"read": read}, 2.0)["read"])
    yield Figure("limits", "memory bandwidth", rate / 1e9, "GB/s")
