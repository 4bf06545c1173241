"""Linear: what it computes, and its initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import EVERY_HEAD, SEQ
from helpers.models import build, random_tokens
from torch import nn

from lm.model.linear import Linear, linear


def pair(*shape: int, bias: bool = True) -> tuple[Linear, nn.Linear]:
    """Our Linear and torch's from the same random state."""
    torch.manual_seed(0)
    ours = Linear(*shape, bias=bias)
    torch.manual_seed(0)
    return ours, nn.Linear(*shape, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (96, 256), (1000, 3)])
def test_it_equals_torch_bit_for_bit(shape: tuple[int, int], bias: bool) -> None:
    ours, torchs = pair(*shape, bias=bias)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in torchs.state_dict().items())
    assert repr(ours) == repr(torchs)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(4, shape[0], dtype=dtype)
        assert torch.equal(ours.to(dtype)(x), torchs.to(dtype)(x))


def test_known_numbers_of_seed_zero() -> None:
    ours, _ = pair(2, 3)
    for tensor, expected in (
        (ours.weight, [[-0.0053, 0.3793], [-0.5820, -0.5204], [-0.2723, 0.1896]]),
        (ours.bias, [-0.0140, 0.5607, -0.0628]),
        (ours(torch.tensor([[0.0, 1.0], [2.0, 3.0]])), [[0.3653, 0.0403, 0.1269], [1.1134, -2.1645, -0.0386]]),
    ):
        assert torch.allclose(tensor, torch.tensor(expected), atol=5.1e-5, rtol=0)


def test_a_matrix_vector_product_by_hand() -> None:
    weight = torch.tensor([[1.0, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]])
    assert linear(torch.tensor([1.0, 2, 3, 4]), weight).tolist() == [30, 40, 50]


def test_the_weight_is_out_by_in_and_all_forms_of_the_product_agree() -> None:
    layer, x = Linear(4, 3), torch.randn(5, 4)
    weight, bias = layer.weight, layer.bias
    assert (weight.shape, bias.shape) == ((3, 4), (3,))
    for y in (F.linear(x, weight, bias), torch.matmul(x, weight.T) + bias, x @ weight.T + bias):
        assert torch.allclose(layer(x), y, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3, 5), (2, 0)])
def test_it_acts_on_the_last_dimension_of_any_shape(leading: tuple[int, ...]) -> None:
    layer, x = Linear(4, 3), torch.randn(*leading, 4)
    assert layer(x).shape == (*leading, 3)
    assert torch.allclose(layer(x).reshape(-1, 3), layer(x.reshape(-1, 4)), atol=1e-5)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (4, 5)])
def test_a_wrong_last_dimension_names_both_sizes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"\b{shape[-1]}\b.*\b4\b"):
        Linear(4, 3)(torch.zeros(shape))


def test_initial_values_are_within_one_over_root_fan_in_unlike_he_initialisation() -> None:
    """Kaiming uniform with a = sqrt(5): variance 1/(3 fan_in), six times below He's 2/fan_in for ReLU."""
    torch.manual_seed(0)
    layer, bound = Linear(64, 4096), 1 / math.sqrt(64)
    for parameter in (layer.weight, layer.bias):
        assert 0.99 * bound < parameter.abs().max() <= bound
    assert layer.weight.var().item() == pytest.approx(1 / (3 * 64), rel=0.02)
    he = nn.init.kaiming_uniform_(torch.empty(4096, 64), nonlinearity="relu")
    assert he.var().item() == pytest.approx(6 * layer.weight.var().item(), rel=0.02)


def test_gradients_by_formula() -> None:
    """dL/dW = G^T X, dL/db = sum of G over the batch, dL/dX = G W."""
    layer, x, g = Linear(4, 3), torch.randn(5, 4, requires_grad=True), torch.randn(5, 3)
    layer(x).backward(g)
    assert torch.allclose(layer.weight.grad, g.T @ x, atol=1e-5)
    assert torch.allclose(layer.bias.grad, g.sum(0), atol=1e-5)
    assert torch.allclose(x.grad, g @ layer.weight, atol=1e-5)


def test_hooks_fire_because_modules_are_called() -> None:
    """Every Linear is called as a module, in the order of the modules."""
    net = build("untied")
    linears = [module for module in net.modules() if isinstance(module, Linear)]
    fired: list[nn.Module] = []
    for module in linears:
        module.register_forward_hook(lambda module, *_: fired.append(module))
    net(torch.zeros(1, SEQ, dtype=torch.long))
    assert len(linears) == 2 * 6 + 1
    assert fired == linears
    linears[0].forward(torch.zeros(1, 32))  # calling forward directly fires no hook
    assert fired == linears


@pytest.mark.parametrize("kind", EVERY_HEAD)
def test_torch_nn_linear_gives_the_same_logits(kind: str) -> None:
    ours, torchs = (build(kind, linear=name, bias=True) for name in ("linear", "torch.nn.Linear"))
    assert type(torchs.blocks[0].ffn.up_proj) is nn.Linear
    assert torch.equal(ours(random_tokens(1, SEQ)), torchs(random_tokens(1, SEQ)))
