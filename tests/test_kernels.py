"""The CPU kernels equal torch's operations in every precision and shape that the model uses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm.model import kernels
from lm.model.kernels import HAS_ONEDNN, ONEDNN_MIN_NUMEL, rms_norm
from lm.model.linear import linear

EPS = 1e-5
EXACT = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-14}  # relative errors


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def torchs(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """An input and a weight."""
    torch.manual_seed(0)
    return (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)


def passes(norm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of x and of the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, weight), g.to(y.dtype))


def error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(3, 5, 8), (8,), (1, 1, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize("dtype", EXACT)
def test_rms_norm_equals_torchs_in_value_and_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape, dtype=dtype)
    for tensor, exact in zip(passes(ours, x, weight), passes(torchs, x.double(), weight.double()), strict=True):
        assert tensor.dtype == dtype
        assert error(tensor, exact) < EXACT[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_accurate_as_in_torch(dtype: torch.dtype) -> None:
    x, weight = draw(512, 128, dtype=dtype)
    exact = passes(torchs, x.double(), weight.double())
    for tensor, other, right in zip(passes(ours, x, weight), passes(torchs, x, weight), exact, strict=True):
        assert error(tensor, right) < 1.1 * error(other, right)


def test_rms_norm_gives_equal_outputs_with_and_without_gradients_and_for_a_view() -> None:
    x, weight = draw(2, 3, 4, 8)
    with torch.no_grad():
        without = ours(x, weight.requires_grad_())
    assert ours(x, weight).grad_fn is not None
    assert torch.equal(ours(x, weight), without)
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, weight, 2 * EPS), rms_norm(x.clone(), weight, 2 * EPS))
    rms_norm(x, weight, 2 * EPS).sum().backward()  # constants that inference made serve in training
    view = x.transpose(1, 2)
    for first, second in zip(passes(ours, view, weight), passes(ours, view.contiguous(), weight), strict=True):
        torch.testing.assert_close(first, second)


def test_a_second_derivative_of_rms_norm_is_refused_and_not_wrong() -> None:
    """Gradients of gradients would take the inverse RMS as a constant."""
    x, weight = draw(3, 8)
    (first,) = torch.autograd.grad(ours(x.requires_grad_(), weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_under_autocast_the_weight_and_its_gradient_stay_in_fp32() -> None:
    x, weight = draw(64, 2048)
    x = x.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, by_x, by_weight = passes(ours, x, weight)
    assert (y.dtype, by_x.dtype, by_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert error(y, torchs(x.double(), weight.double())) < 2e-3


@pytest.mark.parametrize("x", [torch.zeros(2, 8), torch.full((2, 8), 1e-30)])
def test_zeros_and_tiny_inputs_give_finite_results(x: Tensor) -> None:
    y, by_x, by_weight = passes(ours, x, torch.randn(8))
    assert y.abs().max() < 1e-26
    assert all(torch.isfinite(tensor).all() for tensor in (by_x, by_weight))


class Called(TorchDispatchMode):
    """The names of torch's operations in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 1, 1024), (1, 1024), (1024,), (2, 5, 1024)])
def test_a_large_matrix_goes_through_onednn_in_decoding_alone(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ONEDNN_MIN_ROWS", 1)
    torch.manual_seed(0)
    weight, x = torch.randn(ONEDNN_MIN_NUMEL // 1024, 1024), torch.randn(shape)
    x = x.transpose(0, -2) if len(shape) > 2 else x
    b = torch.randn(len(weight)) if bias else None
    with torch.no_grad(), Called() as called:
        y = linear(x, weight, b)
    assert called.names == ["mkldnn::_linear_pointwise"]
    torch.testing.assert_close(y, F.linear(x, weight, b), rtol=1e-5, atol=1e-3)
    with Called() as others:
        linear(x, weight, b)
        with torch.no_grad():
            linear(x, weight[:-1])
            linear(x.double(), weight.double())
            with torch.autocast("cpu", torch.bfloat16):
                linear(x, weight)
            monkeypatch.setattr(kernels, "ONEDNN_MIN_ROWS", 11)  # more than x has
            linear(x, weight)
    assert not any("mkldnn::_linear" in name for name in others.names)
