"""Parameters by role and FLOPs per token, compared with closed forms and with a count of the matmuls that run."""

import math
from typing import Any

import pytest
import torch
from conftest import HEADS, SEQ, VOCAB, tiny
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lm.config import ModelConfig
from lm.model import Transformer
from lm.model.size import flops_per_token, n_params, n_params_by_role


class LooksAtValues(nn.Module):
    """A linear map of rank one, whose size the configuration does not tell, and which the meta device cannot run."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1, in_features)), nn.Parameter(torch.ones(out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.T @ self.b.T + float(x.detach().sum() > 1e9)


class Matmuls(TorchDispatchMode):
    """Adds up 2 m k n for every matmul that runs."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


CASES = [
    (tiny(), "tied"),
    (tiny(ffn="swiglu", d_ff=48), "untied"),
    (tiny(n_kv_heads=1), "tied_projected"),
    (tiny(n_kv_heads=2, qk_norm=True, bias=True, norm="layernorm"), "tied_scaled"),
    (tiny(position="learned", n_layers=3), "untied_from_embedding"),
    (tiny(linear=f"{__name__}.LooksAtValues"), "untied_midtraining"),
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


@pytest.mark.parametrize("head", ["tied", "untied", "tied_projected"])
def test_the_default_model_in_closed_form(head: str) -> None:
    """Six FLOPs per weight of the matrices and the logits, and twelve L T D for attention; none for the embedding.

    Tied and untied take the same FLOPs; a projection takes its own. Counting has no side effects.
    """
    d, f, layers, v, t = 128, 320, 4, 2048, 128
    state = torch.get_rng_state()
    with torch.device("meta"):
        net = Transformer(ModelConfig(), HEADS[head], vocab_size=v, seq_len=t)
    blocks = {"attention": layers * 4 * d * d, "ffn": layers * 3 * d * f, "norm": (2 * layers + 1) * d}
    own = {"tied": {}, "untied": {"head": v * d}, "tied_projected": {"head": d * d}}[head]
    assert n_params_by_role(net) == {"embedding": v * d, **blocks, **own}
    projection = d * d if head == "tied_projected" else 0
    matrices = blocks["attention"] + blocks["ffn"] + v * d + projection
    assert flops_per_token(net) == 6 * matrices + 12 * layers * t * d
    assert torch.equal(torch.get_rng_state(), state)
