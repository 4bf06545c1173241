"""What the machine can do: multiply matrices, read memory."""

from collections.abc import Iterator
from functools import cache
from statistics import median

import torch
from torch.nn.functional import linear

from lm.benchmark.measure import Figure, alternate


@cache
def matrix_rate(device: str) -> float:
    """FLOPs per second of a large product, in the precision that training uses."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (1536, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median(alternate({"product": lambda: a @ b}, 2.0)["product"])


@cache
def bandwidth(device: str) -> float:
    """Bytes per second of reading matrices that no cache holds, as decoding does: a vector times 256 MB of them."""
    weights, x = torch.randn(16, 2048, 2048, device=device), torch.randn(1, 2048, device=device)
    return weights.nbytes / median(alternate({"read": lambda: [linear(x, one) for one in weights]}, 2.0)["read"])


def limits(device: str, seconds: float) -> Iterator[Figure]:
    yield Figure("limits", "matrix rate", matrix_rate(device) / 1e9, "GFLOP/s")
    yield Figure("limits", "memory bandwidth", bandwidth(device) / 1e9, "GB/s")
