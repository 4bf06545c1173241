"""What the machine can do: multiply matrices, read memory."""

from collections.abc import Iterator

import torch

from lm.benchmark.measure import Figure, alternate, paired


def matrix_rate(device: str) -> float:
    """FLOPs per second of a large product, in the precision that training uses."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (1536, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    seconds, _ = paired(alternate({"product": lambda: a @ b}, 2.0), "product", "product")
    return 2 * n**3 / seconds


def bandwidth(device: str) -> float:
    """Bytes per second of reading matrices that no cache holds, as decoding does: a vector times 256 MB of them."""
    weights = torch.randn(16, 2048, 2048, device=device)
    x = torch.randn(1, 2048, device=device)

    def read() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    seconds, _ = paired(alternate({"read": read}, 2.0), "read", "read")
    return weights.nbytes / seconds


def limits(device: str) -> Iterator[Figure]:
    yield Figure("limits", "matrix rate", matrix_rate(device) / 1e9, "GFLOP/s")
    yield Figure("limits", "memory bandwidth", bandwidth(device) / 1e9, "GB/s")
