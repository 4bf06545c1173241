"""Linear, the RMSNorm of a CPU, the loss of raw logits, and samples without a softmax."""

import pytest
import torch
import torch.nn.functional as F
from conftest import SEQ
from torch import nn

from lm.decoding import GREEDY, Sampling
from lm.model.kernels import rms_norm
from lm.model.linear import Linear, linear
from lm.training.loss import plain
from tests.helpers.models import build, random_tokens

each = pytest.mark.parametrize


@each("options", [(True,), (False, "cpu", torch.float64), (True, "meta", torch.bfloat16)])
def test_it_equals_torch_bit_for_bit(options):
    """In its initial values and its product, in every precision, and in device, dtype and name."""
    layers = []
    for cls in (Linear, nn.Linear):
        torch.manual_seed(0)
        layers.append(cls(96, 256, *options))
    mine, torchs = layers
    assert repr(mine) == repr(torchs)
    for name, tensor in torchs.state_dict().items():
        own = mine.state_dict()[name]
        assert (own.device, own.dtype) == (tensor.device, tensor.dtype)
        assert own.is_meta or torch.equal(own, tensor)
    for dtype in () if "meta" in options else (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(4, 96, dtype=dtype)
        assert torch.equal(mine.to(dtype)(x), torchs.to(dtype)(x))


def test_the_product_is_that_of_the_last_dimension_of_any_shape_by_formula():
    """y = x W^T + b, dL/dW = G^T X, dL/db = sum of G over the rows, dL/dX = G W. Another size is refused."""
    layer = Linear(4, 3)
    for leading in ((), (2, 3, 5), (2, 0)):
        x, g = torch.randn(*leading, 4, requires_grad=True), torch.randn(*leading, 3)
        y = layer(x)
        assert torch.allclose(y, x @ layer.weight.T + layer.bias, atol=1e-5)
        rows, g_rows = x.reshape(-1, 4), g.reshape(-1, 3)
        gradients = torch.autograd.grad(y, (layer.weight, layer.bias, x), g)
        for gradient, expected in zip(gradients, (g_rows.T @ rows, g_rows.sum(0), g @ layer.weight), strict=True):
            assert torch.allclose(gradient, expected, atol=1e-5)
        with pytest.raises(ValueError, match=r"\b5\b.*\b4\b"):  # both sizes
            linear(torch.zeros(*leading, 5), layer.weight)


def test_hooks_fire_because_modules_are_called():
    """Every Linear is called as a module, in the order of the modules."""
    net = build("untied")
    linears = [module for module in net.modules() if isinstance(module, Linear)]
    fired = []
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


def kernel(x, weight):
    return rms_norm(x, weight, EPS)


def reference(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def passes(norm, x, weight):
    """The output, and autograd's gradients of x and of the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, weight), g.to(y.dtype))


@each("dtype", TOLERANCE)
def test_rms_norm_equals_torchs_in_value_and_gradients(dtype):
    """In half precision a large input shows that it is as accurate."""

    def error(tensor, exact):
        return float((tensor.double() - exact).norm() / exact.norm())

    torch.manual_seed(0)
    for shape in ((8,), (2, 3, 4, 8), (512, 128)):
        x, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)
        exact = passes(reference, x.double(), weight.double())
        for tensor, other, right in zip(passes(kernel, x, weight), passes(reference, x, weight), exact, strict=True):
            assert tensor.dtype == dtype
            assert error(tensor, right) < TOLERANCE[dtype]
            assert dtype.itemsize > 2 or len(shape) != 2 or error(tensor, right) < 1.1 * error(other, right)


def test_rms_norm_gives_equal_outputs_with_and_without_gradients_and_for_a_view():
    x, weight = torch.randn(2, 3, 4, 8), torch.randn(8)
    with torch.inference_mode():
        y = kernel(x, weight)
    z = kernel(x, weight.requires_grad_())
    assert torch.equal(z, y)
    z.sum().backward()  # what inference mode made serves in training
    view = x.transpose(1, 2)
    for first, second in zip(passes(kernel, view, weight), passes(kernel, view.contiguous(), weight), strict=True):
        torch.testing.assert_close(first, second)
    assert all(tensor.isfinite().all() for tensor in passes(kernel, torch.zeros(2, 8), weight))


# --- raw logits: the loss, argmax and samples


def test_the_loss_takes_logits():
    """A softmax before it would give another."""
    net, (tokens, targets) = build("untied"), random_tokens(2, 4, SEQ)
    p = net(tokens).softmax(-1)
    by_hand = -p.gather(-1, targets[..., None]).log().mean()
    assert plain(net, tokens, targets).item() == pytest.approx(by_hand.item())
    assert abs(F.cross_entropy(p.flatten(0, 1), targets.flatten()) - by_hand) > 1e-4


def test_argmax_of_logits_is_argmax_of_softmax():
    for scale in (0.01, 1.0, 20.0):
        z = scale * torch.randn(500, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
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
def test_gumbel_max_draws_from_the_softmax_of_what_is_kept(options, kept):
    """argmax(logits / temperature + Gumbel noise)."""
    ids = Sampling(**options).next_token(Z.expand(50_000, -1), torch.Generator().manual_seed(0))
    counts = torch.bincount(ids, minlength=6)

    def chi_square(temperature):
        largest = (Z / temperature).softmax(-1).topk(kept)
        expected = len(ids) * largest.values / largest.values.sum()
        return float(((counts[largest.indices] - expected).square() / expected).sum())

    assert counts[Z.topk(kept).indices].sum() == len(ids), "no other token occurs"
    assert chi_square(options["temperature"]) < LIMIT
    if kept == 6:  # the test detects ten per cent
        assert min(chi_square(options["temperature"] * factor) for factor in (1.1, 1 / 1.1)) > 3 * LIMIT
