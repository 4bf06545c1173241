"""RMSNorm with its own backward pass equals torch's, in every precision and shape that the model uses."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.norm import RMSNorm

SHAPES = [(3, 5, 8), (8,), (1, 1, 8), (2, 3, 4, 8)]
EXACT = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-14}  # relative errors


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def a_norm(dtype: torch.dtype = torch.float32, width: int = 8) -> RMSNorm:
    norm = RMSNorm(width).to(dtype)
    nn.init.normal_(norm.weight)
    return norm


def passes(call, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of the weight."""
    x = x.detach().requires_grad_()
    y = call(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), g.to(y.dtype))]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", EXACT)
def test_it_equals_torch_in_every_precision(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Outputs and gradients are as accurate as the precision allows."""
    norm, x = a_norm(dtype), torch.randn(shape).to(dtype) * 3
    ours = passes(norm, x, norm.weight)
    weight = norm.weight.detach().double().requires_grad_()
    g = [one.double() for one in passes(lambda x: F.rms_norm(x, (8,), weight, 1e-5), x.double(), weight)]
    for found, exact in zip(ours, g, strict=True):
        assert found.dtype == dtype
        assert error(found, exact) < EXACT[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_accurate_as_in_torch(dtype: torch.dtype) -> None:
    norm, x = a_norm(dtype, 128), torch.randn(512, 128).to(dtype)
    weight = norm.weight.detach().double().requires_grad_()
    exact = passes(lambda x: F.rms_norm(x, (128,), weight, 1e-5), x.double(), weight)
    theirs = passes(lambda x: F.rms_norm(x, (128,), norm.weight, 1e-5), x, norm.weight)
    ours = passes(norm, x, norm.weight)
    for found, other, right in zip(ours, theirs, exact, strict=True):
        assert error(found, right) < 1.1 * error(other, right)


def test_a_second_derivative_is_refused() -> None:
    """It would be wrong, because the backward pass treats the inverse RMS as a constant."""
    norm, x = a_norm(), torch.randn(3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_outputs_with_and_without_gradients_are_equal() -> None:
    norm, x = a_norm(), torch.randn(2, 3, 8)
    with torch.no_grad():
        without = norm(x)
    assert norm(x).grad_fn is not None
    assert torch.equal(norm(x), without)


def test_a_transposed_view_gives_the_result_of_a_contiguous_tensor() -> None:
    norm, x = a_norm(), torch.randn(2, 3, 4, 8).transpose(1, 2)
    ours, theirs = (passes(norm, one, norm.weight) for one in (x, x.contiguous()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast_the_weight_and_its_gradient_stay_in_fp32() -> None:
    norm, x = a_norm(width=2048), torch.randn(64, 2048).to(torch.bfloat16)
    exact = F.rms_norm(x.double(), (2048,), norm.weight.detach().double(), 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y, by_x, by_weight = passes(norm, x, norm.weight)
    assert (y.dtype, by_x.dtype, by_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert error(y, exact) < 2e-3


@pytest.mark.parametrize("x", [torch.zeros(2, 8), torch.full((2, 8), 1e-30)])
def test_zeros_and_tiny_inputs_give_finite_results(x: Tensor) -> None:
    norm = a_norm()
    y, by_x, by_weight = passes(norm, x, norm.weight)
    assert y.abs().max() < 1e-26
    assert all(torch.isfinite(one).all() for one in (by_x, by_weight))
