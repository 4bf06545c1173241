"""A model takes over the weights of another with another head: exactly where one can hold the other, else by a rule."""

from dataclasses import replace

import pytest
import torch
from conftest import HEADS, SEQ, TIED, UNTIED, VOCAB, tiny
from torch import Tensor

from lm.config import BadInput, HeadConfig, ModelConfig
from lm.config.run import TIED_MATRICES as RULES
from lm.model.head import TIED_MATRICES
from lm.model.transformer import Transformer

TOKENS = torch.randint(VOCAB, (4, SEQ), generator=torch.Generator().manual_seed(0))
SCALED, PROJECTED, MIDTRAINING = (HEADS[name] for name in ("tied_scaled", "tied_projected", "untied_midtraining"))
ONE = {"tied": TIED, "tied_scaled": SCALED}  # matrix for input and output
TWO = {name: head for name, head in HEADS.items() if name not in ONE}
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
    found = build(head, seq_len=seq_len, config=net.config)
    found.load_from(net, rule)
    return found


@each("new", ["untied", "untied_from_embedding"])
@each("old", HEADS)
def test_untying_is_exact(old: str, new: str) -> None:
    net = trained(HEADS[old])
    found = converted(net, HEADS[new])
    if old == "tied_projected":  # its two products become one matrix
        torch.testing.assert_close(logits(found), logits(net), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(logits(found), logits(net))


@each("name", [name for name in HEADS if name != "untied_midtraining"])
def test_a_head_of_the_same_kind_is_copied_bit_for_bit(name: str) -> None:
    net = trained(HEADS[name])
    found = converted(net, HEADS[name])
    assert all(torch.equal(net.state_dict()[key], value) for key, value in found.state_dict().items())


@each(
    ("old", "new"),
    [
        (TIED, PROJECTED),
        (SCALED, PROJECTED),
        (PROJECTED, replace(PROJECTED, embedding_multiplier=3.0)),
        (TIED, MIDTRAINING),
        (TIED, replace(TIED, name="tied_naive", embedding_std=1.0)),
    ],
)
def test_one_matrix_goes_where_one_is_enough(old: HeadConfig, new: HeadConfig) -> None:
    net = trained(old)
    torch.testing.assert_close(logits(converted(net, new)), logits(net), rtol=1e-5, atol=1e-5)


def test_a_head_that_unties_later_begins_tied() -> None:
    net = converted(trained(TIED), MIDTRAINING)
    before = logits(net)
    net.head.on_train_step(0.0, net.embed.weight, {})
    assert net.head.matrix(net.embed.weight) is net.embed.weight
    assert torch.equal(logits(net), before)


@each("new", [TIED, MIDTRAINING])
@each("old", TWO)
def test_two_matrices_become_one_by_a_rule_alone(old: str, new: HeadConfig) -> None:
    net = trained(HEADS[old])
    with pytest.raises(BadInput, match="choose init_tied_matrix=embedding, head, mean, or an untied head"):
        converted(net, new)
    inputs, outputs = net.embed.matrix(), net.head.matrix(net.embed.weight)
    wanted = {"embedding": inputs, "head": outputs, "mean": (inputs + outputs) / 2}
    for rule in RULES:
        assert torch.equal(converted(net, new, rule).embed.weight, wanted[rule])


@each("old", [UNTIED, TIED])
def test_a_rule_speaks_of_input_embeddings_as_the_new_model_scales_them(old: HeadConfig) -> None:
    """`embedding` keeps the input of the blocks, which compute the same; `head` keeps what scores them."""
    net = trained(old)
    with pytest.raises(BadInput, match="init_tied_matrix"):
        converted(net, SCALED)
    kept = converted(net, SCALED, "embedding")
    torch.testing.assert_close(kept.embed(TOKENS), net.embed(TOKENS))
    torch.testing.assert_close(kept.hidden_states(TOKENS), net.hidden_states(TOKENS), rtol=1e-4, atol=1e-5)
    kept = converted(net, SCALED, "head")
    assert torch.equal(kept.head.matrix(kept.embed.weight), net.head.matrix(net.embed.weight))


@each("position", ["rope", "none"])
def test_a_longer_context_needs_no_weights(position: str) -> None:
    net = Transformer(tiny(position=position), TIED, vocab_size=VOCAB, seq_len=4)
    assert torch.equal(logits(converted(net, TIED, seq_len=SEQ)), logits(converted(net, TIED, seq_len=2 * SEQ)))


def test_learned_positions_may_be_fewer_but_not_more() -> None:
    net = build(TIED, config=tiny(position="learned"))
    shorter = converted(net, TIED, seq_len=4)
    assert torch.equal(shorter(TOKENS[:, :4]), net(TOKENS[:, :4]))
    with pytest.raises(BadInput, match=f"data.seq_len={SEQ + 1}: the loaded model has {SEQ} learned positions"):
        converted(net, TIED, seq_len=SEQ + 1)


def test_what_cannot_be_converted_is_known_without_weights() -> None:
    """On the meta device, as an ablation plans."""
    with torch.device("meta"):
        one, two = build(TIED), build(UNTIED)
        two.load_from(one)
        with pytest.raises(BadInput, match="init_tied_matrix"):
            one.load_from(two)


def test_the_settings_name_the_rules_that_there_are() -> None:
    assert tuple(TIED_MATRICES) == RULES
