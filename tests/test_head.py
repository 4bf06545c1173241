"""Tied and untied: what they share, what they cost, where they start, and what a tied table learns from."""

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

from lm.config import BadInput, HeadConfig, ModelConfig, OptimConfig
from lm.model.size import n_params
from lm.model.transformer import Transformer
from lm.optim import build_optimizer

TOKENS, TARGETS = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))
each_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def build(head: HeadConfig, seed: int = 0) -> Transformer:
    return Transformer(tiny(), head, vocab_size=VOCAB, seq_len=SEQ, seed=seed)


def step(net: Transformer) -> None:
    optimizer = build_optimizer(net, OptimConfig(warmup_steps=0), net.head_config)
    F.cross_entropy(net(TOKENS).flatten(0, 1), TARGETS.flatten()).backward()
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


def test_arms_of_one_seed_share_all_that_they_can() -> None:
    """The trunk bit for bit; the tables one draw, each at its own scale. Another seed shares nothing drawn."""
    tied, untied, other = (build(*one).state_dict() for one in ((TIED,), (UNTIED,), (TIED, 1)))
    trunk = tied.keys() - {"embed.weight"}
    assert all(torch.equal(tied[name], untied[name]) for name in trunk)
    assert torch.equal(tied["embed.weight"], untied["embed.weight"] * TIED.table_std)
    assert untied["embed.weight"].std().item() == pytest.approx(UNTIED.table_std, rel=0.05)
    assert untied["head.proj.weight"].std().item() == pytest.approx(UNTIED.head_std, rel=0.05)
    assert not torch.equal(untied["embed.weight"] * UNTIED.head_std, untied["head.proj.weight"])  # a draw of its own
    assert not any(torch.equal(tied[name], other[name]) for name in tied if "norm" not in name)


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


@pytest.mark.parametrize("s", [0.005, 0.02, 1 / math.sqrt(D), 1.0])
def test_a_tied_model_starts_where_its_echo_says(s: float) -> None:
    """ln(V exp(d s^2/2) + exp(d s c)): the residual path makes a fresh tied model predict a repeat of its input."""
    loss, c = first_loss(replace(TIED, table_std=s), D, V)
    formula = torch.logaddexp(torch.tensor(math.log(V) + D * s**2 / 2), D * s * c).mean().item()
    assert loss == pytest.approx(formula, rel=0.02)


def test_a_tied_table_left_at_n_0_1_starts_far_above_ln_v() -> None:
    """The commonest mistake about tying; small tables, tied or not, start at ln V."""
    assert first_loss(replace(TIED, table_std=1.0), D, V)[0] > 10 * math.log(V)
    assert first_loss(TIED, D, V)[0] == pytest.approx(math.log(V), abs=0.1)
    assert first_loss(UNTIED, D, V)[0] == pytest.approx(math.log(V), abs=0.1)


def test_a_tied_table_learns_from_both_its_uses() -> None:
    """Its gradient is the lookup's plus the head's, as an untied model with an equal head has them apart."""
    tied, untied = build(TIED), build(replace(UNTIED, table_std=TIED.table_std))
    untied.head.proj.load_state_dict({"weight": tied.embed.weight})
    for net in (tied, untied):
        F.cross_entropy(net(TOKENS).flatten(0, 1), TARGETS.flatten()).backward()
    lookup, scores = untied.embed.weight.grad, untied.head.proj.weight.grad
    assert torch.allclose(tied.embed.weight.grad, lookup + scores, atol=1e-7)
    assert lookup.norm() > 1e-2
    assert scores.norm() > 1e-2
    absent = torch.bincount(TOKENS.flatten(), minlength=VOCAB) == 0
    assert lookup[absent].count_nonzero() == 0  # a row that is not looked up learns from the head alone
    assert scores[absent].abs().amin(-1).max() > 0


@pytest.mark.parametrize("own", [{"head_lr": 1.0}, {"head_std": 0.02}, {"head_lr": 1.0, "head_std": 0.02}])
def test_a_tied_head_refuses_settings_of_a_matrix_it_has_not(own: dict) -> None:
    with pytest.raises(BadInput, match=r"head\.head_lr"):
        HeadConfig(kind="tied", **own)


@pytest.mark.parametrize("own", [{}, {"head_lr": 1.0}, {"head_std": 0.02}])
def test_an_untied_head_needs_settings_of_its_own(own: dict) -> None:
    with pytest.raises(BadInput, match=r"head\.head_lr"):
        HeadConfig(kind="untied", **own)


@pytest.mark.parametrize("name", HEADS)
def test_the_shipped_regimes_start_where_the_formulas_say(name: str) -> None:
    """configs/head at the size of the default run."""
    settings = yaml.safe_load((ROOT / "configs/head" / f"{name}.yaml").read_text())
    loss, c = first_loss(head := HeadConfig(**settings), 128, 2048)
    if name == "untied":
        assert loss == pytest.approx(math.log(2048) + 128 * head.head_std**2 / 2, rel=0.02)
    else:
        formula = torch.logaddexp(torch.tensor(math.log(2048) + 0.5), 128**0.5 * c).mean().item()
        assert loss == pytest.approx(formula, rel=0.02)
