"""The learning rate is a pure function of the step, every parameter is in one group, and Muon orthogonalises."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import SEQ, TIED, UNTIED, VOCAB
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lm import Transformer
from lm.config import HeadConfig, OptimConfig
from lm.system.device import has_native_bf16
from lm.training.optim import Muon, build_optimizer, lr_factor, orthogonalise, parameter_groups, step_flops
from tests.helpers.models import build
from tests.helpers.runs import MUON

# --- the learning rate


def factors(total: int, **schedule: Any) -> list[float]:
    return [lr_factor(step, total, OptimConfig(**schedule)) for step in range(total + 1)]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("decay_fraction", "start"), [(1.0, 0), (0.2, 80), (0.0, 100)])
def test_the_decay_covers_its_fraction_of_the_run_and_ends_at_the_final_fraction(
    decay: str, decay_fraction: float, start: int
) -> None:
    rates = factors(100, warmup_steps=0, decay=decay, decay_fraction=decay_fraction, final_lr_fraction=0.1)
    assert rates[: start + 1] == [1.0] * (start + 1)
    assert all(earlier > later for earlier, later in pairwise(rates[start:]))
    if decay_fraction:
        assert rates[-1] == pytest.approx(0.1)
        assert rates[(start + 100) // 2] == pytest.approx(0.55)  # both shapes are half-way in the middle
    warming = factors(100, warmup_steps=10, decay="constant", final_lr_fraction=0.0)
    assert warming == pytest.approx([min(1.0, (i + 1) / 11) for i in range(101)])


# --- groups of parameters


def backward(net: Transformer) -> None:
    net(torch.arange(SEQ)[None] % VOCAB).logsumexp(-1).sum().backward()


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        (TIED, {"bias": True, "norm": "layernorm", "ffn": "swiglu", "qk_norm": True, "position": "learned"}),
        (UNTIED, {"n_kv_heads": 1, "ffn": "gelu"}),
    ],
)
def test_every_parameter_is_in_one_group_and_only_block_matrices_have_weight_decay(
    head: HeadConfig, changes: dict[str, Any]
) -> None:
    net = build(head, **changes)
    groups = parameter_groups(net, OptimConfig(weight_decay=0.3), head)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, net.parameters()))
    decaying = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decaying == {id(parameter) for name, parameter in net.named_parameters() if name.endswith("_proj.weight")}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


def test_embedding_and_head_have_learning_rates_of_their_own() -> None:
    head = HeadConfig(name="untied", kind="untied", embedding_lr_multiplier=0.25, head_std=0.02, head_lr_multiplier=4.0)
    net = build(head)
    groups = {group["name"]: group for group in parameter_groups(net, OptimConfig(lr=0.01), head)}
    assert {name: group["lr"] for name, group in groups.items()} == pytest.approx(
        {"block_matrices": 0.01, "other": 0.01, "embedding": 0.0025, "head": 0.04}
    )
    assert groups["embedding"]["params"] == [net.embed.weight]
    assert groups["head"]["params"] == list(net.head.parameters())
    muon = {group["name"]: group["lr"] for group in parameter_groups(net, MUON, head)}
    assert muon == pytest.approx({"block_matrices": 0.02, "other": 0.003, "embedding": 0.00075, "head": 0.012})


@pytest.mark.parametrize("config", [OptimConfig(), MUON], ids=["adamw", "muon"])
def test_each_optimizer_moves_every_parameter_and_its_flops_are_counted(config: OptimConfig) -> None:
    net = build(UNTIED, d_ff=80, ffn="swiglu")
    optimizer = build_optimizer(net, config, UNTIED)
    before = copy.deepcopy(net.state_dict())
    backward(net)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert [name for name, tensor in net.state_dict().items() if torch.equal(before[name], tensor)] == []
    assert step_flops(net, config, UNTIED) == counter.get_total_flops()
    assert (counter.get_total_flops() > 0) == (config is MUON)


# --- Muon


def matrices(rows: int, columns: int, conditioning: float) -> Tensor:
    """Three matrices whose smallest singular value is 1/conditioning of the largest."""
    torch.manual_seed(rows + columns)
    left, _, right = torch.linalg.svd(torch.randn(3, rows, columns), full_matrices=False)
    return left * torch.logspace(0, -torch.tensor(conditioning).log10().item(), rows) @ right


def muon(*parameters: nn.Parameter, momentum: float = 0.9, weight_decay: float = 0.0) -> Muon:
    group = {"params": [*parameters], "momentum": momentum, "ns_steps": 5, "weight_decay": weight_decay}
    return Muon([group], lr=0.1)


def parameter(tensor: Tensor, grad: Tensor | None = None) -> nn.Parameter:
    weight = nn.Parameter(tensor.clone())
    weight.grad = None if grad is None else grad.clone()
    return weight


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (128, 512), (1, 9)])
@pytest.mark.parametrize(("ns_steps", "conditioning", "tolerance"), [(5, 30.0, 0.15), (7, 100.0, 0.01)])
def test_orthogonalise_equals_an_svd(
    rows: int, columns: int, ns_steps: int, conditioning: float, tolerance: float
) -> None:
    x = matrices(rows, columns, conditioning)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(orthogonalise(x, ns_steps), left @ right, atol=tolerance, rtol=0)


def test_matrices_of_any_shape_are_updated_together_as_apart_and_tall_ones_as_wide_ones() -> None:
    torch.manual_seed(0)
    together = [parameter(torch.randn(shape)) for shape in ((8, 8), (8, 24), (8, 8), (24, 8))]
    together[3].data.copy_(together[1].T)
    apart = copy.deepcopy(together)
    optimizers = [muon(*together, weight_decay=0.1), *(muon(weight, weight_decay=0.1) for weight in apart)]
    before = copy.deepcopy(together)
    for i in range(3):
        for weight, twin in zip(together, apart, strict=True):
            weight.grad = together[1].grad.T.clone() if weight is together[3] else torch.randn_like(weight)
            twin.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        if i == 0:  # max(1, rows/columns)**0.5
            wide, tall = (together[j] - (1 - 0.1 * 0.1) * before[j] for j in (1, 3))
            torch.testing.assert_close(tall, wide.T * 3**0.5)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)


def test_it_agrees_with_the_muon_of_torch() -> None:
    """It uses other coefficients, in bfloat16: the same direction, nearly the same norm."""
    torch.manual_seed(0)
    gradient = torch.randn(64, 64)
    weight, twin = (parameter(torch.zeros(64, 64), gradient) for _ in range(2))
    muon(weight, momentum=0.95).step()
    torch.optim.Muon([twin], lr=0.1, weight_decay=0.0).step()
    assert torch.cosine_similarity(weight.flatten(), twin.flatten(), dim=0) > 0.97
    assert weight.norm().item() == pytest.approx(twin.norm().item(), rel=0.2)


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_the_update_orthogonalises_nesterov_momentum(momentum: float) -> None:
    """m = momentum m + (1 - momentum) g; the update is orthogonalise((1 - momentum) g + momentum m)."""
    torch.manual_seed(0)
    weight, average = parameter(torch.randn(6, 9)), torch.zeros(6, 9)
    expected = weight.detach().clone()
    optimizer = muon(weight, momentum=momentum, weight_decay=0.1)
    for _ in range(4):
        weight.grad = torch.randn(6, 9)
        average = momentum * average + (1 - momentum) * weight.grad
        nesterov = (1 - momentum) * weight.grad + momentum * average
        step = orthogonalise((nesterov.bfloat16() if has_native_bf16("cpu") else nesterov)[None], 5)[0].float()
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * step
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-5)


def test_other_groups_are_updated_as_by_torch_adamw_bit_for_bit() -> None:
    weight, twin = (parameter(torch.ones(5, 3)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    own = Muon([{"params": [weight], "weight_decay": 0.3}], **options)
    optimizers = own, torch.optim.AdamW([twin], weight_decay=0.3, fused=True, **options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in optimizers]
    for seed in range(5):
        for tensor, optimizer, schedule in zip((weight, twin), optimizers, schedules, strict=True):
            tensor.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
            schedule.step()
        assert torch.equal(weight, twin)
    assert all(torch.equal(own.state[weight][name], moment) for name, moment in optimizers[1].state[twin].items())
