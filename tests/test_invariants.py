"""What holds for every model that the tables can build, and what a part means."""

import math
from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import HEADS, SEQ, VOCAB, tiny
from torch import Tensor, nn

from lm import config as names
from lm.config import OptimConfig
from lm.model import ffn, head, norm, position
from lm.model.attention import Attention, Context
from lm.model.cache import NO_CACHE, KVCache
from lm.model.position import POSITIONS
from lm.model.transformer import Transformer
from lm.training import optim
from lm.training.optim import build_optimizer

AXES = {
    "norm": norm.NORMS,
    "ffn": ffn.FFNS,
    "position": position.POSITIONS,
    "qk_norm": (False, True),
    "bias": (False, True),
    "n_kv_heads": (None, 1),
}
BODIES = list(product(*AXES.values()))
MAIN = ("tied", "untied")  # with every body; the other regimes with a few bodies, in which every choice occurs
CELLS = [(*body, kind) for kind in HEADS for body in (BODIES if kind in MAIN else BODIES[::63])]
MODELS = [dict(zip((*AXES, "kind"), cell, strict=True)) for cell in CELLS]
TOKENS, OTHERS = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))


def build(kind: str = "untied", **body) -> Transformer:
    return Transformer(tiny(**body), HEADS[kind], vocab_size=VOCAB, seq_len=SEQ)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(map(str, model.values())))
def net(request: pytest.FixtureRequest) -> Transformer:
    """Each model of the tables in turn; a test that changes it takes a copy."""
    return build(**request.param)


@pytest.mark.parametrize("name", ["NORMS", "FFNS", "POSITIONS", "HEADS", "OPTIMIZERS"])
def test_tables_hold_what_the_schema_names(name: str) -> None:
    [table] = [getattr(module, name) for module in (norm, ffn, position, head, optim) if name in vars(module)][-1:]
    assert set(table) == set(getattr(names, name))


def test_every_regime_meets_every_choice_of_a_part() -> None:
    for kind in HEADS:
        met = [{model[axis] for model in MODELS if model["kind"] == kind} for axis in AXES]
        assert met == [set(choices) for choices in AXES.values()]


def test_the_future_is_invisible_and_the_present_is_not(net: Transformer) -> None:
    """Row t of a batch differs from the first text from position t on, and so do its logits, and only there."""
    first = TOKENS[0].expand(SEQ, SEQ)
    changed = torch.where(torch.ones(SEQ, SEQ).triu().bool(), (first + 1) % VOCAB, first)
    with torch.no_grad():
        gap = (net(changed) - net(first)).abs().amax(-1)
    assert gap.tril(-1).max() < 1e-6
    assert gap.diagonal().min() > 1e-4


def test_cached_equals_full(net: Transformer) -> None:
    """Token by token and in chunks, through a cache that has room to spare."""
    tokens = TOKENS[:, :5]
    with torch.no_grad():
        full = net(tokens)
        for lengths in ([1] * 5, [2, 1, 2]):
            remembered, at = KVCache(SEQ), torch.arange(5).expand(len(tokens), -1).split(lengths, 1)
            parts = [net(part, p, remembered) for part, p in zip(tokens.split(lengths, 1), at, strict=True)]
            assert torch.allclose(torch.cat(parts, 1), full, atol=1e-5)


def test_starts_near_ln_v_and_every_parameter_moves_by_step_three(net: Transformer) -> None:
    """Without weight decay, so that only a gradient can move a parameter."""
    net = deepcopy(net)
    optimizer = build_optimizer(net, OptimConfig(weight_decay=0.0, warmup_steps=0), net.head_config)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(net(TOKENS).flatten(0, 1), OTHERS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(VOCAB)) < 0.1
    assert losses[2] < losses[0]
    assert [name for name, parameter in net.named_parameters() if torch.equal(parameter, before[name])] == []


@pytest.mark.parametrize("scheme", POSITIONS)
def test_without_positions_one_layer_sees_the_past_as_a_set(scheme: str) -> None:
    """The last token's logits survive a shuffle of what lies before it, and not so with positions."""
    net, order = build(n_layers=1, position=scheme), torch.randperm(SEQ - 1, generator=torch.Generator().manual_seed(1))
    shuffled = torch.cat((TOKENS[:, order], TOKENS[:, -1:]), 1)
    with torch.no_grad():
        gap = (net(TOKENS) - net(shuffled))[:, -1].abs().max()
    assert gap < 1e-6 if scheme == "none" else gap > 1e-4


PLAIN = Context(torch.arange(SEQ), lambda heads: heads, None, NO_CACHE)


@cache
def qkv(n_kv_heads: int | None) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    return Attention(tiny(n_kv_heads=n_kv_heads), layer=0), torch.randn(3, SEQ, 32)


@pytest.mark.parametrize("n_kv_heads", [None, 2, 1], ids=["multi-head", "grouped", "multi-query"])
def test_attention_is_its_specification(n_kv_heads: int | None) -> None:
    attn, x = qkv(n_kv_heads)
    q, k, v = (attn.heads(project(x)) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    k, v = (each.repeat_interleave(4 // (n_kv_heads or 4), dim=1) for each in (k, v))
    scores = q @ k.mT / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -math.inf)
    expected = attn.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(attn(x, PLAIN), expected, atol=1e-6)


def test_rope_turns_pairs_by_their_own_angle() -> None:
    """Coordinates (i, i + K/2) are one complex number, turned by position * theta^(-2i/K)."""
    torch.manual_seed(0)
    x, at, width = torch.randn(2, 4, SEQ, 8), torch.arange(SEQ), 8
    angle = at[:, None] * 10000.0 ** (-2 * torch.arange(4) / width)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    rotated = POSITIONS["rope"](tiny(), SEQ).rotation(at)(x)
    assert torch.allclose(rotated, torch.cat((turned.real, turned.imag), -1), atol=1e-5)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    rope, (q, k) = POSITIONS["rope"](tiny(), SEQ), torch.randn(2, 1, 1, 1, 8)
    here, there = rope.rotation(torch.arange(SEQ)), rope.rotation(torch.arange(SEQ) + 100)
    q, k = q.expand(1, 1, SEQ, 8), k.expand(1, 1, SEQ, 8)
    scores = (here(q) @ here(k).mT)[0, 0]
    assert torch.allclose(scores, (there(q) @ there(k).mT)[0, 0], atol=1e-3)
    assert all(scores.diagonal(distance).std() < 1e-4 for distance in range(2 - SEQ, SEQ - 1))
    assert scores[0].std() > 0.1  # and they do depend on it


def test_dropout_is_active_in_training_only() -> None:
    net, plain = build(dropout=0.5), build()
    with torch.no_grad():
        assert not torch.equal(net(TOKENS), net(TOKENS))
        assert torch.equal(net.eval()(TOKENS), plain(TOKENS))


def test_dropout_stands_at_the_embedding_the_weights_of_attention_and_both_branches() -> None:
    net, calls = build(dropout=0.5), []
    for name, module in net.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    net(TOKENS)
    assert calls == ["dropout", *["blocks.0.dropout"] * 2, *["blocks.1.dropout"] * 2]
    attn, x = net.blocks[0].attn, torch.randn(3, SEQ, 32)
    one, two = (attn(x, PLAIN) for _ in range(2))
    assert not torch.equal(one, two)
