"""RMSNorm by hand is torch's, forward and backward, in every precision and shape that the model gives it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.norm import EPS, OnCPU, RMSNorm

SHAPES = [(3, 5, 8), (8,), (1, 1, 8), (2, 3, 4, 8)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float64: 1e-6}


def a_norm(dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(8).to(dtype)
    nn.init.normal_(norm.weight)
    return norm


def passes(call, x: Tensor, weight: Tensor) -> list[Tensor]:
    """What it says, and the gradients by x and by the weight."""
    x = x.detach().requires_grad_()
    y = call(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), g)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_is_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm, x = a_norm(dtype), torch.randn(shape).to(dtype) * 3
    ours = passes(norm, x, norm.weight)
    theirs = passes(lambda x: F.rms_norm(x, (8,), norm.weight, EPS), x, norm.weight)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_its_gradients_are_those_of_its_numbers() -> None:
    norm, x = a_norm(torch.float64), torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: OnCPU.apply(x, w, norm.root, norm.floor), (x, norm.weight))


def test_with_and_without_gradients_it_says_the_same() -> None:
    norm, x = a_norm(), torch.randn(2, 3, 8)
    with torch.no_grad():
        without = norm(x)
    assert norm(x).grad_fn is not None
    assert torch.equal(norm(x), without)


def test_the_heads_of_a_transposed_view_are_each_scaled_by_themselves() -> None:
    norm, x = a_norm(), torch.randn(2, 3, 4, 8).transpose(1, 2)
    ours, theirs = (passes(norm, one, norm.weight) for one in (x, x.contiguous()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast_numbers_are_half_and_lengths_full_precision() -> None:
    """The numbers are bf16, the weight and its gradient fp32; a row's length is no worse than their rounding."""
    norm, x = RMSNorm(2048), torch.randn(64, 2048).to(torch.bfloat16)
    y, by_x, by_weight = passes(norm, x, norm.weight)
    assert (y.dtype, by_x.dtype, by_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    exact = F.rms_norm(x.float(), (2048,), norm.weight, EPS)
    assert (torch.linalg.vecdot(y.float(), exact) / torch.linalg.vecdot(exact, exact) - 1).abs().max() < 3e-3


@pytest.mark.parametrize("x", [torch.zeros(2, 8), torch.full((2, 8), 1e-30)])
def test_no_length_is_no_trouble(x: Tensor) -> None:
    norm = a_norm()
    y, by_x, by_weight = passes(norm, x, norm.weight)
    assert y.abs().max() < 1e-26
    assert all(torch.isfinite(one).all() for one in (by_x, by_weight))
