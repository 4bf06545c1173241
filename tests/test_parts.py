"""Parts written the usual PyTorch way, with parameters and buffers made in the constructor, can be used as they are."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SEQ, TEXT, TIED, VOCAB, tiny
from test_train import short
from torch import Tensor, nn

from lm.config import BadInput, ModelConfig, OptimConfig
from lm.data.vocabulary import byte_tokenizer
from lm.exchange.portable import load_model, save_model
from lm.model import ffn, head, norm, position
from lm.model.linear import Linear
from lm.model.position import NoPosition
from lm.model.transformer import Transformer
from lm.training.optim import build_optimizer
from lm.training.train import train


class PlainNorm(nn.Module):
    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.weight


class PlainFFN(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(0.1 * torch.randn(config.d_ff, config.d_model))
        self.experts = nn.Parameter(0.1 * torch.randn(2, config.d_model, config.d_ff))
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x @ self.up.T, self.slope) @ self.experts.sum(0).T


class PlainPosition(NoPosition):
    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__(config, seq_len)
        self.register_buffer("angles", torch.arange(seq_len)[:, None] / torch.arange(1, config.d_model + 1))
        self.scale = nn.Parameter(torch.full((config.d_model,), 0.1))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.scale * self.angles[positions].sin()


class PlainHead(head.TiedHead):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.scale * super().forward(x, embedding)


class PlainLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class ScaledLinear(Linear):
    """Inherits a reset_parameters that does not know its own parameter."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.scale = nn.Parameter(torch.ones(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Diagonal(nn.Module):
    """Has no matrix whose initial value could be scaled."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight, self.out_features = nn.Parameter(torch.ones(in_features)), out_features

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).mean(-1, keepdim=True).expand(*x.shape[:-1], self.out_features)


PARTS: dict[str, tuple[dict[str, Any], str, type]] = {
    "norm": (norm.NORMS, "rmsnorm", PlainNorm),
    "ffn": (ffn.FFNS, "relu2", PlainFFN),
    "position": (position.POSITIONS, "none", PlainPosition),
    "head": (head.HEADS, "tied", PlainHead),
}
Build = Callable[..., Transformer]


@pytest.fixture(params=[*PARTS, "PlainLinear", "ScaledLinear"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds models with one such part."""
    changes = {"qk_norm": True, "position": "none"}
    if request.param in PARTS:
        table, key, part = PARTS[request.param]
        monkeypatch.setitem(table, key, part)
    else:
        changes["linear"] = f"{__name__}.{request.param}"
    return lambda seed=0, v=VOCAB: Transformer(tiny(**changes), TIED, vocab_size=v, seq_len=SEQ, seed=seed)


def drawn(net: Transformer) -> list[str]:
    """The parameters that do not begin as one constant."""
    return [name for name, value in net.named_parameters() if value.unique().numel() > 1]


def test_initial_values_depend_on_the_seed_alone(build: Build) -> None:
    torch.manual_seed(1)
    one = build().state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    other = build().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    seeded = build(seed=1)
    assert not any(torch.equal(one[name], seeded.state_dict()[name]) for name in drawn(seeded))


def test_what_a_constructor_makes_is_kept_and_the_other_parts_are_unchanged(build: Build) -> None:
    plain = Transformer(tiny(qk_norm=True, position="none"), TIED, vocab_size=VOCAB, seq_len=SEQ).state_dict()
    constants = {"norm.weight": 1.0, "head.scale": 1.0, "position.scale": 0.1, "blocks.0.ffn.slope": 0.5}
    constants |= {"blocks.1.attn.v_proj.scale": 1.0}
    for name, value in build().state_dict().items():
        assert value.isfinite().all()
        if name in constants:
            assert (value == constants[name]).all()
        elif name in plain and "_proj" not in name:
            assert torch.equal(value, plain[name])


def test_no_two_layers_share_their_draws(build: Build) -> None:
    net = build()
    first, second = (dict(block.named_parameters()) for block in net.blocks)
    assert not any(torch.equal(first[name], second[name]) for name in first if f"blocks.0.{name}" in drawn(net))


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_it_trains_and_is_saved(build: Build, optim: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    net = build(v=tokenizer.vocab_size)
    before = copy.deepcopy(net.state_dict())
    own: dict[str, Any] = {"adam_lr": 0.01, "momentum": 0.9, "ns_steps": 4} if optim == "muon" else {}
    optimizer = build_optimizer(net, OptimConfig(name=optim, warmup_steps=0, weight_decay=0.0, **own), TIED)
    tokens, targets = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [name for name, value in net.named_parameters() if torch.equal(value, before[name])] == []
    save_model(net, tokenizer, tmp_path / "model")
    assert torch.equal(load_model(tmp_path, trust=True)[0](tokens), net.eval()(tokens))


def test_after_to_empty_a_class_without_reset_parameters_is_named(build: Build, request: Any) -> None:
    with torch.device("meta"):
        net = build()
    if "ScaledLinear" in request.node.name:
        return  # it has one
    with pytest.raises(BadInput, match=r"^Plain\w+: has no reset_parameters\(\)"):
        net.to_empty(device="cpu").initialise(0)


def test_a_linear_class_without_a_matrix_needs_residual_scale_1() -> None:
    config = tiny(linear=f"{__name__}.Diagonal")
    with pytest.raises(BadInput, match=r"^model\.linear=test_parts\.Diagonal: .* add model\.residual_scale=1"):
        Transformer(config, TIED, vocab_size=VOCAB, seq_len=SEQ)
    net = Transformer(tiny(linear=config.linear, residual_scale=1.0), TIED, vocab_size=VOCAB, seq_len=SEQ)
    assert net.blocks[0].ffn.down_proj.weight.tolist() == [1.0] * 64


def test_a_whole_run_uses_a_plain_linear_class(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT)
    model = ModelConfig(n_layers=1, d_model=16, n_heads=2, d_ff=32, linear=f"{__name__}.PlainLinear")
    result = train(short(corpus, tmp_path / "run", model=model))
    assert result["val_loss"] < math.log(257) - 0.1
    assert result["n_params_by_role"]["attention"] == 4 * 16 * 16
