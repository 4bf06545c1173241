"""A model takes over the weights of another with another head: exactly where one can hold the other, else by a rule."""

from dataclasses import replace

import pytest
import torch
from conftest import HEADS, SEQ, TIED, UNTIED, VOCAB, tiny
from helpers.models import random_tokens
from torch import Tensor

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.config.run import TIED_MATRICES
from lm.model import Transformer
from lm.training.init_from import copy_weights

TOKENS = random_tokens(4, SEQ)
SCALED, PROJECTED, MIDTRAINING = (HEADS[name] for name in ("tied_scaled", "tied_projected", "untied_midtraining"))
each = pytest.mark.parametrize


def build(head: HeadConfig, seed: int = 0, seq_len: int = SEQ, config: ModelConfig | None = None) -> Transformer:
    return Transformer(config or tiny(), head, vocab_size=VOCAB, seq_len=seq_len, seed=seed).eval()


def trained(head: HeadConfig) -> Transformer:
    """A model with no parameter at its initial value: no matrix is a copy of another or the identity."""
    net, generator = build(head, seed=1), torch.Generator().manual_seed(2)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return net


@torch.no_grad()
def logits(net: Transformer) -> Tensor:
    return net(TOKENS)


def converted(net: Transformer, head: HeadConfig, rule: str | None = None, seq_len: int = SEQ) -> Transformer:
    new = build(head, seq_len=seq_len, config=net.config)
    copy_weights(new, net, rule)
    return new


EXACT = [
    *((old, UNTIED) for old in HEADS.values()),
    *((old, HEADS["untied_from_embedding"]) for old in HEADS.values()),
    *((head, head) for head in HEADS.values() if head is not MIDTRAINING),
    *((TIED, PROJECTED), (SCALED, PROJECTED), (PROJECTED, replace(PROJECTED, embedding_multiplier=3.0))),
    *((TIED, MIDTRAINING), (TIED, replace(TIED, name="tied_naive", embedding_std=1.0))),
]


@each(("old", "new"), EXACT, ids=lambda head: head.name)
def test_a_head_that_can_hold_the_old_one_computes_the_same(old: HeadConfig, new: HeadConfig) -> None:
    """Bit for bit, but where two products become one matrix or a factor moves into another."""
    net = trained(old)
    net.head.before_save(net.embed.weight)
    new_net = converted(net, new)
    if old.kind == new.kind and old.embedding_multiplier == new.embedding_multiplier:
        assert all(torch.equal(net.state_dict()[key], value) for key, value in new_net.state_dict().items())
    if PROJECTED.kind in (old.kind, new.kind) and old != new:
        torch.testing.assert_close(logits(new_net), logits(net), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(logits(new_net), logits(net))


def test_a_head_that_unties_later_begins_tied() -> None:
    net = converted(trained(TIED), MIDTRAINING)
    before = logits(net)
    net.head.on_train_step(0.0, net.embed.weight, {})
    assert net.head.matrix(net.embed.weight) is net.embed.weight
    assert torch.equal(logits(net), before)


@each("new", [TIED, MIDTRAINING])
@each("old", [head for head in HEADS.values() if head not in (TIED, SCALED)], ids=lambda head: head.name)
def test_two_matrices_become_one_by_a_rule_alone(old: HeadConfig, new: HeadConfig) -> None:
    net = trained(old)
    with pytest.raises(BadInput, match="init_tied_matrix"):
        converted(net, new)
    inputs, outputs = net.embed.matrix(), net.head.matrix(net.embed.weight)
    expected = {"embedding": inputs, "head": outputs, "mean": (inputs + outputs) / 2}
    for rule in TIED_MATRICES:
        assert torch.equal(converted(net, new, rule).embed.weight, expected[rule])


@each("old", [UNTIED, TIED])
def test_a_rule_speaks_of_input_embeddings_as_the_new_model_scales_them(old: HeadConfig) -> None:
    """`embedding` keeps the input of the blocks, which compute the same; `head` keeps what scores them."""
    net = trained(old)
    with pytest.raises(BadInput, match="init_tied_matrix"):
        converted(net, SCALED)
    new = converted(net, SCALED, "embedding")
    torch.testing.assert_close(new.embed(TOKENS), net.embed(TOKENS))
    torch.testing.assert_close(new.hidden_states(TOKENS), net.hidden_states(TOKENS), rtol=1e-4, atol=1e-5)
    new = converted(net, SCALED, "head")
    assert torch.equal(new.head.matrix(new.embed.weight), net.head.matrix(net.embed.weight))


def test_a_longer_context_needs_no_weights_but_learned_positions() -> None:
    for position in ("rope", "none"):
        net = build(TIED, seq_len=4, config=tiny(position=position))
        assert torch.equal(logits(converted(net, TIED, seq_len=SEQ)), logits(converted(net, TIED, seq_len=2 * SEQ)))
    net = build(TIED, config=tiny(position="learned"))
    assert torch.equal(converted(net, TIED, seq_len=4)(TOKENS[:, :4]), net(TOKENS[:, :4]))
    with pytest.raises(BadInput, match=f"data.seq_len={SEQ + 1}"):
        converted(net, TIED, seq_len=SEQ + 1)


def test_what_cannot_be_converted_is_known_without_weights() -> None:
    """On the meta device, as an ablation plans."""
    with torch.device("meta"):
        tied, untied = build(TIED), build(UNTIED)
        copy_weights(untied, tied)
        with pytest.raises(BadInput, match="init_tied_matrix"):
            copy_weights(tied, untied)
