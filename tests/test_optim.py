"""The learning rate is a pure function of the step, and every parameter is in exactly one group."""

import math
from itertools import pairwise

import pytest
import torch
from conftest import SEQ, TIED, UNTIED, VOCAB, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import DECAYS, OPTIMIZERS, HeadConfig, ModelConfig, OptimConfig
from lm.model.transformer import Transformer
from lm.training.optim import OPTIMIZERS as BUILDERS
from lm.training.optim import build_optimizer, lr_factor, parameter_groups

fractions = st.floats(0, 1)
schedules = st.builds(
    OptimConfig,
    warmup_steps=st.integers(0, 300),
    decay=st.sampled_from(DECAYS),
    decay_fraction=fractions,
    final_lr_fraction=fractions,
)


def factors(total: int, **settings: object) -> list[float]:
    config = OptimConfig(**settings)  # type: ignore[arg-type]
    return [lr_factor(step, total, config) for step in range(total + 1)]


@given(schedules, st.integers(1, 200))
@settings(deadline=None)
def test_the_learning_rate_is_between_zero_and_its_peak_and_a_function_of_the_step(
    config: OptimConfig, total: int
) -> None:
    forwards = [lr_factor(step, total, config) for step in range(total + 1)]
    backwards = [lr_factor(step, total, config) for step in range(total, -1, -1)]
    assert forwards == backwards[::-1]
    assert all(0 <= factor <= 1 for factor in forwards)


@given(schedules, st.integers(1, 200))
@settings(deadline=None)
def test_the_learning_rate_is_continuous(config: OptimConfig, total: int) -> None:
    steepest = 1 / (config.warmup_steps + 1)
    if config.decay != "constant" and config.decay_fraction:
        steepest += math.pi / 2 * (1 - config.final_lr_fraction) / (config.decay_fraction * total)
    for step in range(total):
        change = lr_factor(step + 1, total, config) - lr_factor(step, total, config)
        assert abs(change) <= steepest + 1e-9


@pytest.mark.parametrize("warmup_steps", [0, 1, 10])
def test_the_warm_up_rises_in_equal_steps_and_reaches_the_peak(warmup_steps: int) -> None:
    found = factors(100, warmup_steps=warmup_steps, decay="constant")
    assert found[: warmup_steps + 1] == pytest.approx([(i + 1) / (warmup_steps + 1) for i in range(warmup_steps + 1)])
    assert found[warmup_steps:] == [1.0] * (101 - warmup_steps)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("decay_fraction", "start"), [(1.0, 0), (0.2, 80)])
def test_the_decay_covers_its_fraction_of_the_run_and_ends_at_the_final_fraction(
    decay: str, decay_fraction: float, start: int
) -> None:
    found = factors(100, warmup_steps=0, decay=decay, decay_fraction=decay_fraction, final_lr_fraction=0.1)
    assert found[: start + 1] == [1.0] * (start + 1)
    assert all(earlier > later for earlier, later in pairwise(found[start:]))
    assert found[-1] == pytest.approx(0.1)
    assert found[(start + 100) // 2] == pytest.approx(0.55)  # both shapes are half-way in the middle


def test_constant_stays_at_the_peak_and_so_does_a_decay_over_nothing() -> None:
    assert factors(10, warmup_steps=0, decay="constant", final_lr_fraction=0.0) == [1.0] * 11
    assert factors(10, warmup_steps=0, decay="linear", decay_fraction=0.0) == [1.0] * 11


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    found = factors(10, warmup_steps=1000, decay="constant")
    assert found == sorted(found)
    assert found[-1] == pytest.approx(11 / 1001)


MODELS = [
    tiny(),
    tiny(bias=True, norm="layernorm", ffn="swiglu", qk_norm=True, position="learned"),
    tiny(n_kv_heads=1, ffn="gelu"),
]


@pytest.mark.parametrize("head", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("config", MODELS, ids=["plain", "everything", "multi_query"])
def test_every_parameter_is_in_one_group_and_only_block_matrices_have_weight_decay(
    config: ModelConfig, head: HeadConfig
) -> None:
    net = Transformer(config, head, vocab_size=VOCAB, seq_len=SEQ)
    groups = parameter_groups(net, OptimConfig(weight_decay=0.3), head)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert len(grouped) == len({id(parameter) for parameter in grouped})
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in net.parameters()}
    decaying = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decaying == {id(parameter) for name, parameter in net.named_parameters() if name.endswith("_proj.weight")}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


def test_embedding_and_head_have_learning_rates_of_their_own() -> None:
    head = HeadConfig(name="untied", kind="untied", embedding_lr_multiplier=0.25, head_std=0.02, head_lr_multiplier=4.0)
    net = Transformer(tiny(), head, vocab_size=VOCAB, seq_len=SEQ)
    groups = {group["name"]: group for group in parameter_groups(net, OptimConfig(lr=0.01), head)}
    assert {name: group["lr"] for name, group in groups.items()} == pytest.approx(
        {"block_matrices": 0.01, "other": 0.01, "embedding": 0.0025, "head": 0.04}
    )
    assert groups["embedding"]["params"] == [net.embed.weight]
    assert groups["head"]["params"] == list(net.head.parameters())


def test_a_tied_head_has_no_group() -> None:
    net = Transformer(tiny(), TIED, vocab_size=VOCAB, seq_len=SEQ)
    groups = {
        group["name"]: group
        for group in parameter_groups(net, OptimConfig(lr=0.01), HeadConfig(embedding_lr_multiplier=2.0))
    }
    assert set(groups) == {"block_matrices", "other", "embedding"}
    assert groups["embedding"]["lr"] == pytest.approx(0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_named_optimizer_moves_every_parameter(name: str) -> None:
    net = Transformer(tiny(), UNTIED, vocab_size=VOCAB, seq_len=SEQ, seed=0)
    own: dict[str, float] = {"adam_lr": 0.02, "momentum": 0.95, "ns_steps": 5} if name == "muon" else {}
    optimizer = build_optimizer(net, OptimConfig(name=name, **own), UNTIED)  # type: ignore[arg-type]
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    net(torch.arange(SEQ)[None]).logsumexp(-1).sum().backward()
    optimizer.step()
    assert [key for key, tensor in net.state_dict().items() if torch.equal(before[key], tensor)] == []


def test_the_configuration_names_every_optimizer() -> None:
    assert tuple(BUILDERS) == OPTIMIZERS
