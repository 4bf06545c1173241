"""The loss: chunked and plain are equal, bf16 is near, and activation checkpointing changes no number."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from conftest import HEADS, SEQ, VOCAB, tiny
from torch import Tensor

from lm import Transformer
from lm.config import DataConfig, HeadConfig, RunConfig
from lm.training.loss import HAS_CHUNKED, LOSSES, chunked, plain
from lm.training.resolve import build_model

needs_chunks = pytest.mark.skipif(not HAS_CHUNKED, reason="needs torch 2.13")


def build(head: HeadConfig, n_sequences: int = 3, **changes: object) -> tuple[Transformer, Tensor, Tensor]:
    net = Transformer(tiny(**changes), head, vocab_size=VOCAB, seq_len=SEQ)
    net.head.on_train_step(0.0, net.embed.weight, {})
    tokens, targets = torch.randint(VOCAB, (2, n_sequences, SEQ), generator=torch.Generator().manual_seed(0))
    targets[0, :5] = -100
    return net, tokens, targets


def gradients(net: Transformer, loss: Callable[[], Tensor], autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        value = loss()
    value.backward()
    return value.detach(), {
        name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None
    }


@needs_chunks
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_chunked_equals_plain_in_value_and_gradients(head: HeadConfig) -> None:
    """In two chunks, the last one smaller."""
    net, tokens, targets = build(head, n_sequences=50)
    (value, grads), (other_value, other_grads) = (
        gradients(net, lambda loss=loss: loss(net, tokens, targets)) for loss in (LOSSES["plain"], LOSSES["chunked"])
    )
    torch.testing.assert_close(other_value, value, rtol=1e-6, atol=1e-6)
    assert other_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(other_grads[name], grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("head", "loss"), [("tied", plain), pytest.param("untied", chunked, marks=needs_chunks), ("tied_projected", plain)]
)
def test_bf16_is_near(head: str, loss: Callable[..., Tensor]) -> None:
    """With large logits, because all losses of an untrained model are near ln V."""
    net, tokens, targets = build(HEADS[head])
    with torch.no_grad():
        net.norm.weight.mul_(40 / net.head.matrix(net.embed.weight).norm(dim=1).mean())
    value, grads = gradients(net, lambda: plain(net, tokens, targets))
    assert value.item() > 2 * math.log(VOCAB)
    rough_value, rough_grads = gradients(net, lambda: loss(net, tokens, targets), autocast=True)
    assert rough_value.item() == pytest.approx(value.item(), rel=1e-2)
    for name, grad in grads.items():
        assert torch.cosine_similarity(grad.flatten(), rough_grads[name].flatten(), dim=0) > 0.98, name
        assert not torch.equal(grad, rough_grads[name]), "the matmuls ran in bf16"


@needs_chunks
def test_chunked_never_holds_all_logits() -> None:
    net, n_sequences = Transformer(tiny(n_layers=1), HEADS["tied"], vocab_size=10_000, seq_len=512), 4
    tokens = torch.randint(10_000, (n_sequences, 512))
    logits = n_sequences * 512 * 10_000 * 4
    largest = {}
    for name, loss in LOSSES.items():
        with torch.profiler.profile(profile_memory=True) as profile:
            loss(net, tokens, tokens).backward()
        largest[name] = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest["chunked"] < logits / 2 < logits <= largest["plain"]


def test_activation_checkpointing_keeps_less_and_changes_no_number() -> None:
    """With dropout, whose masks must be repeated exactly."""
    model, data = tiny(n_layers=4, dropout=0.3), DataConfig(seq_len=SEQ)
    tokens, targets = torch.randint(VOCAB, (2, 3, SEQ))
    net, again = (
        build_model(RunConfig(model=model, head=HEADS["tied"], data=data, activation_checkpointing=enabled), VOCAB)
        for enabled in (False, True)
    )
    assert again.state_dict().keys() == net.state_dict().keys()

    def step(net: Transformer) -> tuple[Tensor, dict[str, Tensor], int]:
        torch.manual_seed(1)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            value = plain(net, tokens, targets)
        value.backward()
        grads = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
        return value, grads, sum(tensor.nbytes for tensor in kept if tensor.ndim > 2)

    (value, grads, kept), (value_again, grads_again, kept_again) = step(net), step(again)
    assert torch.equal(value, value_again)
    assert all(torch.equal(grads_again[name], grad) for name, grad in grads.items())
    assert kept_again < 0.3 * kept
