"""The linear map: every projection, every FFN matrix and the LM head compute their matmul here."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONEDNN_MIN_NUMEL = 2**21  # of a weight: 8 MiB
HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
CPU: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
ONEDNN_MIN_ROWS = 4 if "Intel" in str(CPU.get("cpu_name")) else 1  # of x: on Intel's CPUs MKL is faster below it


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` on the last dimension.

    x: (..., in_features); weight: (out_features, in_features); bias: (out_features,); returns (..., out_features).
    Raises ValueError if the last dimension of `x` is not in_features.

    >>> linear(torch.tensor([1.0, 2, 3, 4]), torch.tensor([[1.0, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]))
    tensor([30., 40., 50.])
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear: the last dimension of x is {x.shape[-1]}, the weight expects {weight.shape[-1]}")
    return (onednn_linear if weight.numel() >= ONEDNN_MIN_NUMEL and suits_onednn(x) else F.linear)(x, weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear by oneDNN: in full precision, on a CPU, and without a gradient."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def suits_onednn(x: Tensor) -> bool:
    """Whether `onednn_linear` can replace F.linear for `x` and is not slower: see `scripts/benchmark.py only=[gemm]`.

    It reads a large weight up to twice as fast as F.linear, which usually calls MKL, and reading the weights is what
    takes the time of decoding.
    """
    return (
        x.device.type == "cpu"
        and x.numel() >= ONEDNN_MIN_ROWS * x.shape[-1]
        and x.dtype == torch.float32
        and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
        and HAS_ONEDNN
    )


class Linear(nn.Module):
    """An affine map of the last dimension. With the same random state it has the same parameters as `torch.nn.Linear`.

    The weight is stored as (out_features, in_features). Weight and bias are initialised uniformly in
    +-1/sqrt(in_features): Kaiming's formula with a = sqrt(5), which is not He's initialisation for ReLU (whose bound
    is wider by sqrt(6)).

    >>> Linear(2, 3)(torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
