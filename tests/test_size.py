"""Parameters by role and FLOPs per token, compared with closed forms and with a count of the matmuls that run."""

import math

import pytest
import torch
from conftest import HEADS, SEQ, TIED, VOCAB, tiny
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lm.config import HeadConfig, ModelConfig
from lm.model.size import flops_per_token, n_params, n_params_by_role
from lm.model.transformer import Transformer


def ghost(config: ModelConfig, head: HeadConfig, vocab_size: int = VOCAB, seq_len: int = SEQ) -> Transformer:
    """A model on the meta device."""
    with torch.device("meta"):
        return Transformer(config, head, vocab_size=vocab_size, seq_len=seq_len)


class TwoFactors(nn.Module):
    """A linear map of rank one, whose size does not follow from the configuration."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1, in_features)), nn.Parameter(torch.ones(out_features, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a.T @ self.b.T


VARIANTS = [
    tiny(),
    tiny(ffn="swiglu", d_ff=48),
    tiny(n_kv_heads=1),
    tiny(n_kv_heads=2, qk_norm=True, bias=True, norm="layernorm"),
    tiny(position="learned", n_layers=3),
    tiny(linear=f"{__name__}.TwoFactors"),
]
each_variant = pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
each_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def own_matrix(head: HeadConfig, v: int, d: int) -> int:
    """Parameters of a variant without the embedding."""
    return {"tied": 0, "tied_scaled": 0, "tied_projected": d * d}.get(head.name, v * d)


@each_head
@each_variant
def test_roles_add_up_and_each_tensor_counts_once(config: ModelConfig, head: HeadConfig) -> None:
    net = ghost(config, head)
    by_role = n_params_by_role(net)
    assert sum(by_role.values()) == n_params(net) == sum(math.prod(t.shape) for t in net.state_dict().values())
    assert by_role["embedding"] == VOCAB * 32
    assert by_role.get("head", 0) == own_matrix(head, VOCAB, 32)
    assert by_role.get("position", 0) == (SEQ * 32 if config.position == "learned" else 0)
    assert set(by_role) <= {"embedding", "position", "attention", "ffn", "norm", "head"}


@each_head
def test_parameters_of_the_default_model_in_closed_form(head: HeadConfig) -> None:
    net = ghost(ModelConfig(), head, vocab_size=2048, seq_len=128)
    d, f, layers, v = 128, 320, 4, 2048
    expected = {
        "embedding": v * d,
        "attention": layers * 4 * d * d,
        "ffn": layers * 3 * d * f,
        "norm": (2 * layers + 1) * d,
    }
    own = own_matrix(head, v, d)
    assert n_params_by_role(net) == expected | ({"head": own} if own else {})


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
@pytest.mark.parametrize(("ffn", "n_ffn"), [("relu2", 2), ("gelu", 2), ("swiglu", 3)])
def test_flops_in_closed_form(ffn: str, n_ffn: int, position: str) -> None:
    """Six per weight of the matrices and the head, and twelve L T D for attention; nothing for embedding and norms."""
    config = tiny(ffn=ffn, position=position)
    layers, d, f, v, t = 2, 32, 64, VOCAB, SEQ
    expected = 6 * (layers * (4 * d * d + n_ffn * d * f) + v * d) + 12 * layers * t * d
    assert flops_per_token(ghost(config, TIED)) == expected


@each_variant
def test_all_variants_take_equal_flops_except_for_a_projection(config: ModelConfig) -> None:
    flops = {name: flops_per_token(ghost(config, head)) for name, head in HEADS.items()}
    assert flops.pop("tied_projected") == flops["tied"] + 6 * 32 * 32
    assert set(flops.values()) == {flops["tied"]}


class Matmuls(TorchDispatchMode):
    """Adds up 2 m k n for every matmul that runs."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


@each_head
@each_variant
def test_flops_are_the_matmuls_that_run(config: ModelConfig, head: HeadConfig) -> None:
    net = ghost(config, head).to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    tokens = torch.zeros(3, SEQ, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), Matmuls() as matmuls:
        net(tokens).sum().backward()
    assert matmuls.flops / tokens.numel() == flops_per_token(net)


def test_counting_needs_no_memory_and_has_no_side_effects() -> None:
    net = ghost(tiny(d_model=8192, n_heads=64, d_ff=65536, n_layers=8), TIED, vocab_size=200_000, seq_len=4096)
    assert flops_per_token(net) > 6 * n_params(net)
    small = Transformer(tiny(), TIED, vocab_size=VOCAB, seq_len=SEQ)
    state = torch.get_rng_state()
    flops_per_token(small)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in small.parameters())
