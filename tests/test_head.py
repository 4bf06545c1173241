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
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from lm.config import HeadConfig, ModelConfig, OptimConfig
from lm.model.size import n_params
from lm.model.transformer import Transformer
from lm.training.optim import build_optimizer

TOKENS, TARGETS = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))
each_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
SCALED, PROJECTED, MIDTRAINING = (HEADS[name] for name in ("tied_scaled", "tied_projected", "untied_midtraining"))
SHIPPED = {
    path.stem: HeadConfig(**yaml.safe_load(path.read_text())) for path in sorted((ROOT / "configs/head").glob("*.yaml"))
}


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


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_tied_has_v_times_d_parameters_fewer_than_untied() -> None:
    tied, untied = build(TIED), build(UNTIED)
    assert n_params(untied) - n_params(tied) == VOCAB * 32
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.proj.weight"}
    assert tied.head.matrix(tied.embed.weight) is tied.embed.weight
    assert untied.head.matrix(untied.embed.weight) is untied.head.proj.weight


@each_head
def test_each_variant_has_the_input_and_output_embeddings_of_its_definition(head: HeadConfig) -> None:
    """The head's own parameters, the input and the output embeddings, and the logits that follow from them."""
    net = with_noise(head)
    embedding = net.embed.weight
    own = {name: tuple(parameter.shape) for name, parameter in net.head.named_parameters()}
    tied = head.name in ("tied", "tied_scaled")
    assert own == ({} if tied else {"proj.weight": (32 if head is PROJECTED else VOCAB, 32)})
    output = net.head.matrix(embedding)
    if head is PROJECTED:
        assert torch.equal(output, embedding @ net.head.proj.weight)
    else:
        assert output is (embedding if tied else net.head.proj.weight)
    assert (net.embed.matrix() is embedding) == (head is not SCALED)
    assert torch.equal(net.embed.matrix(), embedding * (math.sqrt(32) if head is SCALED else 1))
    assert torch.equal(net.embed(TOKENS), F.embedding(TOKENS, net.embed.matrix()))
    states: list[Tensor] = []
    net.norm.register_forward_hook(lambda module, inputs, output: states.append(output))
    logits = net(TOKENS)
    assert torch.allclose(logits, states[0] @ output.T, atol=1e-6)


def unaliased(net: Transformer) -> bool:
    """One name for each storage: in the state dict, among the parameters, in the optimizer's groups."""
    tensors = list(net.state_dict().values())
    everything = list(net.named_parameters(remove_duplicate=False))
    groups = build_optimizer(net, OptimConfig(), net.head_config).param_groups
    return len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == len(everything) == len(
        list(net.parameters())
    ) and sum(len(group["params"]) for group in groups) == len(everything)


@each_head
def test_no_tensor_ever_has_two_names(head: HeadConfig, tmp_path: Path) -> None:
    """After building, copying, a build on the meta device, an optimizer step, and saving and loading."""
    net = build(head)
    assert unaliased(net)

    twin = deepcopy(net)
    step(twin)
    assert unaliased(twin)
    assert not torch.equal(twin.embed.weight, net.embed.weight)
    assert same(net.state_dict(), build(head).state_dict())  # the step of the copy did not change the original

    with torch.device("meta"):
        empty = build(head)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    empty.to_empty(device="cpu").initialise(0)
    assert unaliased(empty)
    assert same(empty.state_dict(), net.state_dict())

    save_file(twin.state_dict(), tmp_path / "model.safetensors")
    net.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert unaliased(net)
    assert torch.equal(net(TOKENS), twin(TOKENS))


def test_weights_of_one_variant_do_not_load_into_another() -> None:
    tied, untied = build(TIED), build(UNTIED)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*head\.proj\.weight"):
        tied.load_state_dict(untied.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.proj\.weight"):
        untied.load_state_dict(tied.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.proj\.weight"):
        untied.load_state_dict(build(PROJECTED).state_dict())


def test_variants_with_one_seed_share_every_initial_value_that_they_can() -> None:
    """The blocks are equal bit for bit, the embeddings are one draw at two scales. Another seed shares no draw."""
    tied, untied, other = (build(*one).state_dict() for one in ((TIED,), (UNTIED,), (TIED, 1)))
    blocks = tied.keys() - {"embed.weight"}
    assert all(torch.equal(tied[name], untied[name]) for name in blocks)
    assert torch.equal(tied["embed.weight"], untied["embed.weight"] * TIED.embedding_std)
    assert untied["embed.weight"].std().item() == pytest.approx(UNTIED.embedding_std, rel=0.05)
    assert untied["head.proj.weight"].std().item() == pytest.approx(UNTIED.head_std, rel=0.05)
    assert not torch.equal(untied["embed.weight"] * UNTIED.head_std, untied["head.proj.weight"])  # a draw of its own
    assert not any(torch.equal(tied[name], other[name]) for name in tied if "norm" not in name)


@each_head
def test_every_variant_shares_the_draws_of_tied(head: HeadConfig) -> None:
    for seed in (0, 1):
        tied, here = build(TIED, seed).state_dict(), build(head, seed).state_dict()
        blocks = {name for name in tied if not name.startswith("embed.")}
        assert {name for name in here if not name.startswith(("embed.", "head."))} == blocks
        assert all(torch.equal(tied[name], here[name]) for name in blocks)
        assert torch.equal(tied["embed.weight"], here["embed.weight"] * (TIED.embedding_std / head.embedding_std))


def test_head_matrices_are_initialised_from_the_embedding_or_to_the_identity() -> None:
    for name in ("untied_from_embedding", "untied_midtraining"):
        net = build(HEADS[name])
        assert torch.equal(net.head.proj.weight, net.embed.weight)
    assert torch.equal(build(PROJECTED).head.proj.weight, torch.eye(32))


@pytest.mark.parametrize("name", ["tied_projected", "untied_from_embedding", "untied_midtraining"])
def test_initial_logits_equal_those_of_tied_bit_for_bit(name: str) -> None:
    for seed in (0, 1):
        assert torch.equal(build(HEADS[name], seed)(TOKENS), build(TIED, seed)(TOKENS))


def first_loss(head: HeadConfig, d: int, v: int) -> tuple[float, Tensor]:
    """Of an initial model on random tokens; with the cosine of each final hidden state and its input embedding."""
    net = Transformer(ModelConfig(n_layers=2, d_model=d, d_ff=4 * d), head, vocab_size=v, seq_len=64)
    tokens, targets = torch.randint(v, (2, 16, 64), generator=torch.Generator().manual_seed(0))
    states: list[Tensor] = []
    net.norm.register_forward_hook(lambda module, inputs, output: states.append(output))
    with torch.no_grad():
        loss = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).item()
        return loss, F.cosine_similarity(states[0], net.embed(tokens), dim=-1)


D, V = 128, 1000


@pytest.mark.parametrize("s", [0.01, 0.02, 1 / math.sqrt(3 * D), 1 / math.sqrt(D)])
def test_first_loss_of_untied_is_ln_v_plus_half_d_s_squared(s: float) -> None:
    loss, _ = first_loss(replace(UNTIED, head_std=s), D, V)
    assert loss == pytest.approx(math.log(V) + D * s**2 / 2, abs=0.03)


def expected_first_loss(s: float, c: Tensor, d: int, v: int) -> float:
    """ln(V exp(d s^2/2) + exp(d s c)): by its residual stream an initial tied model predicts its input token."""
    return torch.logaddexp(torch.tensor(math.log(v) + d * s**2 / 2), d * s * c).mean().item()


@pytest.mark.parametrize("embedding_multiplier", [1.0, None])
@pytest.mark.parametrize("s", [0.005, 0.02, 1 / math.sqrt(D), 1.0])
def test_first_loss_of_tied_follows_from_the_cosine_of_state_and_input(
    s: float, embedding_multiplier: float | None
) -> None:
    loss, c = first_loss(replace(TIED, embedding_std=s, embedding_multiplier=embedding_multiplier), D, V)
    assert loss == pytest.approx(expected_first_loss(s, c, D, V), rel=0.02)


def test_scaled_input_embeddings_have_unit_scale_and_raise_the_first_loss() -> None:
    """The blocks add as much as before to a larger residual stream, so more of the input is left at the end."""
    plain, scaled = (replace(head, embedding_std=None) for head in (TIED, SCALED))
    assert build(scaled).embed(TOKENS).std().item() == pytest.approx(1, rel=0.1)
    assert build(scaled).embed.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    (plain_loss, plain_cosine), (scaled_loss, scaled_cosine) = (first_loss(head, D, V) for head in (plain, scaled))
    assert scaled_cosine.mean() > 0.9 > plain_cosine.mean()
    assert scaled_loss > plain_loss + 1


def test_first_loss_of_a_tied_embedding_at_n_0_1_is_far_above_ln_v() -> None:
    """The most common mistake about tying; with a small embedding or head the first loss is ln V."""
    assert first_loss(replace(TIED, embedding_std=1.0), D, V)[0] > 10 * math.log(V)
    assert first_loss(TIED, D, V)[0] == pytest.approx(math.log(V), abs=0.1)
    assert first_loss(UNTIED, D, V)[0] == pytest.approx(math.log(V), abs=0.1)


def untied_twin(net: Transformer) -> Transformer:
    """An untied model with equal logits, whose input and output embeddings are parameters of their own."""
    twin = build(UNTIED)
    matrices = {"embed.weight": net.embed.matrix(), "head.proj.weight": net.head.matrix(net.embed.weight)}
    twin.load_state_dict(net.state_dict() | matrices)
    return twin


# The gradients of the embedding and of the head's own matrix, from those of the input and the output embeddings.
GRADIENTS = {
    "tied": lambda inputs, outputs, embedding, own: (inputs + outputs, None),
    "tied_scaled": lambda inputs, outputs, embedding, own: (math.sqrt(32) * inputs + outputs, None),
    "tied_projected": lambda inputs, outputs, embedding, own: (inputs + outputs @ own.T, embedding.T @ outputs),
    **dict.fromkeys(
        ("untied", "untied_from_embedding", "untied_midtraining"),
        lambda inputs, outputs, embedding, own: (inputs, outputs),
    ),
}


@each_head
def test_the_gradient_of_each_matrix_is_the_sum_over_its_uses(head: HeadConfig) -> None:
    net = with_noise(head)
    twin = untied_twin(net)
    for one in (net, twin):
        loss_of(one).backward()
    inputs, outputs = twin.embed.weight.grad, twin.head.proj.weight.grad
    embedding, own = net.embed.weight, next(net.head.parameters(), None)
    expected = GRADIENTS[head.name](inputs, outputs, embedding.detach(), None if own is None else own.detach())
    found = embedding.grad, None if own is None else own.grad
    for one, other in zip(found, expected, strict=True):
        assert other is one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert inputs.norm() > 1e-2
    assert outputs.norm() > 1e-2
    rest = dict(twin.named_parameters())
    blocks = [name for name, _ in net.named_parameters() if not name.startswith(("embed.", "head."))]
    assert all(torch.allclose(net.get_parameter(name).grad, rest[name].grad, atol=1e-6) for name in blocks)


def test_the_gradient_of_the_projection_matches_central_differences() -> None:
    """In double precision; and its transpose, which a swapped product would give, does not match."""
    net = with_noise(PROJECTED).double()
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


def test_only_with_a_projection_the_token_to_token_map_becomes_asymmetric() -> None:
    """E P E^T is symmetric initially; after a step it is not, but without P it always is."""

    def skew(net: Transformer) -> float:
        embedding = net.embed.weight.detach()
        tokens = net.embed.matrix().detach() @ net.head.matrix(embedding).detach().T
        return ((tokens - tokens.T).norm() / tokens.norm()).item()

    for head in (TIED, SCALED, PROJECTED):
        net = build(head)
        assert skew(net) < 1e-5
        step(net)
        assert (skew(net) > 0.01) == (head is PROJECTED)


def test_the_tied_gradient_is_the_sum_of_both_untied_gradients() -> None:
    """As an untied model with equal matrices has them separately."""
    tied, untied = build(TIED), build(replace(UNTIED, embedding_std=TIED.embedding_std))
    untied.head.proj.load_state_dict({"weight": tied.embed.weight})
    for net in (tied, untied):
        loss_of(net).backward()
    inputs, outputs = untied.embed.weight.grad, untied.head.proj.weight.grad
    assert torch.allclose(tied.embed.weight.grad, inputs + outputs, atol=1e-7)
    assert inputs.norm() > 1e-2
    assert outputs.norm() > 1e-2
    absent = torch.bincount(TOKENS.flatten(), minlength=VOCAB) == 0
    assert inputs[absent].count_nonzero() == 0  # a row that is no input gets its gradient from the head alone
    assert outputs[absent].abs().amin(-1).max() > 0


@pytest.mark.parametrize("name", [*HEADS, "tied_naive"])
def test_first_losses_of_the_shipped_variants_match_the_formulas(name: str) -> None:
    """configs/head at the default size."""
    loss, c = first_loss(head := SHIPPED[name], 128, 2048)
    if head.kind == "untied":
        assert loss == pytest.approx(math.log(2048) + 128 * head.head_std**2 / 2, rel=0.02)
    else:
        assert loss == pytest.approx(expected_first_loss(head.embedding_std or 128**-0.5, c, 128, 2048), rel=0.02)
    if name in ("tied_projected", "untied_from_embedding", "untied_midtraining"):
        assert loss == first_loss(SHIPPED["tied"], 128, 2048)[0], "bit for bit"
    assert (loss > 10 * math.log(2048)) == (name == "tied_naive")


class TestUntiedMidTraining:
    """Tied until a fraction of training, then untied."""

    def half_way(self) -> tuple[Transformer, Optimizer]:
        """Three steps as tied, with the optimizer that made them."""
        net = build(MIDTRAINING)
        optimizer = optimizer_of(net)
        for progress in (0.0, 0.2, 0.4):
            net.head.on_train_step(progress, net.embed.weight, optimizer.state)
            step(net, optimizer)
        return net, optimizer

    def test_before_untying_it_equals_tied_bit_for_bit(self) -> None:
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
        assert torch.equal(own, build(MIDTRAINING).embed.weight), "its own matrix keeps its initial values"

    def test_untying_changes_no_logit_and_copies_weights_and_moments(self) -> None:
        net, optimizer = self.half_way()
        embedding, own, before = net.embed.weight, net.head.proj.weight, net(TOKENS)
        net.head.on_train_step(0.5, embedding, optimizer.state)
        assert torch.equal(net(TOKENS), before)
        assert net.head.matrix(embedding) is own
        assert torch.equal(own, embedding)
        assert unaliased(net)
        mine, its = optimizer.state[own], optimizer.state[embedding]
        assert mine.keys() == its.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[name], its[name]) for name in its)
        assert all(mine[name].data_ptr() != its[name].data_ptr() for name in its)
        assert its["step"] == 3
        assert all(its[name].norm() > 0 for name in its)
        step(net, optimizer)
        assert mine["step"] == its["step"] == 4
        assert not any(torch.equal(mine[name], its[name]) for name in ("exp_avg", "exp_avg_sq"))
        assert not torch.equal(own, embedding)

    def test_it_unties_once(self) -> None:
        net, optimizer = self.half_way()
        for progress in (0.5, 0.6):
            net.head.on_train_step(progress, net.embed.weight, optimizer.state)
            step(net, optimizer)
        state = deepcopy(net.state_dict())
        moments = {name: value.clone() for name, value in optimizer.state[net.head.proj.weight].items()}
        net.head.on_train_step(0.8, net.embed.weight, optimizer.state)
        assert same(net.state_dict(), state)
        assert same(optimizer.state[net.head.proj.weight], moments)

    def test_after_untying_both_gradients_add_up_to_the_tied_one(self) -> None:
        net, optimizer = self.half_way()
        embedding, own = net.embed.weight, net.head.proj.weight
        loss_of(net).backward()
        tied = embedding.grad
        optimizer.zero_grad()
        net.head.on_train_step(0.5, embedding, optimizer.state)
        loss_of(net).backward()
        assert torch.allclose(embedding.grad + own.grad, tied, atol=1e-7)
        assert min(embedding.grad.norm(), own.grad.norm()) > 1e-2

    @pytest.mark.parametrize(("at", "tied"), [(0.0, []), (0.3, [0, 1, 2]), (0.66, range(7)), (1.0, range(10))])
    def test_it_is_tied_in_the_steps_before_untie_at(self, at: float, tied: list[int]) -> None:
        net = build(replace(MIDTRAINING, untie_at=at))
        embedding, found, state = net.embed.weight, [], {}
        for i in range(10):
            net.head.on_train_step(i / 10, embedding, state)
            found += [i] if net.head.matrix(embedding) is embedding else []
        assert found == list(tied)

    def test_finalise_keeps_the_logits_before_and_after_untying(self) -> None:
        net, optimizer = self.half_way()
        before = net(TOKENS)
        net.head.finalise(net.embed.weight)
        assert torch.equal(net(TOKENS), before)
        again = build(MIDTRAINING)
        again.load_state_dict(net.state_dict())
        assert torch.equal(again(TOKENS), before), "a loaded model does not know the progress of training"
        net.head.on_train_step(0.5, net.embed.weight, optimizer.state)
        step(net, optimizer)
        before = net(TOKENS)
        net.head.finalise(net.embed.weight)
        assert torch.equal(net(TOKENS), before)
        assert not torch.equal(net.head.proj.weight, net.embed.weight)
