"""Muon: updates are orthogonalised as by an SVD, batched or not, in one optimizer together with AdamW."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import SEQ, TIED, VOCAB, tiny
from lm.training.muon import COEFFICIENTS, Muon, orthogonalise
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lm.config import BadInput, OptimConfig
from lm.model.transformer import Transformer
from lm.system.device import has_native_bf16
from lm.training.optim import build_optimizer, step_flops

MUON = OptimConfig(name="muon", lr=0.02, adam_lr=0.01, momentum=0.9, ns_steps=5, weight_decay=0.1)


def matrices(rows: int, columns: int, conditioning: float) -> Tensor:
    """Three matrices whose smallest singular value is 1/conditioning of the largest."""
    torch.manual_seed(rows + columns)
    left, _, right = torch.linalg.svd(torch.randn(3, rows, columns), full_matrices=False)
    return left * torch.logspace(0, -torch.tensor(conditioning).log10().item(), rows) @ right


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 40), (128, 512), (1, 9)])
@pytest.mark.parametrize(("ns_steps", "conditioning", "tolerance"), [(5, 30.0, 0.15), (7, 100.0, 0.01)])
def test_orthogonalise_equals_an_svd(
    rows: int, columns: int, ns_steps: int, conditioning: float, tolerance: float
) -> None:
    x = matrices(rows, columns, conditioning)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalise(x, ns_steps)
    torch.testing.assert_close(torch.linalg.svdvals(found), torch.ones(3, rows), atol=tolerance, rtol=0)
    torch.testing.assert_close(found, left @ right, atol=tolerance, rtol=0)


def test_more_newton_schulz_steps_are_more_accurate_at_any_scale() -> None:
    x = matrices(32, 64, 50.0)
    errors = [(torch.linalg.svdvals(orthogonalise(x, n)) - 1).abs().max() for n in range(1, len(COEFFICIENTS) + 1)]
    assert errors[-1] < 1e-3 < errors[2] < errors[0]
    torch.testing.assert_close(orthogonalise(1000 * x, 5), orthogonalise(x, 5), atol=1e-4, rtol=1e-4)
    assert torch.equal(orthogonalise(torch.zeros(2, 4, 4), 5), torch.zeros(2, 4, 4))


def test_a_tall_matrix_is_treated_as_a_wide_one() -> None:
    wide = nn.Parameter(torch.zeros(4, 12))
    tall = nn.Parameter(torch.zeros(12, 4))
    square = nn.Parameter(torch.zeros(4, 4))
    wide.grad = torch.randn(4, 12)
    tall.grad = wide.grad.T.clone()
    square.grad = torch.randn(4, 4)
    group = {"params": [wide, square, tall], "momentum": 0.9, "ns_steps": 5, "weight_decay": 0.0}
    Muon([group], lr=0.1).step()
    torch.testing.assert_close(tall, wide.T * 3**0.5)  # max(1, rows/columns)**0.5
    torch.testing.assert_close(torch.linalg.svdvals(square.detach()), torch.full((4,), 0.1), atol=0.02, rtol=0)


def test_batched_updates_equal_those_of_single_matrices() -> None:
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
    """It uses other coefficients, in bfloat16: the same direction, nearly the same norm."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    ours.grad = torch.randn(64, 64)
    theirs.grad = ours.grad.clone()
    Muon([{"params": [ours], "momentum": 0.95, "ns_steps": 5, "weight_decay": 0.0}], lr=0.1).step()
    torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0).step()
    assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.97
    assert ours.norm().item() == pytest.approx(theirs.norm().item(), rel=0.2)


@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.95])
def test_the_update_orthogonalises_nesterov_momentum(momentum: float) -> None:
    """m = momentum m + (1 - momentum) g; the update is orthogonalise((1 - momentum) g + momentum m)."""
    torch.manual_seed(0)
    weight, average = nn.Parameter(torch.randn(6, 9)), torch.zeros(6, 9)
    expected = weight.detach().clone()
    optimizer = Muon([{"params": [weight], "momentum": momentum, "ns_steps": 5, "weight_decay": 0.1}], lr=0.1)
    for _ in range(4):
        weight.grad = torch.randn(6, 9)
        average = momentum * average + (1 - momentum) * weight.grad
        nesterov = (1 - momentum) * weight.grad + momentum * average
        step = orthogonalise((nesterov.bfloat16() if has_native_bf16("cpu") else nesterov)[None], 5)[0].float()
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * step
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-5)


def trained(steps: int, net: Transformer, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        net(torch.arange(SEQ)[None] % VOCAB).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_other_groups_use_adamw_and_the_whole_state_resumes() -> None:
    net = Transformer(tiny(), TIED, vocab_size=VOCAB, seq_len=SEQ, seed=0)
    optimizer = build_optimizer(net, MUON, TIED)
    trained(3, net, optimizer)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    kinds = {names[id(parameter)]: set(state) for parameter, state in optimizer.state.items()}
    assert {name for name, kind in kinds.items() if kind == {"exp_avg"}} == {
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


def test_other_groups_are_updated_as_by_torch_adamw_bit_for_bit() -> None:
    ours, theirs = (nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    mine = Muon([{"params": [ours], "weight_decay": 0.3}], **settings)
    optimizers = mine, torch.optim.AdamW([theirs], weight_decay=0.3, fused=True, **settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers]
    for seed in range(5):
        for parameter, optimizer, schedule in zip((ours, theirs), optimizers, schedules, strict=True):
            parameter.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
            schedule.step()
        assert torch.equal(ours, theirs)
    for name, moment in optimizers[1].state[theirs].items():
        assert torch.equal(mine.state[ours][name], moment)


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.eye(3))
    optimizer = Muon([{"params": [weight], "momentum": 0.9, "ns_steps": 5, "weight_decay": 0.0}], lr=0.1)

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert not torch.equal(weight, torch.eye(3))


def test_weight_decay_uses_the_learning_rate_of_the_group() -> None:
    still = nn.Parameter(torch.ones(4, 4))
    still.grad = torch.zeros(4, 4)
    Muon([{"params": [still], "momentum": 0.9, "ns_steps": 5, "weight_decay": 0.5}], lr=0.1).step()
    torch.testing.assert_close(still.detach(), torch.full((4, 4), 0.95))


def test_step_flops_are_the_matmuls_that_run() -> None:
    net = Transformer(tiny(d_ff=80, ffn="swiglu"), TIED, vocab_size=VOCAB, seq_len=SEQ, seed=0)
    for config in (MUON, OptimConfig()):
        optimizer = build_optimizer(net, config, TIED)
        net(torch.arange(SEQ)[None]).logsumexp(-1).sum().backward()
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert step_flops(net, config, TIED) == counter.get_total_flops()
    assert step_flops(net, MUON, TIED) > 0


def test_ns_steps_is_limited_by_the_number_of_coefficients() -> None:
    replace(MUON, ns_steps=len(COEFFICIENTS))
    with pytest.raises(BadInput, match=r"optim\.ns_steps=8: expected 1 to 7"):
        replace(MUON, ns_steps=len(COEFFICIENTS) + 1)
