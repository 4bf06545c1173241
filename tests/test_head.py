"""The tying variants: what they share, what they cost, their first losses, and the gradients of their matrices."""

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import HEADS, ROOT, SEQ, TIED, UNTIED, VOCAB, tiny
from helpers.models import random_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from lm.config import HeadConfig, ModelConfig, OptimConfig
from lm.model import Transformer
from lm.model.head import TiedHead
from lm.model.size import n_params
from lm.training.optim import build_optimizer

TOKENS, TARGETS = random_tokens(2, 4, SEQ)
each_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
SCALED, PROJECTED, MIDTRAINING = (HEADS[name] for name in ("tied_scaled", "tied_projected", "untied_midtraining"))
COPIES = ("tied_projected", "untied_from_embedding", "untied_midtraining")  # they begin as tied does
SHIPPED = {path.stem: HeadConfig(**yaml.safe_load(path.read_text())) for path in (ROOT / "configs/head").glob("*.yaml")}


def build(head: HeadConfig, seed: int = 0) -> Transformer:
    return Transformer(tiny(), head, vocab_size=VOCAB, seq_len=SEQ, seed=seed)


def with_noise(head: HeadConfig) -> Transformer:
    """An initial model with noise in the head's own matrix, which is then neither the identity nor a copy."""
    net = build(head)
    for parameter in net.head.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return net


def loss_of(net: Transformer) -> Tensor:
    return F.cross_entropy(net(TOKENS).flatten(0, 1), TARGETS.flatten())


def optimizer_of(net: Transformer) -> Optimizer:
    return build_optimizer(net, OptimConfig(warmup_steps=0), net.head_config)


def step(net: Transformer, optimizer: Optimizer | None = None) -> None:
    optimizer = optimizer or optimizer_of(net)
    loss_of(net).backward()
    optimizer.step()
    optimizer.zero_grad()


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- matrices


def test_tied_has_v_times_d_parameters_fewer_than_untied() -> None:
    tied, untied = build(TIED), build(UNTIED)
    assert n_params(untied) - n_params(tied) == VOCAB * 32
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.proj.weight"}


@each_head
def test_each_variant_has_the_input_and_output_embeddings_of_its_definition(head: HeadConfig) -> None:
    """The head's own parameters, the input and the output embeddings, and the logits that follow from them."""
    net = with_noise(head)
    embedding = net.embed.weight
    tied = head.name in ("tied", "tied_scaled")
    own = {name: tuple(parameter.shape) for name, parameter in net.head.named_parameters()}
    assert own == ({} if tied else {"proj.weight": (32 if head is PROJECTED else VOCAB, 32)})
    output = net.head.matrix(embedding)
    if head is PROJECTED:
        assert torch.equal(output, embedding @ net.head.proj.weight)
    else:
        assert output is (embedding if tied else net.head.proj.weight)
    assert (net.embed.matrix() is embedding) == (head is not SCALED)
    assert torch.equal(net.embed.matrix(), embedding * (math.sqrt(32) if head is SCALED else 1))
    assert torch.equal(net.embed(TOKENS), F.embedding(TOKENS, net.embed.matrix()))
    assert torch.allclose(net(TOKENS), net.hidden_states(TOKENS) @ output.T, atol=1e-6)


def has_one_name_each(net: Transformer) -> bool:
    """One name for each storage: in the state dict, among the parameters, in the optimizer's groups."""
    tensors = list(net.state_dict().values())
    names = list(net.named_parameters(remove_duplicate=False))
    groups = optimizer_of(net).param_groups
    counts = {len(tensors), len({tensor.data_ptr() for tensor in tensors}), len(names), len(list(net.parameters()))}
    return counts == {sum(len(group["params"]) for group in groups)}


@each_head
def test_no_tensor_ever_has_two_names(head: HeadConfig, tmp_path: Path) -> None:
    """After building, copying, an optimizer step, and saving and loading."""
    net = build(head)
    assert has_one_name_each(net)
    twin = deepcopy(net)
    step(twin)
    assert has_one_name_each(twin)
    assert not torch.equal(twin.embed.weight, net.embed.weight)
    assert same(net.state_dict(), build(head).state_dict())  # the step of the copy did not change the original
    save_file(twin.state_dict(), tmp_path / "model.safetensors")
    net.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert has_one_name_each(net)
    assert torch.equal(net(TOKENS), twin(TOKENS))


def test_logits_of_a_head_with_a_forward_of_its_own_are_not_taken_for_a_product() -> None:
    """So the chunked loss refuses it, unless it says that they are one."""

    class Capped(TiedHead):
        def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
            return super().forward(x, embedding).tanh()

    class Product(Capped):
        is_linear = True

        def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
            return x @ embedding.T

    assert [cls.is_linear for cls in (TiedHead, Capped, Product)] == [True, False, True]
    for head in HEADS.values():
        net = with_noise(head)
        x, matrix = net.head.factors(net.hidden_states(TOKENS), net.embed.weight)
        assert net.head.is_linear
        assert torch.allclose(net(TOKENS), x @ matrix.T, atol=1e-6)


# --- initial values


@each_head
def test_every_variant_shares_the_draws_of_tied(head: HeadConfig) -> None:
    """The blocks are equal bit for bit, the embeddings are one draw at two scales."""
    for seed in (0, 1):
        tied, other = build(TIED, seed).state_dict(), build(head, seed).state_dict()
        blocks = {name for name in tied if not name.startswith("embed.")}
        assert {name for name in other if not name.startswith(("embed.", "head."))} == blocks
        assert all(torch.equal(tied[name], other[name]) for name in blocks)
        assert torch.equal(tied["embed.weight"], other["embed.weight"] * (TIED.embedding_std / head.embedding_std))


def test_scales_are_those_of_the_settings_and_another_seed_shares_no_draw() -> None:
    tied, untied, other = (build(*args).state_dict() for args in ((TIED,), (UNTIED,), (TIED, 1)))
    assert untied["embed.weight"].std().item() == pytest.approx(UNTIED.embedding_std, rel=0.05)
    assert untied["head.proj.weight"].std().item() == pytest.approx(UNTIED.head_std, rel=0.05)
    assert not torch.equal(untied["embed.weight"] * UNTIED.head_std, untied["head.proj.weight"])  # a draw of its own
    assert not any(torch.equal(tied[name], other[name]) for name in tied if "norm" not in name)
    scaled = build(replace(SCALED, embedding_std=None)).embed
    assert scaled.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert scaled(TOKENS).std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("name", COPIES)
def test_initial_logits_equal_those_of_tied_bit_for_bit(name: str) -> None:
    net = build(HEADS[name])
    assert torch.equal(net.head.proj.weight, torch.eye(32) if name == "tied_projected" else net.embed.weight)
    assert torch.equal(net(TOKENS), build(TIED)(TOKENS))


# --- first losses

D, V = 128, 1000


@torch.no_grad()
def first_loss(head: HeadConfig, d: int = D, v: int = V) -> tuple[float, Tensor]:
    """Of an initial model on random tokens; with the cosine of each final hidden state and its input embedding."""
    net = Transformer(ModelConfig(n_layers=2, d_model=d, d_ff=4 * d), head, vocab_size=v, seq_len=64)
    tokens, targets = torch.randint(v, (2, 16, 64), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).item()
    return loss, F.cosine_similarity(net.hidden_states(tokens), net.embed(tokens), dim=-1)


def expected_first_loss(s: float, c: Tensor, d: int, v: int) -> float:
    """ln(V exp(d s^2/2) + exp(d s c)): by its residual stream an initial tied model predicts its input token."""
    return torch.logaddexp(torch.tensor(math.log(v) + d * s**2 / 2), d * s * c).mean().item()


def test_first_loss_of_a_tied_embedding_at_n_0_1_is_far_above_ln_v() -> None:
    """The most common mistake about tying; with a small embedding or head the first loss is ln V."""
    assert first_loss(replace(TIED, embedding_std=1.0))[0] > 10 * math.log(V)
    assert first_loss(TIED)[0] == pytest.approx(math.log(V), abs=0.1)
    assert first_loss(UNTIED)[0] == pytest.approx(math.log(V), abs=0.1)


@pytest.mark.parametrize("name", [*HEADS, "tied_naive"])
def test_first_losses_of_the_shipped_variants_match_the_formulas(name: str) -> None:
    """configs/head at the default size."""
    loss, c = first_loss(head := SHIPPED[name], 128, 2048)
    expected = expected_first_loss(head.embedding_std or 128**-0.5, c, 128, 2048)
    if head.kind == "untied":
        expected = math.log(2048) + 128 * head.head_std**2 / 2
    assert loss == pytest.approx(expected, rel=0.02)
    if name in COPIES:
        assert loss == first_loss(SHIPPED["tied"], 128, 2048)[0], "bit for bit"
    assert (loss > 10 * math.log(2048)) == (name == "tied_naive")


# --- gradients


# The gradients of the embedding and of the head's own matrix, from those of the input and the output embeddings.
GRADIENTS = {
    "tied": lambda inputs, outputs, embedding, own: (inputs + outputs, None),
    "tied_scaled": lambda inputs, outputs, embedding, own: (math.sqrt(32) * inputs + outputs, None),
    "tied_projected": lambda inputs, outputs, embedding, own: (inputs + outputs @ own.T, embedding.T @ outputs),
}


@each_head
def test_the_gradient_of_each_matrix_is_the_sum_over_its_uses(head: HeadConfig) -> None:
    """As an untied model with equal logits, whose input and output embeddings are parameters, has them separately."""
    net, twin = with_noise(head), build(UNTIED)
    matrices = {"embed.weight": net.embed.matrix(), "head.proj.weight": net.head.matrix(net.embed.weight)}
    twin.load_state_dict(net.state_dict() | matrices)
    for model in (net, twin):
        loss_of(model).backward()
    inputs, outputs = twin.embed.weight.grad, twin.head.proj.weight.grad
    assert min(inputs.norm(), outputs.norm()) > 1e-2
    embedding, own = net.embed.weight, next(net.head.parameters(), None)
    formula = GRADIENTS.get(head.name, lambda inputs, outputs, *_: (inputs, outputs))
    expected = formula(inputs, outputs, embedding.detach(), None if own is None else own.detach())
    for grad, other in zip((embedding.grad, None if own is None else own.grad), expected, strict=True):
        assert other is grad is None or torch.allclose(grad, other, rtol=1e-4, atol=1e-6)
    others = dict(twin.named_parameters())
    blocks = [name for name, _ in net.named_parameters() if not name.startswith(("embed.", "head."))]
    assert all(torch.allclose(net.get_parameter(name).grad, others[name].grad, atol=1e-6) for name in blocks)
    absent = torch.bincount(TOKENS.flatten(), minlength=VOCAB) == 0
    assert inputs[absent].count_nonzero() == 0  # a row that is no input gets its gradient from the head alone
    assert outputs[absent].abs().amin(-1).max() > 0


# --- untying in training


def half_way() -> tuple[Transformer, Optimizer]:
    """Three steps as tied, with the optimizer that made them."""
    net = build(MIDTRAINING)
    optimizer = optimizer_of(net)
    for progress in (0.0, 0.2, 0.4):
        net.head.on_train_step(progress, net.embed.weight, optimizer.state)
        step(net, optimizer)
    return net, optimizer


def test_before_untying_it_equals_tied_bit_for_bit() -> None:
    (net, optimizer), tied = half_way(), build(TIED)
    twin = optimizer_of(tied)
    for _ in range(3):
        step(tied, twin)
    own = net.head.proj.weight
    assert torch.equal(net.embed.weight, tied.embed.weight)
    assert torch.equal(net(TOKENS), tied(TOKENS))
    assert net.head.matrix(net.embed.weight) is net.embed.weight
    assert own not in optimizer.state
    assert own.grad is None
    assert torch.equal(own, build(MIDTRAINING).embed.weight), "its own matrix keeps its initial values"


def test_untying_changes_no_logit_and_copies_weights_and_moments_once() -> None:
    net, optimizer = half_way()
    embedding, own, before = net.embed.weight, net.head.proj.weight, net(TOKENS)
    net.head.on_train_step(0.5, embedding, optimizer.state)
    assert torch.equal(net(TOKENS), before)
    assert net.head.matrix(embedding) is own
    assert torch.equal(own, embedding)
    assert has_one_name_each(net)
    mine, its = optimizer.state[own], optimizer.state[embedding]
    assert same(mine, its)
    assert mine.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(mine[name].data_ptr() != its[name].data_ptr() for name in its)
    assert its["step"] == 3
    step(net, optimizer)
    assert mine["step"] == its["step"] == 4
    assert not any(torch.equal(mine[name], its[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert not torch.equal(own, embedding)
    state, moments = deepcopy(net.state_dict()), deepcopy(mine)
    net.head.on_train_step(0.6, embedding, optimizer.state)
    assert same(net.state_dict(), state)
    assert same(optimizer.state[own], moments)


@pytest.mark.parametrize(("untie_at", "tied_steps"), [(0.0, 0), (0.3, 3), (0.66, 7), (1.0, 10)])
def test_it_is_tied_in_the_steps_before_untie_at(untie_at: float, tied_steps: int) -> None:
    net = build(replace(MIDTRAINING, untie_at=untie_at))
    embedding, tied = net.embed.weight, []
    for i in range(10):
        net.head.on_train_step(i / 10, embedding, {})
        tied.append(net.head.matrix(embedding) is embedding)
    assert tied == [i < tied_steps for i in range(10)]


def test_before_save_keeps_the_logits_before_and_after_untying() -> None:
    net, optimizer = half_way()
    before = net(TOKENS)
    net.head.before_save(net.embed.weight)
    assert torch.equal(net(TOKENS), before)
    loaded = build(MIDTRAINING)
    loaded.load_state_dict(net.state_dict())
    assert torch.equal(loaded(TOKENS), before), "a loaded model does not know the progress of training"
    net.head.on_train_step(0.5, net.embed.weight, optimizer.state)
    step(net, optimizer)
    before = net(TOKENS)
    net.head.before_save(net.embed.weight)
    assert torch.equal(net(TOKENS), before)
    assert not torch.equal(net.head.proj.weight, net.embed.weight)
