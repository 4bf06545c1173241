"""Linear, the RMSNorm of a CPU, and facts about softmax, cross-entropy and argmax that are often stated wrongly."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SEQ
from torch import Tensor, nn

from lm.decoding import GREEDY, Sampling
from lm.model.kernels import rms_norm
from lm.model.linear import Linear, linear
from tests.helpers.models import build

each = pytest.mark.parametrize


@each(("shape", "bias"), [((2, 3), True), ((1, 1), False), ((96, 256), True)])
def test_it_equals_torch_bit_for_bit(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(*shape, bias=bias)
    torch.manual_seed(0)
    torchs = nn.Linear(*shape, bias=bias)
    assert layer.state_dict().keys() == torchs.state_dict().keys()
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in torchs.state_dict().items())
    assert repr(layer) == repr(torchs)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(4, shape[0], dtype=dtype)
        assert torch.equal(layer.to(dtype)(x), torchs.to(dtype)(x))


def test_its_device_and_dtype_are_those_of_torch() -> None:
    for options in ((True, "meta", torch.bfloat16), (False, "cpu", torch.float64), (True,)):
        layers = []
        for cls in (Linear, nn.Linear):
            torch.manual_seed(0)
            layers.append(cls(3, 2, *options))
        for mine, torchs in zip(*(layer.parameters() for layer in layers), strict=True):
            assert (mine.device, mine.dtype) == (torchs.device, torchs.dtype)
            assert mine.is_meta or torch.equal(mine, torchs)


def test_known_numbers() -> None:
    torch.manual_seed(0)
    layer = Linear(2, 3)
    for tensor, expected in (
        (layer.weight, [[-0.0053, 0.3793], [-0.5820, -0.5204], [-0.2723, 0.1896]]),
        (layer.bias, [-0.0140, 0.5607, -0.0628]),
        (layer(torch.tensor([[0.0, 1.0], [2.0, 3.0]])), [[0.3653, 0.0403, 0.1269], [1.1134, -2.1645, -0.0386]]),
    ):
        assert torch.allclose(tensor, torch.tensor(expected), atol=5.1e-5, rtol=0)
    weight = torch.tensor([[1.0, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]])
    assert linear(torch.tensor([1.0, 2, 3, 4]), weight).tolist() == [30, 40, 50]


def test_all_forms_of_the_product_agree_on_the_last_dimension_of_any_shape() -> None:
    layer = Linear(4, 3)
    weight, bias = layer.weight, layer.bias
    for leading in ((), (2, 3, 5), (2, 0)):
        x = torch.randn(*leading, 4)
        assert (weight.shape, bias.shape, layer(x).shape) == ((3, 4), (3,), (*leading, 3))
        for y in (F.linear(x, weight, bias), torch.matmul(x, weight.T) + bias, x @ weight.T + bias):
            assert torch.allclose(layer(x), y, atol=1e-5)
        with pytest.raises(ValueError, match=r"\b5\b.*\b4\b"):  # both sizes
            layer(torch.zeros(*leading, 5))


def test_initial_values_are_within_one_over_root_fan_in_unlike_he_initialisation() -> None:
    """Kaiming uniform with a = sqrt(5): variance 1/(3 fan_in), six times below He's 2/fan_in for ReLU."""
    torch.manual_seed(0)
    layer, bound = Linear(64, 4096), 1 / math.sqrt(64)
    for parameter in (layer.weight, layer.bias):
        assert 0.99 * bound < parameter.abs().max() <= bound
    he = nn.init.kaiming_uniform_(torch.empty(4096, 64), nonlinearity="relu")
    assert he.var().item() == pytest.approx(6 * layer.weight.var().item(), rel=0.02)


def test_gradients_by_formula() -> None:
    """dL/dW = G^T X, dL/db = sum of G over the batch, dL/dX = G W."""
    layer, x, g = Linear(4, 3), torch.randn(5, 4, requires_grad=True), torch.randn(5, 3)
    layer(x).backward(g)
    for grad, expected in ((layer.weight.grad, g.T @ x), (layer.bias.grad, g.sum(0)), (x.grad, g @ layer.weight)):
        assert torch.allclose(grad, expected, atol=1e-5)


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


# --- RMSNorm on a CPU


EPS = 1e-5
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-14}  # relative
Norm = Callable[[Tensor, Tensor], Tensor]


def kernel(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def passes(norm: Norm, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The output, and autograd's gradients of x and of the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, weight), g.to(y.dtype))


@each("dtype", TOLERANCE)
def test_rms_norm_equals_torchs_in_value_and_gradients(dtype: torch.dtype) -> None:
    """In half precision a large input shows that it is as accurate."""

    def error(tensor: Tensor, exact: Tensor) -> float:
        return float((tensor.double() - exact).norm() / exact.norm())

    torch.manual_seed(0)
    for shape in ((8,), (2, 3, 4, 8), (512, 128)):
        x, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)
        exact = passes(reference, x.double(), weight.double())
        for tensor, other, right in zip(passes(kernel, x, weight), passes(reference, x, weight), exact, strict=True):
            assert tensor.dtype == dtype
            assert error(tensor, right) < TOLERANCE[dtype]
            assert dtype.itemsize > 2 or len(shape) != 2 or error(tensor, right) < 1.1 * error(other, right)


def test_rms_norm_gives_equal_outputs_with_and_without_gradients_and_for_a_view() -> None:
    x, weight = torch.randn(2, 3, 4, 8), torch.randn(8)
    y = kernel(x, weight.requires_grad_())
    with torch.no_grad():
        assert torch.equal(kernel(x, weight), y)
    with torch.inference_mode():
        rms_norm(x, weight, 2 * EPS)
    rms_norm(x, weight, 2 * EPS).sum().backward()  # what inference mode made serves in training
    view = x.transpose(1, 2)
    for first, second in zip(passes(kernel, view, weight), passes(kernel, view.contiguous(), weight), strict=True):
        torch.testing.assert_close(first, second)
    assert all(tensor.isfinite().all() for tensor in passes(kernel, torch.zeros(2, 8), weight))


# --- softmax, cross-entropy and argmax


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


ZEROS = torch.zeros(5, dtype=torch.float64)


def test_gradient_of_softmax() -> None:
    """dL/dz_i = p_i (g_i - sum_j p_j g_j) with g = dL/dp; a further factor (1 - p_i) is wrong."""
    z, g = draw(5, 7).requires_grad_(), draw(7)
    p = z.softmax(-1)
    p.backward(g.expand_as(p))
    p = p.detach()
    right = p * (g - (p * g).sum(-1, keepdim=True))
    assert torch.allclose(z.grad, right)
    assert torch.allclose(z.grad.sum(-1), ZEROS)
    for wrong in (right * (1 - p), p * (1 - p) * g):  # the second is the term i = j alone
        assert not torch.allclose(z.grad, wrong, atol=1e-3)


def test_gradient_of_cross_entropy_is_p_minus_y_and_each_row_sums_to_zero() -> None:
    z, targets = draw(5, 7).requires_grad_(), torch.tensor([0, 6, 3, 3, 1])
    nn.CrossEntropyLoss(reduction="sum")(z, targets).backward()
    assert torch.allclose(z.grad, z.detach().softmax(-1) - F.one_hot(targets, 7))
    assert torch.allclose(z.grad.sum(-1), ZEROS)
    assert z.grad.abs().max() > 0.1


def test_softmax_is_shift_invariant_and_its_logarithm_finite_where_naive_exponentials_are_not() -> None:
    z, targets = draw(5, 7), torch.arange(5)
    assert not torch.allclose((z * 2).softmax(-1), z.softmax(-1), atol=1e-2), "but not scale invariant"
    for shift in (-1e4, 0.5, 1e4):
        shifted = z + shift
        assert torch.allclose(shifted.softmax(-1), z.softmax(-1))
        assert torch.allclose(shifted.logsumexp(-1), shift + z.logsumexp(-1))
        assert F.cross_entropy(shifted, targets).item() == pytest.approx(F.cross_entropy(z, targets).item())
        assert (shifted.exp() / shifted.exp().sum(-1, keepdim=True)).isnan().all() == (abs(shift) > 1)


def test_cross_entropy_takes_logits() -> None:
    """With a softmax before it the loss is another, and cannot fall below ln(1 + (V-1)/e) however sure the model."""
    z, targets, loss = draw(5, 7), torch.arange(5), nn.CrossEntropyLoss()
    by_hand = -z.softmax(-1)[torch.arange(5), targets].log().mean()
    assert loss(z, targets).item() == pytest.approx(by_hand.item())
    assert abs(loss(z.softmax(-1), targets) - by_hand) > 0.1
    sure = 100.0 * F.one_hot(targets, 7).double()
    assert loss(sure, targets) < 1e-9
    assert loss(sure.softmax(-1), targets).item() == pytest.approx(math.log(1 + 6 / math.e))


def test_argmax_of_logits_is_argmax_of_softmax() -> None:
    for scale in (0.01, 1.0, 20.0):
        z = draw(500, 50, scale=scale)
        assert torch.equal(GREEDY.next_token(z, None), z.softmax(-1).argmax(-1))


Z = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
LIMIT = 20.5  # the chi-square statistic with five degrees of freedom exceeds it once in a thousand
SAMPLINGS = [  # and how many of the six tokens are kept
    *(({"temperature": temperature}, 6) for temperature in (0.5, 2.0)),
    *(({"temperature": 1.5, "top_k": k}, kept) for k, kept in ((3, 3), (9, 6))),
    *(({"temperature": 1.5, "top_p": p}, kept) for p, kept in ((0.3, 1), (0.9, 4))),
    *(({"temperature": 1.5, "min_p": p}, kept) for p, kept in ((0.2, 4), (1.0, 1))),
]


@each(("options", "kept"), SAMPLINGS)
def test_gumbel_max_draws_from_the_softmax_of_what_is_kept(options: dict[str, Any], kept: int) -> None:
    """argmax(logits / temperature + Gumbel noise)."""
    ids = Sampling(**options).next_token(Z.expand(50_000, -1), torch.Generator().manual_seed(0))
    counts = torch.bincount(ids, minlength=6)

    def chi_square(temperature: float) -> float:
        largest = (Z / temperature).softmax(-1).topk(kept)
        expected = len(ids) * largest.values / largest.values.sum()
        return float(((counts[largest.indices] - expected).square() / expected).sum())

    assert counts[Z.topk(kept).indices].sum() == len(ids), "no other token occurs"
    assert chi_square(options["temperature"]) < LIMIT
    if kept == 6:  # the test detects ten per cent
        assert min(chi_square(options["temperature"] * factor) for factor in (1.1, 1 / 1.1)) > 3 * LIMIT
