"""What the machine can do at most: GEMM throughput and memory bandwidth."""

from collections.abc import Iterator
from functools import cache
from statistics import median

import torch

from lm.model.linear import linear
from lm.system.device import has_native_bf16

from .measure import Measurement, alternate

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def limits(device: str, seconds: float) -> Iterator[Measurement]:
    for dtype in precisions(device):
        flops = gemm_throughput(device, dtype) / 1e9
        yield Measurement("limits", f"GEMM throughput, {NAMES[dtype]}", flops, "GFLOP/s")
    read = MemoryRead(device)
    bandwidth = read.weights.nbytes / median(alternate({"read": read}, 2.0)["read"])
    yield Measurement("limits", "memory bandwidth", bandwidth / 1e9, "GB/s")


def precisions(device: str) -> list[torch.dtype]:
    """The precisions in which training steps are measured: those that are in use on this device."""
    cpu = [torch.float32] if device == "cpu" else []
    return cpu + [torch.bfloat16] * has_native_bf16(device)


@cache
def gemm_throughput(device: str, dtype: torch.dtype) -> float:
    """FLOPs per second of the matmul of two large square matrices."""
    n = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median(alternate({"matmul": lambda: a @ b}, 2.0)["matmul"])


class MemoryRead:
    """Each call reads 256 MB of weights, more than any cache holds, as decoding does: a vector times each matrix."""

    def __init__(self, device: str) -> None:
        self.weights, self.x = torch.randn(16, 2048, 2048, device=device), torch.randn(1, 2048, device=device)

    @torch.inference_mode()
    def __call__(self) -> None:
        for weight in self.weights:
            linear(self.x, weight)
