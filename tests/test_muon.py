"""Muon: steps are orthogonal as an SVD would make them, batched or not, and the state is one optimizer's."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import SEQ, TIED, VOCAB, tiny
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lm.config import BadInput, OptimConfig
from lm.model.transformer import Transformer
from lm.system.device import has_native_bf16
from lm.training.muon import ROUNDS, Muon, orthogonalise
from lm.training.optim import build_optimizer, step_flops

MUON = OptimConfig(name="muon", lr=0.02, adam_lr=0.01, momentum=0.9, ns_steps=5, weight_decay=0.1)


def matrices(rows: int, columns: int, conditioning: float) -> Tensor:
    """Three matrices whose singular values fall to 1/conditioning of the largest."""
    torch.manual_seed(rows + columns)
    left, _, right = torch.linalg.svd(torch.randn(3, rows, columns), full_matrices=False)
    return left * torch.logspace(0, -torch.tensor(conditioning).log10().item(), rows) @ right


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 40), (128, 512), (1, 9)])
@pytest.mark.parametrize(("ns_steps", "conditioning", "near"), [(5, 30.0, 0.15), (7, 100.0, 0.01)])
def test_the_result_is_that_of_an_svd(rows: int, columns: int, ns_steps: int, conditioning: float, near: float) -> None:
    x = matrices(rows, columns, conditioning)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalise(x, ns_steps)
    torch.testing.assert_close(torch.linalg.svdvals(found), torch.ones(3, rows), atol=near, rtol=0)
    torch.testing.assert_close(found, left @ right, atol=near, rtol=0)


def test_more_rounds_come_nearer_and_scale_does_not_matter() -> None:
    x = matrices(32, 64, 50.0)
    errors = [(torch.linalg.svdvals(orthogonalise(x, n)) - 1).abs().max() for n in range(1, len(ROUNDS) + 1)]
    assert errors[-1] < 1e-3 < errors[2] < errors[0]
    torch.testing.assert_close(orthogonalise(1000 * x, 5), orthogonalise(x, 5), atol=1e-4, rtol=1e-4)
    assert torch.equal(orthogonalise(torch.zeros(2, 4, 4), 5), torch.zeros(2, 4, 4))


def test_a_matrix_that_stands_is_treated_as_one_that_lies() -> None:
    lying = nn.Parameter(torch.zeros(4, 12))
    standing = nn.Parameter(torch.zeros(12, 4))
    square = nn.Parameter(torch.zeros(4, 4))
    lying.grad = torch.randn(4, 12)
    standing.grad = lying.grad.T.clone()
    square.grad = torch.randn(4, 4)
    group = {"params": [lying, square, standing], "momentum": 0.9, "ns_steps": 5, "weight_decay": 0.0}
    Muon([group], lr=0.1).step()
    torch.testing.assert_close(standing, lying.T * 3**0.5)  # max(1, rows/columns)**0.5
    torch.testing.assert_close(torch.linalg.svdvals(square.detach()), torch.full((4,), 0.1), atol=0.02, rtol=0)


def test_batched_steps_are_those_of_each_matrix_alone() -> None:
    def step(parameters: list[nn.Parameter], together: bool) -> None:
        for group in [parameters] if together else [[one] for one in parameters]:
            optimizer = Muon([{"params": group, "momentum": 0.9, "ns_steps": 5, "weight_decay": 0.1}], lr=0.1)
            for i in range(3):
                torch.manual_seed(i)
                for one in parameters:
                    one.grad = torch.randn_like(one)
                optimizer.step()

    torch.manual_seed(0)
    one = [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (8, 24), (8, 8), (24, 8))]
    other = copy.deepcopy(one)
    step(one, together=True)
    step(other, together=False)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_it_agrees_with_the_muon_of_torch() -> None:
    """Which iterates with other coefficients, in bfloat16: the same direction, nearly the same length."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    ours.grad = torch.randn(64, 64)
    theirs.grad = ours.grad.clone()
    Muon([{"params": [ours], "momentum": 0.95, "ns_steps": 5, "weight_decay": 0.0}], lr=0.1).step()
    torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0).step()
    assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.97
    assert ours.norm().item() == pytest.approx(theirs.norm().item(), rel=0.2)


@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.95])
def test_it_steps_along_an_average_of_gradients_that_looks_ahead(momentum: float) -> None:
    """By hand: m = momentum m + (1 - momentum) g; the step is what is orthogonal in (1 - momentum) g + momentum m."""
    torch.manual_seed(0)
    weight, average = nn.Parameter(torch.randn(6, 9)), torch.zeros(6, 9)
    expected = weight.detach().clone()
    optimizer = Muon([{"params": [weight], "momentum": momentum, "ns_steps": 5, "weight_decay": 0.1}], lr=0.1)
    for _ in range(4):
        weight.grad = torch.randn(6, 9)
        average = momentum * average + (1 - momentum) * weight.grad
        ahead = (1 - momentum) * weight.grad + momentum * average
        step = orthogonalise((ahead.bfloat16() if has_native_bf16("cpu") else ahead)[None], 5)[0].float()
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * step
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-5)


def trained(steps: int, net: Transformer, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        net(torch.arange(SEQ)[None] % VOCAB).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_rest_is_updated_by_adamw_and_all_of_it_resumes() -> None:
    net = Transformer(tiny(), TIED, vocab_size=VOCAB, seq_len=SEQ, seed=0)
    optimizer = build_optimizer(net, MUON, TIED)
    trained(3, net, optimizer)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    kinds = {names[id(parameter)]: set(state) for parameter, state in optimizer.state.items()}
    assert {name for name, kind in kinds.items() if kind == {"step", "exp_avg"}} == {
        name for name in kinds if name.endswith("_proj.weight")
    }
    assert kinds["embed.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    assert len(optimizer.param_groups) == 3

    twin = Transformer(tiny(), TIED, vocab_size=VOCAB, seq_len=SEQ, seed=1)
    twin.load_state_dict(net.state_dict())
    resumed = build_optimizer(twin, MUON, TIED)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trained(2, net, optimizer)
    trained(2, twin, resumed)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name])


def test_weights_decay_by_the_rate_of_their_own_group() -> None:
    still = nn.Parameter(torch.ones(4, 4))
    still.grad = torch.zeros(4, 4)
    Muon([{"params": [still], "momentum": 0.9, "ns_steps": 5, "weight_decay": 0.5}], lr=0.1).step()
    torch.testing.assert_close(still.detach(), torch.full((4, 4), 0.95))


def test_its_products_are_counted() -> None:
    net = Transformer(tiny(d_ff=80, ffn="swiglu"), TIED, vocab_size=VOCAB, seq_len=SEQ, seed=0)
    for config in (MUON, OptimConfig()):
        optimizer = build_optimizer(net, config, TIED)
        net(torch.arange(SEQ)[None]).logsumexp(-1).sum().backward()
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert step_flops(net, config, TIED) == counter.get_total_flops()
    assert step_flops(net, MUON, TIED) > 0


def test_the_configuration_knows_how_many_rounds_there_are() -> None:
    replace(MUON, ns_steps=len(ROUNDS))
    with pytest.raises(BadInput, match=r"optim\.ns_steps=8: expected 1 to 7"):
        replace(MUON, ns_steps=len(ROUNDS) + 1)
