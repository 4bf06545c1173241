"""Parameters by role and FLOPs per token, compared with closed forms and with a count of the matmuls that run."""

import math
from typing import Any

import pytest
import torch
from conftest import HEADS, SEQ, TIED, VOCAB, tiny
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lm.config import HeadConfig, ModelConfig
from lm.model import Transformer
from lm.model.size import flops_per_token, n_params, n_params_by_role


def on_meta(config: ModelConfig, head: HeadConfig, vocab_size: int = VOCAB, seq_len: int = SEQ) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, head, vocab_size=vocab_size, seq_len=seq_len)


class TwoFactors(nn.Module):
    """A linear map of rank one, whose size does not follow from the configuration."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1, in_features)), nn.Parameter(torch.ones(out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.T @ self.b.T


class LooksAtValues(TwoFactors):
    """As a mixture of experts does: the meta device has no values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(x.detach().sum() > 1e9)


class Matmuls(TorchDispatchMode):
    """Adds up 2 m k n for every matmul that runs."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


CASES = [  # each variant once, each head once or more
    (tiny(), "tied"),
    (tiny(ffn="swiglu", d_ff=48), "untied"),
    (tiny(n_kv_heads=1), "tied_projected"),
    (tiny(n_kv_heads=2, qk_norm=True, bias=True, norm="layernorm"), "tied_scaled"),
    (tiny(position="learned", n_layers=3), "untied_from_embedding"),
    (tiny(linear=f"{__name__}.TwoFactors"), "untied_midtraining"),
    (tiny(linear=f"{__name__}.LooksAtValues"), "tied"),
]


@pytest.mark.parametrize(("config", "name"), CASES, ids=range(len(CASES)))
def test_each_tensor_counts_once_and_flops_are_the_matmuls_that_run(config: ModelConfig, name: str) -> None:
    net = Transformer(config, HEADS[name], vocab_size=VOCAB, seq_len=SEQ)
    by_role = n_params_by_role(net)
    assert set(by_role) <= {"embedding", "position", "attention", "ffn", "norm", "head"}
    assert sum(by_role.values()) == n_params(net) == sum(math.prod(t.shape) for t in net.state_dict().values())
    assert by_role["embedding"] == VOCAB * 32
    assert by_role.get("head", 0) == {"tied": 0, "tied_scaled": 0, "tied_projected": 32 * 32}.get(name, VOCAB * 32)
    assert by_role.get("position", 0) == (SEQ * 32 if config.position == "learned" else 0)
    tokens = torch.zeros(3, SEQ, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), Matmuls() as matmuls:
        net(tokens).sum().backward()
    assert matmuls.flops / tokens.numel() == flops_per_token(net)


def test_parameters_of_the_default_model_in_closed_form() -> None:
    d, f, layers, v = 128, 320, 4, 2048
    blocks = {"attention": layers * 4 * d * d, "ffn": layers * 3 * d * f, "norm": (2 * layers + 1) * d}
    net = on_meta(ModelConfig(), HEADS["untied"], vocab_size=v, seq_len=128)
    assert n_params_by_role(net) == {"embedding": v * d, **blocks, "head": v * d}


@pytest.mark.parametrize(
    ("ffn", "n_ffn", "position"), [("relu2", 2, "rope"), ("gelu", 2, "none"), ("swiglu", 3, "learned")]
)
def test_flops_in_closed_form(ffn: str, n_ffn: int, position: str) -> None:
    """Six per weight of the matrices and the head, and twelve L T D for attention; nothing for embedding and norms."""
    layers, d, f, v, t = 2, 32, 64, VOCAB, SEQ
    expected = 6 * (layers * (4 * d * d + n_ffn * d * f) + v * d) + 12 * layers * t * d
    assert flops_per_token(on_meta(tiny(ffn=ffn, position=position), TIED)) == expected


def test_all_heads_take_equal_flops_except_for_a_projection() -> None:
    flops = {name: flops_per_token(on_meta(tiny(), head)) for name, head in HEADS.items()}
    assert flops.pop("tied_projected") == flops["tied"] + 6 * 32 * 32
    assert set(flops.values()) == {flops["tied"]}


def test_counting_needs_no_memory_and_has_no_side_effects() -> None:
    state = torch.get_rng_state()
    net = on_meta(tiny(d_model=8192, n_heads=64, d_ff=65536, n_layers=8), TIED, vocab_size=200_000, seq_len=4096)
    assert flops_per_token(net) > 6 * n_params(net)
    assert torch.equal(torch.get_rng_state(), state)
