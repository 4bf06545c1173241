"""oneDNN's product with large matrices, as decoding makes it, beside torch's F.linear: what no cache holds, by rows."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.benchmark.measure import Figure, alternate, paired
from lm.model.linear import ONEDNN, onednn

SHAPES = ((3072, 768), (768, 3072), (50257, 768))
ROWS = (1, 3, 4, 8)
TOGETHER = 2**26  # elements: 256 MB


def product(device: str, seconds: float) -> Iterator[Figure]:
    for height, width in SHAPES if ONEDNN and device == "cpu" else ():
        n = max(1, TOGETHER // (height * width))
        weights = torch.randn(n, height, width, device=device)
        for rows in ROWS:
            x = torch.randn(rows, width, device=device)
            times = alternate(
                {"ours": partial(each, onednn, x, weights), "torch": partial(each, F.linear, x, weights)}, seconds / 5
            )
            ours, other = (1e6 * found / n for found in paired(times["ours"], times["torch"]))
            yield Figure("product", f"{rows} x {width:,} into {height:,}", ours, "us", "F.linear", other)


@torch.inference_mode()
def each(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Tensor) -> None:
    for weight in weights:
        product(x, weight)
