"""Properties of every model that the tables of parts can build, and the definitions of some parts."""

import math
from copy import deepcopy
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import EVERY_HEAD as HEADS
from conftest import SEQ, VOCAB, some, tiny
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
ALL = list(product(*AXES.values()))
FEW = [[list(axis)[i % len(axis)] for axis in AXES.values()] for i in range(max(map(len, AXES.values())))]
MAIN = ("tied", "untied")  # in every combination; the other variants in a few, in which every choice occurs
CHOICES = [(*choice, kind) for kind in HEADS for choice in (ALL if kind in MAIN else FEW)]
MODELS = [dict(zip((*AXES, "kind"), choice, strict=True)) for choice in CHOICES]
TOKENS, OTHERS = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))


def build(kind: str = "untied", **changes) -> Transformer:
    return Transformer(tiny(**changes), HEADS[kind], vocab_size=VOCAB, seq_len=SEQ)


@pytest.fixture(scope="module", params=some(MODELS, 3), ids=lambda model: "-".join(map(str, model.values())))
def net(request: pytest.FixtureRequest) -> Transformer:
    """Each model in turn; a test that changes it makes a copy."""
    return build(**request.param)


@pytest.mark.parametrize("name", ["NORMS", "FFNS", "POSITIONS", "HEADS", "OPTIMIZERS"])
def test_tables_hold_what_the_schema_names(name: str) -> None:
    [table] = [getattr(module, name) for module in (norm, ffn, position, head, optim) if name in vars(module)][-1:]
    assert set(table) == set(getattr(names, name))


def test_every_variant_is_tested_with_every_choice_of_each_part() -> None:
    for kind in HEADS:
        tested = [{model[axis] for model in MODELS if model["kind"] == kind} for axis in AXES]
        assert tested == [set(choices) for choices in AXES.values()]


def test_logits_depend_on_the_present_and_the_past_alone(net: Transformer) -> None:
    """Row t of a batch differs from the first text from position t on, so its logits must differ only from there on."""
    first = TOKENS[0].expand(SEQ, SEQ)
    changed = torch.where(torch.ones(SEQ, SEQ).triu().bool(), (first + 1) % VOCAB, first)
    with torch.no_grad():
        gap = (net(changed) - net(first)).abs().amax(-1)
    assert gap.tril(-1).max() < 1e-6
    assert gap.diagonal().min() > 1e-4


def test_cached_equals_full(net: Transformer) -> None:
    """Token by token and in chunks, through a cache that is longer than needed."""
    tokens = TOKENS[:, :5]
    with torch.no_grad():
        full = net(tokens)
        for lengths in ([1] * 5, [2, 1, 2]):
            cache, at = KVCache(SEQ), torch.arange(5).expand(len(tokens), -1).split(lengths, 1)
            parts = [net(part, p, cache) for part, p in zip(tokens.split(lengths, 1), at, strict=True)]
            assert torch.allclose(torch.cat(parts, 1), full, atol=1e-5)


def test_first_loss_is_near_ln_v_and_every_parameter_has_moved_by_step_three(net: Transformer) -> None:
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
def test_only_a_layer_without_positions_is_invariant_to_the_order_of_the_past(scheme: str) -> None:
    """Without positions a shuffle of the earlier tokens leaves the last logits equal; with positions it does not."""
    net, order = build(n_layers=1, position=scheme), torch.randperm(SEQ - 1, generator=torch.Generator().manual_seed(1))
    shuffled = torch.cat((TOKENS[:, order], TOKENS[:, -1:]), 1)
    with torch.no_grad():
        gap = (net(TOKENS) - net(shuffled))[:, -1].abs().max()
    assert (gap < 1e-6) == (scheme == "none")


CAUSAL = Context(torch.arange(SEQ), lambda heads: heads, None, NO_CACHE)


@lru_cache
def qkv(n_kv_heads: int | None) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    return Attention(tiny(n_kv_heads=n_kv_heads), layer=0), torch.randn(3, SEQ, 32)


@pytest.mark.parametrize("n_kv_heads", [None, 2, 1], ids=["multi-head", "grouped", "multi-query"])
def test_attention_equals_its_definition(n_kv_heads: int | None) -> None:
    attn, x = qkv(n_kv_heads)
    q, k, v = (attn.heads(project(x)) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    k, v = (each.repeat_interleave(4 // (n_kv_heads or 4), dim=1) for each in (k, v))
    scores = q @ k.mT / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -math.inf)
    expected = attn.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(attn(x, CAUSAL), expected, atol=1e-6)


def test_rope_rotates_each_pair_by_its_own_angle() -> None:
    """Coordinates (i, i + K/2) are one complex number, rotated by position * theta^(-2i/K)."""
    torch.manual_seed(0)
    x, at, width = torch.randn(2, 4, SEQ, 8), torch.arange(SEQ), 8
    angle = at[:, None] * 10000.0 ** (-2 * torch.arange(4) / width)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    rotated = POSITIONS["rope"](tiny(), SEQ).rotation(at)(x)
    assert torch.allclose(rotated, torch.cat((expected.real, expected.imag), -1), atol=1e-5)


def test_rope_scores_depend_on_the_relative_position_alone() -> None:
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


def test_dropout_applies_to_embedding_attention_weights_and_both_residual_branches() -> None:
    net, calls = build(dropout=0.5), []
    for name, module in net.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    net(TOKENS)
    assert calls == ["dropout", *["blocks.0.dropout"] * 2, *["blocks.1.dropout"] * 2]
    attn, x = net.blocks[0].attn, torch.randn(3, SEQ, 32)
    one, two = (attn(x, CAUSAL) for _ in range(2))
    assert not torch.equal(one, two)
