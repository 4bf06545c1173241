"""Properties of models with every part, parts by their definition, initial values, sizes, the loss and samples."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lm import config
from lm.config import OptimConfig
from lm.decoding import GREEDY, Sampling
from lm.model.init import initialise
from lm.model.kernels import Dropout, attention, rms_norm
from lm.model.linear import Linear, linear
from lm.model.size import flops_per_token, n_params, n_params_by_role
from lm.model.transformer import FFN, POSITIONS, Context, KVCache
from lm.training.loss import plain
from lm.training.optim import build_optimizer
from tests.helpers.models import MODELS, TARGETS, TOKENS, build, equal, name_of, train_step
from tests.helpers.tiny import SEQ, VOCAB, tiny

CAUSAL = Context(torch.arange(SEQ), lambda heads: heads, None, None)


@pytest.fixture(scope="module", params=MODELS, ids=name_of)
def net(request):
    """Each model in turn; a test that changes it makes a copy."""
    return build(**request.param)


@torch.no_grad()
def test_logits_depend_on_the_present_and_the_past_alone(net):
    """Row t of a batch differs from the first text from position t on, so its logits must differ only from there on."""
    first = TOKENS[0].expand(SEQ, SEQ)
    changed = torch.where(torch.ones(SEQ, SEQ).triu().bool(), (first + 1) % VOCAB, first)
    gap = (net(changed) - net(first)).abs().amax(-1)
    assert gap.tril(-1).max() < 1e-6
    assert gap.diagonal().min() > 1e-4


@torch.no_grad()
def test_cached_equals_full(net):
    """A token or several at a time, through a cache that is longer than needed."""
    tokens, lengths, cache = TOKENS[:, :5], [2, 1, 2], KVCache(SEQ)
    positions = torch.arange(5).expand(len(tokens), -1).split(lengths, 1)
    parts = [net(part, p, cache) for part, p in zip(tokens.split(lengths, 1), positions, strict=True)]
    assert torch.allclose(torch.cat(parts, 1), net(tokens), atol=1e-5)


def test_first_loss_is_near_ln_v_and_every_parameter_has_moved_by_step_three(net):
    """Without weight decay, so that only a gradient can move a parameter."""
    net = deepcopy(net)
    optimizer = build_optimizer(net, OptimConfig(weight_decay=0.0, warmup_steps=0), net.head_config)
    before = deepcopy(net.state_dict())
    losses = [train_step(net, optimizer) for _ in range(3)]
    assert abs(losses[0] - math.log(VOCAB)) < 0.1
    assert losses[2] < losses[0]
    assert [name for name, parameter in net.named_parameters() if torch.equal(parameter, before[name])] == []


# --- blocks by their definition; attention, FFN and rotations are those of transformers: tests/test_huggingface.py


NORMS_BY_HAND = {
    "rmsnorm": lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
    "layernorm": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt(),
    "none": lambda x: x,
}


@torch.no_grad()
@pytest.mark.parametrize("norm", config.NORMS)
def test_a_block_in_either_order_equals_its_definition(norm):
    """Pre-norm: x + f(norm(x)). Post-norm: norm(x + f(x)). Both have the same weights, drawn alike."""
    pre, post = (build(norm=norm, norm_order=order).blocks[0] for order in config.NORM_ORDERS)
    assert equal(pre.state_dict(), post.state_dict())
    x, normed = 3 * torch.randn(2, SEQ, 32), NORMS_BY_HAND[norm]
    between = x + pre.attn(normed(x), CAUSAL)
    torch.testing.assert_close(pre(x, CAUSAL), between + pre.ffn(normed(between)))
    between = normed(x + pre.attn(x, CAUSAL))
    torch.testing.assert_close(post(x, CAUSAL), normed(between + pre.ffn(between)))


FFN_BY_HAND = {
    "relu": lambda up, gate: up.clamp(min=0),
    "relu2": lambda up, gate: up.clamp(min=0) ** 2,
    "gelu": lambda up, gate: up * (1 + torch.erf(up / math.sqrt(2))) / 2,
    "gelu_tanh": lambda up, gate: up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))) / 2,
    "silu": lambda up, gate: up / (1 + torch.exp(-up)),
    "swiglu": lambda up, gate: up * gate / (1 + torch.exp(-gate)),
}


@pytest.mark.parametrize("name", config.FFNS)
def test_an_ffn_equals_its_definition(name):
    torch.manual_seed(0)
    ffn, x = FFN(tiny(ffn=name, bias=True)), 3 * torch.randn(2, 5, 32)
    gate = ffn.gate_proj(x) if ffn.gate_proj else None
    assert (gate is not None) == (name == "swiglu")
    expected = ffn.down_proj(FFN_BY_HAND[name](ffn.up_proj(x), gate))
    torch.testing.assert_close(ffn(x), expected, rtol=1e-4, atol=1e-5)


def test_rope_rotates_each_pair_by_its_own_angle():
    """Coordinates (i, i + K/2) are one complex number, rotated by position * theta^(-2i/K)."""
    torch.manual_seed(0)
    x, positions, width = torch.randn(2, 4, SEQ, 8), torch.arange(SEQ), 8
    angle = positions[:, None] * 10000.0 ** (-2 * torch.arange(4) / width)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    rotated = POSITIONS["rope"](tiny(), SEQ).rotation(positions)(x)
    assert torch.allclose(rotated, torch.cat((expected.real, expected.imag), -1), atol=1e-5)


@torch.no_grad()
def test_dropout_applies_in_training_to_embedding_attention_weights_and_both_branches():
    net, calls = build(dropout=0.5), []
    for name, module in net.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    net(TOKENS)
    assert calls == ["dropout", *["blocks.0.dropout"] * 2, *["blocks.1.dropout"] * 2]
    first, second = (net.blocks[0].attn(torch.ones(1, SEQ, 32).cumsum(1), CAUSAL) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(net.eval()(TOKENS), build()(TOKENS))


# --- initial values


def test_initial_values_depend_on_the_seed_alone_and_the_global_state_is_unchanged():
    """They are the same on the meta device, filled afterwards. No two layers share a draw."""
    kind, changes = "untied_midtraining", {"previous_token_init": 1, "bias": True}
    models = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        models.append(build(kind, **changes).state_dict())
        assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        net = build(kind, **changes)
    assert {parameter.device.type for parameter in net.parameters()} == {"meta"}
    initialise(net.to_empty(device="cpu"), seed=0)
    assert equal(models[0], models[1])
    assert equal(models[0], net.state_dict())
    first, second = (dict(block.named_parameters()) for block in net.blocks)
    assert not any(torch.equal(first[name], second[name]) for name in first if "norm" not in name)


def test_residual_projections_are_scaled():
    """By 1/sqrt(2 n_layers), unless model.residual_scale is another factor."""
    plain = build(residual_scale=1.0).state_dict()
    for scale, factor in ((None, 0.5), (3.0, 3.0)):
        for name, tensor in build(residual_scale=scale).state_dict().items():
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert torch.equal(tensor, plain[name] * factor if residual else plain[name])


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("tied_scaled", {"n_kv_heads": 1, "norm_order": "post"}),
        ("tied_scaled", {"n_kv_heads": 1, "norm": "layernorm"}),
        ("untied", {}),
    ],
)
def test_previous_token_init_looks_i_tokens_back(kind, parts):
    sizes = {"d_model": 64, "rope_theta": 30.0, "qk_norm": True, "residual_scale": 0.0}
    net = build(kind, **sizes, **parts, previous_token_init=2)
    inputs = []
    for block in net.blocks:
        block.attn.register_forward_pre_hook(lambda module, args: inputs.append((module, *args)))
    net(TOKENS)
    assert len(inputs) == 2
    for attn, x, context in inputs:
        q = context.rotate(attn.q_norm(attn.heads(attn.q_proj(x))))
        k = context.rotate(attn.k_norm(attn.heads(attn.k_proj(x))))
        scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) / attn.head_dim**0.5
        weights = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf).softmax(-1)
        attended = weights[:, :, 8:].mean(0).argmax(-1)  # (H, T)
        assert torch.equal(attended, torch.arange(8, SEQ) - torch.arange(1, 5)[:, None])


@pytest.mark.parametrize("head", ["tied", "untied", "tied_projected"])
def test_parameters_and_flops_in_closed_form(head):
    """Six FLOPs per weight of the matrices and the logits, and twelve L T D for attention; none for the embedding.

    Tied and untied take the same FLOPs; a projection takes its own.
    """
    d, f, layers, v, t = 32, 64, 2, VOCAB, SEQ
    with torch.device("meta"):
        net = build(head, ffn="swiglu")
    blocks = {"attention": layers * 4 * d * d, "ffn": layers * 3 * d * f, "norm": (2 * layers + 1) * d}
    own = {"tied": {}, "untied": {"head": v * d}, "tied_projected": {"head": d * d}}[head]
    assert n_params_by_role(net) == {"embedding": v * d, **blocks, **own}
    projection = d * d if head == "tied_projected" else 0
    matrices = blocks["attention"] + blocks["ffn"] + v * d + projection
    assert flops_per_token(net) == 6 * matrices + 12 * layers * t * d


class LooksAtValues(nn.Module):
    """A linear map of rank one, whose size the configuration does not tell, and which the meta device cannot run."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1, in_features)), nn.Parameter(torch.ones(out_features, 1))

    def forward(self, x):
        return x @ self.a.T @ self.b.T + float(x.detach().sum() > 1e9)


def test_the_parameters_and_flops_of_a_class_of_ones_own_are_counted():
    net = build("tied", linear=f"{__name__}.LooksAtValues", position="learned")
    by_role = n_params_by_role(net)
    blocks = {"attention": 2 * 4 * (32 + 32), "ffn": 2 * 2 * (32 + 64), "norm": 5 * 32}
    assert by_role == {"embedding": VOCAB * 32, "position": SEQ * 32, **blocks}
    assert sum(by_role.values()) == n_params(net) == sum(math.prod(t.shape) for t in net.state_dict().values())
    assert flops_per_token(net) == 6 * (blocks["attention"] + blocks["ffn"] + VOCAB * 32) + 12 * 2 * SEQ * 32


# --- Linear

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


# --- dropout on a CPU


def projections(n_keys, *, heads=4, kv_heads=4, dtype=torch.float32):
    """Queries, keys and values as the model gives them: (B, H, T, K), each a view of (B, T, H, K)."""
    shapes = [(2, n_keys, n, 8) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def test_dropout_zeroes_elements_independently_and_divides_the_others():
    torch.manual_seed(0)
    for p in (0.001, 0.2, 0.5, 0.99999):
        x = Dropout(p)(torch.ones(400_000))
        dropped = (x == 0).float()
        assert abs(dropped.mean() - p) < 5 * math.sqrt(p / len(x)) + 1 / 65536
        assert torch.allclose(x[x != 0], torch.tensor(1 / (1 - p)))
        quarters = dropped.view(-1, 4)  # of one draw
        assert (quarters.mean(0) - p).abs().max() < 10 * math.sqrt(p / len(x)) + 1 / 65536
        assert p > 0.9 or (quarters[:, 0] * quarters[:, 3]).mean() < p * p + 10 * p / math.sqrt(len(x))
    assert torch.equal(Dropout(0.5).eval()(x), x)


@each("kv_heads", [4, 2, 1])
@each("n_keys", [1, 7, 64, 65, 150])
@each("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_drops_almost_nothing_equals_torchs_in_value_and_gradients(n_keys, kv_heads, dtype):
    inputs = projections(n_keys, kv_heads=kv_heads, dtype=dtype)
    own, torchs = attention(*inputs, None, 1e-9), attention(*inputs, None)
    g = torch.randn(own.shape).to(dtype)
    results = ([y, *torch.autograd.grad(y, inputs, g)] for y in (own, torchs))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5 if dtype == torch.float32 else 0.06, rtol=0.02)


def test_attention_drops_weights_of_the_past_and_has_the_gradients_of_what_it_computes(monkeypatch):
    monkeypatch.setattr("lm.model.kernels.CHUNK", 3)  # so that few keys are several chunks
    torch.manual_seed(0)
    q, k, v = projections(7, dtype=torch.float64)
    exact = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    unit = torch.eye(7, dtype=torch.float64).expand(2, 4, 7, 7)  # as values, it shows the weights
    weights = torch.stack([attention(q, k, unit, None, 0.25) for _ in range(200)])
    kept = weights != 0
    assert torch.allclose(weights[kept], (exact / 0.75).expand_as(weights)[kept])
    assert not kept.triu(1).any()
    assert abs(kept.double().mean() / (28 / 49) - 0.75) < 0.01

    def repeated(*inputs):
        torch.manual_seed(0)
        return attention(*inputs, None, 0.25)

    assert torch.autograd.gradcheck(repeated, (q, k, v))


# --- raw logits: the loss, argmax and samples


def test_the_loss_takes_logits():
    """A softmax before it would give another."""
    net = build("untied")
    p = net(TOKENS).softmax(-1)
    by_hand = -p.gather(-1, TARGETS[..., None]).log().mean()
    assert plain(net, TOKENS, TARGETS).item() == pytest.approx(by_hand.item())
    assert abs(F.cross_entropy(p.flatten(0, 1), TARGETS.flatten()) - by_hand) > 1e-4


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
