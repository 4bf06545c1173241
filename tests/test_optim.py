"""The loss in chunks and in bf16, the learning rate of each step, groups of parameters, and Muon."""

import copy
import math
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lm.config import DataConfig, HeadConfig, OptimConfig, RunConfig
from lm.system.device import has_native_bf16
from lm.training.loss import HAS_CHUNKED, LOSSES, chunked, plain
from lm.training.optim import Muon, build_optimizer, lr_factor, orthogonalise, parameter_groups, step_flops
from lm.training.resolve import build_model
from tests.helpers.models import build, equal, gradients, random_tokens
from tests.helpers.runs import MUON
from tests.helpers.tiny import EVERY_HEAD, SEQ, TIED, UNTIED, VOCAB, tiny

# --- the loss

needs_chunks = pytest.mark.skipif(not HAS_CHUNKED, reason="needs torch 2.13")


def batch(n_sequences):
    """Tokens and targets, some of which are ignored."""
    tokens, targets = random_tokens(2, n_sequences, SEQ)
    targets[0, :5] = -100
    return torch.stack((tokens, targets))


def measured(net, loss, data, autocast=False):
    """The loss and the gradients."""
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        value = loss(net, *data)
    value.backward()
    return value.detach(), gradients(net)


@needs_chunks
@pytest.mark.parametrize("head", EVERY_HEAD.values(), ids=EVERY_HEAD)
def test_chunked_equals_plain_in_value_and_gradients(head):
    """In two chunks, the last one smaller, of logits that a temperature makes larger."""
    net = build(head)
    net.head.on_train_step(0.0, net.embed.weight, {})
    cold = [partial(loss, temperature=0.5) for loss in LOSSES.values()]
    (value, grads), (other_value, other_grads) = (measured(net, loss, batch(50)) for loss in cold)
    logits, targets = 2 * net(batch(50)[0]).flatten(0, 1), batch(50)[1].flatten()
    torch.testing.assert_close(value, F.cross_entropy(logits, targets).detach())
    torch.testing.assert_close(other_value, value, rtol=1e-6, atol=1e-6)
    assert other_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(other_grads[name], grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("head", "loss"), [("tied_projected", plain), pytest.param("untied", chunked, marks=needs_chunks)]
)
def test_bf16_is_near(head, loss):
    """With large logits, because all losses of an untrained model are near ln V."""
    net, data = build(head), batch(3)
    with torch.no_grad():
        net.norm.weight.mul_(40 / net.head.matrix(net.embed.weight).norm(dim=1).mean())
    value, grads = measured(net, plain, data)
    assert value.item() > 2 * math.log(VOCAB)
    rough_value, rough_grads = measured(net, loss, data, autocast=True)
    assert rough_value.item() == pytest.approx(value.item(), rel=1e-2)
    for name, grad in grads.items():
        assert torch.cosine_similarity(grad.flatten(), rough_grads[name].flatten(), dim=0) > 0.98, name
        assert not torch.equal(grad, rough_grads[name]), "the matmuls ran in bf16"


@needs_chunks
def test_chunked_never_holds_all_logits():
    net, n_sequences, v = build("tied", 2_000, 128, n_layers=1), 16, 2_000
    tokens = torch.randint(v, (n_sequences, 128))
    logits = n_sequences * 128 * v * 4
    largest = {}
    for name, loss in LOSSES.items():
        with torch.profiler.profile(profile_memory=True) as profile:
            loss(net, tokens, tokens).backward()
        largest[name] = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest["chunked"] < logits / 2 < logits <= largest["plain"]


def test_activation_checkpointing_keeps_less_and_changes_no_number():
    """With dropout, whose masks must be repeated exactly."""
    model, data = tiny(n_layers=4, dropout=0.3), DataConfig(seq_len=SEQ)
    net, again = (
        build_model(RunConfig(model=model, head=TIED, data=data, activation_checkpointing=enabled), VOCAB)
        for enabled in (False, True)
    )
    assert again.state_dict().keys() == net.state_dict().keys()

    def step(net):
        torch.manual_seed(1)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            value, grads = measured(net, plain, batch(3))
        return value, grads, sum(tensor.nbytes for tensor in kept if tensor.ndim > 2)

    (value, grads, kept), (value_again, grads_again, kept_again) = step(net), step(again)
    assert torch.equal(value, value_again)
    assert equal(grads, grads_again)
    assert kept_again < 0.3 * kept


def factors(**schedule):
    return [lr_factor(step, 100, OptimConfig(**schedule)) for step in range(101)]


def test_the_decay_covers_its_fraction_of_the_run_and_ends_at_the_final_fraction():
    for decay, fraction, start in (("cosine", 1.0, 0), ("cosine", 0.2, 80), ("linear", 0.2, 80), ("linear", 0.0, 100)):
        rates = factors(warmup_steps=0, decay=decay, decay_fraction=fraction, final_lr_fraction=0.1)
        assert rates[: start + 1] == [1.0] * (start + 1)
        assert all(earlier > later for earlier, later in pairwise(rates[start:]))
        if fraction:
            assert rates[-1] == pytest.approx(0.1)
            assert rates[(start + 100) // 2] == pytest.approx(0.55)  # both shapes are half-way in the middle
    warming = factors(warmup_steps=10, decay="constant", final_lr_fraction=0.0)
    assert warming == pytest.approx([min(1.0, (i + 1) / 11) for i in range(101)])


# --- groups of parameters


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        (TIED, {"bias": True, "norm": "layernorm", "ffn": "swiglu", "qk_norm": True, "position": "learned"}),
        (UNTIED, {"n_kv_heads": 1, "ffn": "gelu"}),
    ],
)
def test_each_parameter_is_in_one_group_and_block_matrices_alone_decay(head, changes):
    net = build(head, **changes)
    groups = parameter_groups(net, OptimConfig(weight_decay=0.3), head)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, net.parameters()))
    decaying = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decaying == {id(parameter) for name, parameter in net.named_parameters() if name.endswith("_proj.weight")}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


def test_embedding_and_head_have_learning_rates_of_their_own():
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
def test_the_flops_of_a_step_of_each_optimizer_are_counted(config):
    net = build(UNTIED, d_ff=80, ffn="swiglu")
    optimizer = build_optimizer(net, config, UNTIED)
    measured(net, plain, batch(1))
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert step_flops(net, config, UNTIED) == counter.get_total_flops()
    assert (counter.get_total_flops() > 0) == (config is MUON)


# --- Muon


def matrices(rows, columns, conditioning):
    """Three matrices whose smallest singular value is 1/conditioning of the largest."""
    torch.manual_seed(rows + columns)
    left, _, right = torch.linalg.svd(torch.randn(3, rows, columns), full_matrices=False)
    return left * torch.logspace(0, -torch.tensor(conditioning).log10().item(), rows) @ right


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (128, 512), (1, 9)])
def test_orthogonalise_equals_an_svd(rows, columns):
    for ns_steps, conditioning, tolerance in ((5, 30.0, 0.15), (7, 100.0, 0.01)):
        x = matrices(rows, columns, conditioning)
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        torch.testing.assert_close(orthogonalise(x, ns_steps), left @ right, atol=tolerance, rtol=0)
        assert torch.linalg.matrix_norm(orthogonalise(x.bfloat16(), ns_steps).float(), 2).max() < 1.2


def test_the_update_orthogonalises_nesterov_momentum():
    """m = momentum m + (1 - momentum) g; the update orthogonalises (1 - momentum) g + momentum m.

    Matrices of one shape, transposed where needed, are updated together; those of a tall one are larger.
    """
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((6, 9), (8, 8), (6, 9), (9, 6), (18, 6))]
    expected, averages = copy.deepcopy(weights), [torch.zeros_like(weight) for weight in weights]
    optimizer = Muon([{"params": weights, "momentum": 0.95, "ns_steps": 5, "weight_decay": 0.1}], lr=0.1)
    for _ in range(4):
        for i, weight in enumerate(weights):
            weight.grad = torch.randn_like(weight)
            averages[i] = 0.95 * averages[i] + 0.05 * weight.grad
            nesterov = 0.05 * weight.grad + 0.95 * averages[i]
            is_tall = weight.shape[0] > weight.shape[1]
            wide = nesterov.T if is_tall else nesterov
            step = orthogonalise((wide.bfloat16() if has_native_bf16("cpu") else wide)[None], 5)[0].float()
            step = step.T * (weight.shape[0] / weight.shape[1]) ** 0.5 if is_tall else step
            expected[i].data = expected[i] * (1 - 0.1 * 0.1) - 0.1 * step
        optimizer.step()
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-5)


def test_other_groups_are_updated_as_by_torch_adamw_bit_for_bit():
    weight, twin = (nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    own = Muon([{"params": [weight], "weight_decay": 0.3}], fused=True, **options)
    theirs = torch.optim.AdamW([twin], weight_decay=0.3, fused=True, **options)
    for step in range(5):
        weight.grad = torch.randn(5, 3)
        twin.grad = weight.grad.clone()
        for optimizer in (own, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
        assert torch.equal(weight, twin)
    assert equal(own.state[weight], theirs.state[twin])
