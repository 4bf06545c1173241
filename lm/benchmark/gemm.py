"""The GEMM of oneDNN beside F.linear, on weights that no cache holds and few rows, as in decoding."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.benchmark.measure import Measurement, alternate, paired
from lm.model.kernels import HAS_ONEDNN, onednn_linear

SHAPES = ((3072, 768), (768, 3072), (50257, 768))  # of a weight: (out_features, in_features)
ROWS = (1, 3, 4, 8)
TOGETHER = 2**26  # elements of all weights of a shape: 256 MB


def gemm(device: str, seconds: float) -> Iterator[Measurement]:
    for height, width in SHAPES if HAS_ONEDNN and device == "cpu" else ():
        n = max(1, TOGETHER // (height * width))
        weights = torch.randn(n, height, width, device=device)
        for rows in ROWS:
            x = torch.randn(rows, width, device=device)
            times = alternate(
                {"ours": partial(each, onednn_linear, x, weights), "torch": partial(each, F.linear, x, weights)},
                seconds / 5,
            )
            ours, other = (1e6 * found / n for found in paired(times["ours"], times["torch"]))
            yield Measurement("gemm", f"oneDNN, M={rows} K={width:,} N={height:,}", ours, "us", "F.linear", other)


@torch.inference_mode()
def each(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Tensor) -> None:
    for weight in weights:
        multiply(x, weight)
