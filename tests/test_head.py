"""The regimes of the head: what they share, what they cost, where they start, and what a table learns from."""

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import HEADS, ROOT, SEQ, TIED, UNTIED, VOCAB, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from lm.config import HeadConfig, ModelConfig, OptimConfig
from lm.model.size import n_params
from lm.model.transformer import Transformer
from lm.training.optim import build_optimizer

TOKENS, TARGETS = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))
each_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
SCALED, PROJECTED, SPLIT = (HEADS[name] for name in ("tied_scaled", "tied_projected", "untied_midtraining"))
SHIPPED = {
    path.stem: HeadConfig(**yaml.safe_load(path.read_text())) for path in sorted((ROOT / "configs/head").glob("*.yaml"))
}


def build(head: HeadConfig, seed: int = 0) -> Transformer:
    return Transformer(tiny(), head, vocab_size=VOCAB, seq_len=SEQ, seed=seed)


def shaken(head: HeadConfig) -> Transformer:
    """A fresh model whose head's own matrix, if it has one, has moved: no longer the identity or a copy."""
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


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_tied_has_exactly_one_table_less() -> None:
    tied, untied = build(TIED), build(UNTIED)
    assert n_params(untied) - n_params(tied) == VOCAB * 32
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.proj.weight"}
    assert tied.head.matrix(tied.embed.weight) is tied.embed.weight
    assert untied.head.matrix(untied.embed.weight) is untied.head.proj.weight


@each_head
def test_a_regime_has_the_matrices_that_its_name_says(head: HeadConfig) -> None:
    """The head's own parameters, the matrix that is looked up, and the one that scores: the logits are their doing."""
    net = shaken(head)
    table = net.embed.weight
    own = {name: tuple(parameter.shape) for name, parameter in net.head.named_parameters()}
    tied = head.name in ("tied", "tied_scaled")
    assert own == ({} if tied else {"proj.weight": (32 if head is PROJECTED else VOCAB, 32)})
    scoring = net.head.matrix(table)
    if head is PROJECTED:
        assert torch.equal(scoring, table @ net.head.proj.weight)
    else:
        assert scoring is (table if tied else net.head.proj.weight)
    assert (net.embed.matrix() is table) == (head is not SCALED)
    assert torch.equal(net.embed.matrix(), table * (math.sqrt(32) if head is SCALED else 1))
    assert torch.equal(net.embed(TOKENS), F.embedding(TOKENS, net.embed.matrix()))
    states: list[Tensor] = []
    net.norm.register_forward_hook(lambda module, inputs, output: states.append(output))
    logits = net(TOKENS)
    assert torch.allclose(logits, states[0] @ scoring.T, atol=1e-6)


def unaliased(net: Transformer) -> bool:
    """One name for each storage: in the state dict, among the parameters, in the optimizer's groups."""
    tensors = list(net.state_dict().values())
    everything = list(net.named_parameters(remove_duplicate=False))
    groups = build_optimizer(net, OptimConfig(), net.head_config).param_groups
    return len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == len(everything) == len(
        list(net.parameters())
    ) and sum(len(group["params"]) for group in groups) == len(everything)


@each_head
def test_no_tensor_has_two_names_whatever_happens_to_the_model(head: HeadConfig, tmp_path: Path) -> None:
    """After building, copying, a build without memory, an optimizer step, and saving and loading."""
    net = build(head)
    assert unaliased(net)

    twin = deepcopy(net)
    step(twin)
    assert unaliased(twin)
    assert not torch.equal(twin.embed.weight, net.embed.weight)
    assert same(net.state_dict(), build(head).state_dict())  # the step of the copy left the original alone

    with torch.device("meta"):
        ghost = build(head)
    assert {parameter.device.type for parameter in ghost.parameters()} == {"meta"}
    ghost.to_empty(device="cpu").initialise(0)
    assert unaliased(ghost)
    assert same(ghost.state_dict(), net.state_dict())

    save_file(twin.state_dict(), tmp_path / "model.safetensors")
    net.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert unaliased(net)
    assert torch.equal(net(TOKENS), twin(TOKENS))


def test_weights_of_one_arm_do_not_load_into_the_other() -> None:
    tied, untied = build(TIED), build(UNTIED)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*head\.proj\.weight"):
        tied.load_state_dict(untied.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.proj\.weight"):
        untied.load_state_dict(tied.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.proj\.weight"):
        untied.load_state_dict(build(PROJECTED).state_dict())


def test_arms_of_one_seed_share_all_that_they_can() -> None:
    """The trunk bit for bit; the tables one draw, each at its own scale. Another seed shares nothing drawn."""
    tied, untied, other = (build(*one).state_dict() for one in ((TIED,), (UNTIED,), (TIED, 1)))
    trunk = tied.keys() - {"embed.weight"}
    assert all(torch.equal(tied[name], untied[name]) for name in trunk)
    assert torch.equal(tied["embed.weight"], untied["embed.weight"] * TIED.embedding_std)
    assert untied["embed.weight"].std().item() == pytest.approx(UNTIED.embedding_std, rel=0.05)
    assert untied["head.proj.weight"].std().item() == pytest.approx(UNTIED.head_std, rel=0.05)
    assert not torch.equal(untied["embed.weight"] * UNTIED.head_std, untied["head.proj.weight"])  # a draw of its own
    assert not any(torch.equal(tied[name], other[name]) for name in tied if "norm" not in name)


@each_head
def test_every_regime_starts_from_the_draws_of_tied(head: HeadConfig) -> None:
    for seed in (0, 1):
        tied, here = build(TIED, seed).state_dict(), build(head, seed).state_dict()
        trunk = {name for name in tied if not name.startswith("embed.")}
        assert {name for name in here if not name.startswith(("embed.", "head."))} == trunk
        assert all(torch.equal(tied[name], here[name]) for name in trunk)
        assert torch.equal(tied["embed.weight"], here["embed.weight"] * (TIED.embedding_std / head.embedding_std))


def test_a_copy_starts_as_a_copy_and_a_projection_as_the_identity() -> None:
    for name in ("untied_from_embedding", "untied_midtraining"):
        net = build(HEADS[name])
        assert torch.equal(net.head.proj.weight, net.embed.weight)
    assert torch.equal(build(PROJECTED).head.proj.weight, torch.eye(32))


@pytest.mark.parametrize("name", ["tied_projected", "untied_from_embedding", "untied_midtraining"])
def test_these_start_as_tied_does_bit_for_bit(name: str) -> None:
    for seed in (0, 1):
        assert torch.equal(build(HEADS[name], seed)(TOKENS), build(TIED, seed)(TOKENS))


def first_loss(head: HeadConfig, d: int, v: int) -> tuple[float, Tensor]:
    """Of a fresh model on random tokens; with the cosines of each final state and its own token's row."""
    net = Transformer(ModelConfig(n_layers=2, d_model=d, d_ff=4 * d), head, vocab_size=v, seq_len=64)
    tokens, targets = torch.randint(v, (2, 16, 64), generator=torch.Generator().manual_seed(0))
    states: list[Tensor] = []
    net.norm.register_forward_hook(lambda module, inputs, output: states.append(output))
    with torch.no_grad():
        loss = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).item()
        return loss, F.cosine_similarity(states[0], net.embed(tokens), dim=-1)


D, V = 128, 1000


@pytest.mark.parametrize("s", [0.01, 0.02, 1 / math.sqrt(3 * D), 1 / math.sqrt(D)])
def test_an_untied_model_starts_at_ln_v_plus_half_d_s_squared(s: float) -> None:
    loss, _ = first_loss(replace(UNTIED, head_std=s), D, V)
    assert loss == pytest.approx(math.log(V) + D * s**2 / 2, abs=0.03)


def echo(s: float, c: Tensor, d: int, v: int) -> float:
    """ln(V exp(d s^2/2) + exp(d s c)): the residual path makes a fresh tied model predict a repeat of its input."""
    return torch.logaddexp(torch.tensor(math.log(v) + d * s**2 / 2), d * s * c).mean().item()


@pytest.mark.parametrize("embedding_multiplier", [1.0, None])
@pytest.mark.parametrize("s", [0.005, 0.02, 1 / math.sqrt(D), 1.0])
def test_a_tied_model_starts_where_its_echo_says(s: float, embedding_multiplier: float | None) -> None:
    loss, c = first_loss(replace(TIED, embedding_std=s, embedding_multiplier=embedding_multiplier), D, V)
    assert loss == pytest.approx(echo(s, c, D, V), rel=0.02)


def test_a_scaled_lookup_starts_at_unit_scale_and_its_echo_is_louder() -> None:
    """The branches add as much as before to a stream that starts larger: more of the input is left in the end."""
    plain, scaled = (replace(head, embedding_std=None) for head in (TIED, SCALED))
    assert build(scaled).embed(TOKENS).std().item() == pytest.approx(1, rel=0.1)
    assert build(scaled).embed.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    (quiet, far), (loud, near) = (first_loss(head, D, V) for head in (plain, scaled))
    assert near.mean() > 0.9 > far.mean()
    assert loud > quiet + 1


def test_a_tied_table_left_at_n_0_1_starts_far_above_ln_v() -> None:
    """The commonest mistake about tying; small tables, tied or not, start at ln V."""
    assert first_loss(replace(TIED, embedding_std=1.0), D, V)[0] > 10 * math.log(V)
    assert first_loss(TIED, D, V)[0] == pytest.approx(math.log(V), abs=0.1)
    assert first_loss(UNTIED, D, V)[0] == pytest.approx(math.log(V), abs=0.1)


def apart(net: Transformer) -> Transformer:
    """An untied model that computes what `net` does, with the same two matrices, each a parameter."""
    twin = build(UNTIED)
    matrices = {"embed.weight": net.embed.matrix(), "head.proj.weight": net.head.matrix(net.embed.weight)}
    twin.load_state_dict(net.state_dict() | matrices)
    return twin


# From the gradients of both uses (lookup, scores), the table and the head's matrix: what the two parameters learn.
LEARNS = {
    "tied": lambda lookup, scores, table, own: (lookup + scores, None),
    "tied_scaled": lambda lookup, scores, table, own: (math.sqrt(32) * lookup + scores, None),
    "tied_projected": lambda lookup, scores, table, own: (lookup + scores @ own.T, table.T @ scores),
    **dict.fromkeys(
        ("untied", "untied_from_embedding", "untied_midtraining"), lambda lookup, scores, table, own: (lookup, scores)
    ),
}


@each_head
def test_each_matrix_learns_from_its_uses(head: HeadConfig) -> None:
    net = shaken(head)
    twin = apart(net)
    for one in (net, twin):
        loss_of(one).backward()
    lookup, scores = twin.embed.weight.grad, twin.head.proj.weight.grad
    table, own = net.embed.weight, next(net.head.parameters(), None)
    expected = LEARNS[head.name](lookup, scores, table.detach(), None if own is None else own.detach())
    found = table.grad, None if own is None else own.grad
    for one, other in zip(found, expected, strict=True):
        assert other is one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert lookup.norm() > 1e-2
    assert scores.norm() > 1e-2
    rest = dict(twin.named_parameters())
    trunk = [name for name, _ in net.named_parameters() if not name.startswith(("embed.", "head."))]
    assert all(torch.allclose(net.get_parameter(name).grad, rest[name].grad, atol=1e-6) for name in trunk)


def test_a_projections_gradient_is_the_slope_of_the_loss() -> None:
    """Against central differences, in double precision; and not its transpose, as a swapped product would give."""
    net = shaken(PROJECTED).double()
    loss_of(net).backward()
    proj, h = net.head.proj.weight, 1e-5
    start, grad = proj.detach().clone(), proj.grad

    @torch.no_grad()
    def loss_at(weight: Tensor) -> float:
        proj.copy_(weight)
        return loss_of(net).item()

    for seed in range(3):
        direction = torch.randn(32, 32, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        slope = (loss_at(start + h * direction) - loss_at(start - h * direction)) / (2 * h)
        assert slope == pytest.approx((grad * direction).sum().item(), rel=1e-4)
        assert slope != pytest.approx((grad.T * direction).sum().item(), rel=1e-2)


def test_only_a_projection_lets_the_map_from_token_to_token_be_asymmetric() -> None:
    """E P E^T: symmetric at the start; after a step no longer, and without P always."""

    def skew(net: Transformer) -> float:
        table = net.embed.weight.detach()
        tokens = net.embed.matrix().detach() @ net.head.matrix(table).detach().T
        return ((tokens - tokens.T).norm() / tokens.norm()).item()

    for head in (TIED, SCALED, PROJECTED):
        net = build(head)
        assert skew(net) < 1e-5
        step(net)
        assert (skew(net) > 0.01) == (head is PROJECTED)


def test_a_tied_table_learns_from_both_its_uses() -> None:
    """Its gradient is the lookup's plus the head's, as an untied model with an equal head has them apart."""
    tied, untied = build(TIED), build(replace(UNTIED, embedding_std=TIED.embedding_std))
    untied.head.proj.load_state_dict({"weight": tied.embed.weight})
    for net in (tied, untied):
        loss_of(net).backward()
    lookup, scores = untied.embed.weight.grad, untied.head.proj.weight.grad
    assert torch.allclose(tied.embed.weight.grad, lookup + scores, atol=1e-7)
    assert lookup.norm() > 1e-2
    assert scores.norm() > 1e-2
    absent = torch.bincount(TOKENS.flatten(), minlength=VOCAB) == 0
    assert lookup[absent].count_nonzero() == 0  # a row that is not looked up learns from the head alone
    assert scores[absent].abs().amin(-1).max() > 0


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_regimes_start_where_the_formulas_say(name: str) -> None:
    """configs/head at the size of the default run."""
    loss, c = first_loss(head := SHIPPED[name], 128, 2048)
    if head.kind == "untied":
        assert loss == pytest.approx(math.log(2048) + 128 * head.head_std**2 / 2, rel=0.02)
    else:
        assert loss == pytest.approx(echo(head.embedding_std or 128**-0.5, c, 128, 2048), rel=0.02)
    if name in ("tied_projected", "untied_from_embedding", "untied_midtraining"):
        assert loss == first_loss(SHIPPED["tied"], 128, 2048)[0], "bit for bit"
    assert (loss > 10 * math.log(2048)) == (name == "tied_naive")


class TestSplit:
    """Tied until a fraction of training, then two matrices."""

    def half_way(self) -> tuple[Transformer, Optimizer]:
        """Three steps as tied, with the optimizer that made them."""
        net = build(SPLIT)
        optimizer = optimizer_of(net)
        for done in (0.0, 0.2, 0.4):
            net.head.advance(done, net.embed.weight, optimizer.state)
            step(net, optimizer)
        return net, optimizer

    def test_before_it_splits_it_is_tied_bit_for_bit(self) -> None:
        net, optimizer = self.half_way()
        tied = build(TIED)
        twin = optimizer_of(tied)
        for _ in range(3):
            step(tied, twin)
        own = net.head.proj.weight
        assert torch.equal(net.embed.weight, tied.embed.weight)
        assert torch.equal(net(TOKENS), tied(TOKENS))
        assert net.head.matrix(net.embed.weight) is net.embed.weight
        assert own not in optimizer.state
        assert own.grad is None
        assert torch.equal(own, build(SPLIT).embed.weight), "the second matrix waits where it started"

    def test_the_split_changes_no_logit_and_copies_weights_and_moments(self) -> None:
        net, optimizer = self.half_way()
        table, own, before = net.embed.weight, net.head.proj.weight, net(TOKENS)
        net.head.advance(0.5, table, optimizer.state)
        assert torch.equal(net(TOKENS), before)
        assert net.head.matrix(table) is own
        assert torch.equal(own, table)
        assert unaliased(net)
        mine, its = optimizer.state[own], optimizer.state[table]
        assert mine.keys() == its.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[name], its[name]) for name in its)
        assert all(mine[name].data_ptr() != its[name].data_ptr() for name in its)
        assert its["step"] == 3
        assert all(its[name].norm() > 0 for name in its)
        step(net, optimizer)
        assert mine["step"] == its["step"] == 4
        assert not any(torch.equal(mine[name], its[name]) for name in ("exp_avg", "exp_avg_sq"))
        assert not torch.equal(own, table)

    def test_it_splits_once(self) -> None:
        net, optimizer = self.half_way()
        for done in (0.5, 0.6):
            net.head.advance(done, net.embed.weight, optimizer.state)
            step(net, optimizer)
        state = deepcopy(net.state_dict())
        moments = {name: value.clone() for name, value in optimizer.state[net.head.proj.weight].items()}
        net.head.advance(0.8, net.embed.weight, optimizer.state)
        assert same(net.state_dict(), state)
        assert same(optimizer.state[net.head.proj.weight], moments)

    def test_after_the_split_both_gradients_add_up_to_the_tied_one(self) -> None:
        net, optimizer = self.half_way()
        table, own = net.embed.weight, net.head.proj.weight
        loss_of(net).backward()
        tied = table.grad
        optimizer.zero_grad()
        net.head.advance(0.5, table, optimizer.state)
        loss_of(net).backward()
        assert torch.allclose(table.grad + own.grad, tied, atol=1e-7)
        assert min(table.grad.norm(), own.grad.norm()) > 1e-2

    @pytest.mark.parametrize(("at", "tied"), [(0.0, []), (0.3, [0, 1, 2]), (0.66, range(7)), (1.0, range(10))])
    def test_it_is_tied_in_the_steps_before_its_fraction(self, at: float, tied: list[int]) -> None:
        net = build(replace(SPLIT, untie_at=at))
        table, found, state = net.embed.weight, [], {}
        for i in range(10):
            net.head.advance(i / 10, table, state)
            found += [i] if net.head.matrix(table) is table else []
        assert found == list(tied)

    def test_settled_it_scores_with_the_table_as_it_did_and_split_it_is_left_alone(self) -> None:
        net, optimizer = self.half_way()
        before = net(TOKENS)
        net.head.settle(net.embed.weight)
        assert torch.equal(net(TOKENS), before)
        again = build(SPLIT)
        again.load_state_dict(net.state_dict())
        assert torch.equal(again(TOKENS), before), "a model that is loaded has not been told how far training is"
        net.head.advance(0.5, net.embed.weight, optimizer.state)
        step(net, optimizer)
        before = net(TOKENS)
        net.head.settle(net.embed.weight)
        assert torch.equal(net(TOKENS), before)
        assert not torch.equal(net.head.proj.weight, net.embed.weight)
