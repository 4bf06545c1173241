"""The variants of the head: what they share, cost and begin with, untying, their conversion, and runs of each."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import yaml

from lm.config import TIED_MATRICES, HeadConfig, ModelConfig, OptimConfig
from lm.lab.init_from.weights import copy_weights
from lm.model import Transformer
from lm.training.optim import build_optimizer
from tests.helpers import ROOT
from tests.helpers.models import TOKENS, build, equal, noisy, train_step
from tests.helpers.refusals import refused
from tests.helpers.tiny import HEADS, SEQ, TIED, UNTIED, VOCAB

each = pytest.mark.parametrize
each_head = each("head", HEADS.values(), ids=HEADS)
SCALED, PROJECTED, MIDTRAINING = (HEADS[name] for name in ("tied_scaled", "tied_projected", "untied_midtraining"))
COPIES = ("tied_projected", "untied_from_embedding", "untied_midtraining")  # they begin as tied does
SHIPPED = {path.stem: HeadConfig(**yaml.safe_load(path.read_text())) for path in (ROOT / "configs/head").glob("*.yaml")}


def logits(net):
    with torch.no_grad():
        return net(TOKENS)


def optimizer_of(net):
    return build_optimizer(net, OptimConfig(warmup_steps=0), net.head_config)


# --- matrices


@each_head
def test_each_variant_has_the_input_and_output_embeddings_of_its_definition(head):
    """The head's own parameters, the input and the output embeddings, and the logits that follow from them."""
    net = noisy(head)
    embedding, output = net.embed.weight, net.head.matrix(net.embed.weight)
    tied = head.name in ("tied", "tied_scaled")
    shapes = {name: tuple(parameter.shape) for name, parameter in net.head.named_parameters()}
    assert shapes == ({} if tied else {"proj.weight": (32 if head is PROJECTED else VOCAB, 32)})
    if head is PROJECTED:
        assert torch.equal(output, embedding @ net.head.proj.weight)
    else:
        assert output is (embedding if tied else net.head.proj.weight)
    assert (net.embed.matrix() is embedding) == (head is not SCALED)
    assert torch.equal(net.embed.matrix(), embedding * (math.sqrt(32) if head is SCALED else 1))
    assert torch.equal(net.embed(TOKENS), F.embedding(TOKENS, net.embed.matrix()))
    torch.testing.assert_close(net(TOKENS), net.hidden_states(TOKENS) @ output.T, rtol=1e-5, atol=1e-5)


# --- initial values


@each_head
def test_every_variant_shares_the_draws_of_tied(head):
    """The blocks are equal bit for bit, the embeddings are one draw at two scales, and some logits are equal too."""
    for seed in (0, 1):
        tied, other = (build(kind, seed=seed).state_dict() for kind in (TIED, head))
        blocks = {name for name in tied if not name.startswith("embed.")}
        assert {name for name in other if not name.startswith(("embed.", "head."))} == blocks
        assert all(torch.equal(tied[name], other[name]) for name in blocks)
        assert torch.equal(tied["embed.weight"], other["embed.weight"] * (TIED.embedding_std / head.embedding_std))
    net = build(head)
    assert net.embed.weight.std().item() == pytest.approx(head.embedding_std, rel=0.05)
    assert torch.equal(net(TOKENS), build(TIED)(TOKENS)) == (head.name in ("tied", *COPIES))
    if head.name in COPIES:
        assert torch.equal(net.head.proj.weight, torch.eye(32) if head is PROJECTED else net.embed.weight)


@torch.no_grad()
@each("name", SHIPPED)
def test_first_losses_of_the_shipped_variants_match_the_formulas(name):
    """Near ln V with a small head, and far above it with a tied embedding at N(0, 1), the commonest mistake.

    By its residual stream an initial tied model predicts its input token: ln(V exp(d s^2/2) + exp(d s c)), where c is
    the cosine of a final hidden state and the input embedding.
    """
    d, v, head = 128, 2048, SHIPPED[name]
    net = Transformer(ModelConfig(n_layers=2, d_model=d, d_ff=4 * d), head, vocab_size=v, seq_len=64)
    tokens, targets = torch.randint(v, (2, 8, 64), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).item()
    c, s = F.cosine_similarity(net.hidden_states(tokens), net.embed(tokens), dim=-1), head.embedding_std or d**-0.5
    expected = torch.logaddexp(torch.tensor(math.log(v) + d * s**2 / 2), d * s * c).mean().item()
    if head.head_std is not None:
        expected = math.log(v) + d * head.head_std**2 / 2
        assert expected - math.log(v) < 0.01
    assert loss == pytest.approx(expected, rel=0.02)
    assert (loss > 10 * math.log(v)) == (name == "tied_naive")


def test_untying_changes_no_logit_and_copies_weights_and_moments_once():
    """Before it the model equals a tied one, and its own matrix keeps its initial values."""
    net, tied = build(MIDTRAINING), build(TIED)
    optimizer, twin = optimizer_of(net), optimizer_of(tied)
    embedding, proj, state = net.embed.weight, net.head.proj.weight, optimizer.state
    initial = embedding.detach().clone()
    for progress in (0.0, 0.2, 0.4):
        net.head.on_train_step(progress, embedding, state)
        train_step(net, optimizer)
        train_step(tied, twin)
    before = logits(net)
    assert torch.equal(before, logits(tied))
    assert (proj.grad, proj in state, torch.equal(proj, initial)) == (None, False, True)
    net.head.on_train_step(0.5, embedding, state)
    assert torch.equal(logits(net), before)
    assert torch.equal(proj, embedding)
    assert equal(state[proj], state[embedding])
    train_step(net, optimizer)
    assert state[proj]["step"] == state[embedding]["step"] == 4
    assert not any(torch.equal(state[proj][name], state[embedding][name]) for name in ("exp_avg", "exp_avg_sq"))
    assert not torch.equal(proj, embedding)
    weights, moments = deepcopy(net.state_dict()), deepcopy(state[proj])
    net.head.on_train_step(0.6, embedding, state)
    assert torch.equal(net.head.saved(embedding)["proj.weight"], proj)
    assert equal(net.state_dict(), weights)
    assert equal(state[proj], moments)


# --- conversion: a model takes over the weights of another with another head


def converted(net, head, rule=None, **changes):
    new = build(head, **changes)
    copy_weights(new, net, rule)
    return new


EXACT = [  # each variant as the old and as the new one, and the pairs that move a factor from one matrix to another
    *((old, UNTIED) for old in HEADS.values()),
    *((head, head) for head in (TIED, SCALED, PROJECTED, HEADS["untied_from_embedding"])),
    *((TIED, PROJECTED), (SCALED, PROJECTED), (PROJECTED, replace(PROJECTED, embedding_multiplier=3.0))),
    *((TIED, MIDTRAINING), (MIDTRAINING, HEADS["untied_from_embedding"])),
]


@each(("old", "new"), EXACT, ids=lambda head: head.name)
def test_a_head_that_can_hold_the_old_one_computes_the_same(old, new):
    """Bit for bit, but where two products become one matrix or a factor moves into another."""
    net = noisy(old)
    net.head.load_state_dict(net.head.saved(net.embed.weight))
    new_net = converted(net, new)
    if old.kind == new.kind and old.embedding_multiplier == new.embedding_multiplier:
        assert equal(net.state_dict(), new_net.state_dict())
    if PROJECTED.kind in (old.kind, new.kind) and old != new:
        torch.testing.assert_close(logits(new_net), logits(net), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(logits(new_net), logits(net))
    if new is MIDTRAINING:  # it begins its training tied
        new_net.head.on_train_step(0.0, new_net.embed.weight, {})
        assert new_net.head.matrix(new_net.embed.weight) is new_net.embed.weight
        assert torch.equal(logits(new_net), logits(net))


@each(("old", "new"), [(UNTIED, TIED), (PROJECTED, MIDTRAINING)], ids=lambda head: head.name)
def test_two_matrices_become_one_by_a_rule_alone(old, new):
    net = noisy(old)
    with refused("init_tied_matrix"):
        converted(net, new)
    inputs, outputs = net.embed.matrix(), net.head.matrix(net.embed.weight)
    expected = {"embedding": inputs, "head": outputs, "mean": (inputs + outputs) / 2}
    for rule in TIED_MATRICES:
        assert torch.equal(converted(net, new, rule).embed.weight, expected[rule])


def test_a_longer_context_needs_no_weights_but_learned_positions():
    for position in ("rope", "none"):
        net = build(TIED, seq_len=4, position=position)
        longer, longest = (converted(net, TIED, seq_len=n, position=position) for n in (SEQ, 2 * SEQ))
        assert torch.equal(logits(longer), logits(longest))
    net = build(TIED, position="learned")
    shorter = converted(net, TIED, seq_len=4, position="learned")
    assert torch.equal(shorter(TOKENS[:, :4]), net(TOKENS[:, :4]))
    with refused(f"data.seq_len={SEQ + 1}"):
        converted(net, TIED, seq_len=SEQ + 1, position="learned")
