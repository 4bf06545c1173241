"""The loss: chunked and plain have equal values and gradients, and chunked never holds all logits."""

import copy
import math

import pytest
import torch
from conftest import HEADS, SEQ, VOCAB, tiny
from torch import Tensor

from lm.benchmark.memory import kept, step_memory
from lm.benchmark.shapes import Shape
from lm.config import LOSSES as NAMES
from lm.config import BadInput, HeadConfig
from lm.model.head import TiedHead
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.training import loss as module
from lm.training.loss import CHUNKED_FROM_VOCAB_SIZE, HAS_CHUNKED, LOSSES, chunked, plain, resolve_loss

needs_chunks = pytest.mark.skipif(not HAS_CHUNKED, reason="needs torch 2.13")


def build(head: HeadConfig, **changes: object) -> tuple[Transformer, Tensor, Tensor]:
    net = Transformer(tiny(**changes), head, vocab_size=VOCAB, seq_len=SEQ)
    net.head.on_train_step(0.0, net.embed.weight, {})
    tokens, targets = torch.randint(VOCAB, (2, 3, SEQ), generator=torch.Generator().manual_seed(0))
    targets[0, :5] = -100
    return net, tokens, targets


def gradients(net: Transformer) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in net.named_parameters() if one.grad is not None}


@needs_chunks
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_chunked_equals_plain_in_value_and_gradients(head: HeadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", 7)  # several chunks, the last one smaller
    net, tokens, targets = build(head)
    found = {}
    for name, one in LOSSES.items():
        net.zero_grad()
        value = one(net, tokens, targets)
        value.backward()
        found[name] = value.detach(), gradients(net)
    torch.testing.assert_close(found["chunked"][0], found["plain"][0], rtol=1e-6, atol=1e-6)
    assert found["chunked"][1].keys() == found["plain"][1].keys()
    for name, grad in found["plain"][1].items():
        torch.testing.assert_close(found["chunked"][1][name], grad, rtol=1e-4, atol=1e-7, msg=name)


@needs_chunks
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_chunked_under_mixed_precision_is_near(head: HeadConfig) -> None:
    """With large logits, because all losses of an untrained model are near ln V."""
    net, tokens, targets = build(head)
    with torch.no_grad():
        net.norm.weight.mul_(40 / net.head.matrix(net.embed.weight).norm(dim=1).mean())
    exact = plain(net, tokens, targets)
    assert exact.item() > 2 * math.log(VOCAB)
    exact.backward()
    wanted = gradients(net)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        approximate = chunked(net, tokens, targets)
    approximate.backward()
    assert approximate.item() == pytest.approx(exact.item(), rel=1e-2)
    found = gradients(net)
    for name, one in wanted.items():
        assert torch.cosine_similarity(one.flatten(), found[name].flatten(), dim=0) > 0.98, name


@needs_chunks
@pytest.mark.slow
def test_chunked_never_holds_all_logits() -> None:
    shape = Shape(tiny(n_layers=1), vocab_size=20000, batch=8, time=512)
    logits = 8 * 512 * 20000 * 4
    peaks = {name: step_memory(shape, "cpu", name) for name in LOSSES}
    assert peaks["chunked"] < logits < 2 * logits < peaks["plain"], peaks


class Capped(TiedHead):
    """Its logits are not a matrix product: they have an activation."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return super().forward(x, embedding).tanh()


def test_the_configuration_knows_each_loss() -> None:
    assert ("auto", *LOSSES) == NAMES


def test_auto_chooses_the_faster_loss_that_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = (
        Transformer(tiny(), HEADS["tied"], vocab_size=n, seq_len=SEQ)
        for n in (CHUNKED_FROM_VOCAB_SIZE[False], CHUNKED_FROM_VOCAB_SIZE[False] - 1)
    )
    assert resolve_loss("auto", large, "cpu", False) == ("chunked" if HAS_CHUNKED else "plain")
    assert resolve_loss("auto", small, "cpu", False) == "plain"
    assert resolve_loss("auto", large, "cuda", False) == "plain"
    assert resolve_loss("auto", large, "cpu", True) == "plain"
    assert resolve_loss("auto", large, "cpu", False, mixed=True) == "plain"
    larger = Transformer(tiny(), HEADS["tied"], vocab_size=CHUNKED_FROM_VOCAB_SIZE[True], seq_len=SEQ)
    assert CHUNKED_FROM_VOCAB_SIZE[True] == 8192
    assert resolve_loss("auto", larger, "cpu", False, mixed=True) == ("chunked" if HAS_CHUNKED else "plain")
    assert resolve_loss("plain", large, "cpu", False) == "plain"
    monkeypatch.setattr(large.head, "__class__", Capped)
    assert resolve_loss("auto", large, "cpu", False) == "plain"
    with pytest.raises(BadInput, match="loss=chunked: Capped has logits that are not a matrix product"):
        resolve_loss("chunked", large, "cpu", False)
    monkeypatch.setattr(module, "HAS_CHUNKED", False)  # as torch 2.12 is
    assert resolve_loss("auto", large, "cpu", False) == "plain"
    refusal = r"loss=chunked: needs torch 2\.13 or later, not .*; loss=plain computes the same"
    with pytest.raises(BadInput, match=refusal):
        resolve_loss("chunked", small, "cpu", False)


def test_activation_checkpointing_saves_memory_and_changes_no_number() -> None:
    """With dropout, whose masks must be repeated exactly."""
    net, tokens, targets = build(HEADS["tied"], n_layers=4, dropout=0.3)
    again = copy.deepcopy(net)
    enable_activation_checkpointing(again)
    assert again.state_dict().keys() == net.state_dict().keys()
    found = []
    for one in (net, again):
        torch.manual_seed(1)
        value = plain(one, tokens, targets)
        value.backward()
        found.append((value, gradients(one)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[1][1][name], grad) for name, grad in found[0][1].items())
    assert kept(again, lambda: again(tokens)) < 0.3 * kept(net, lambda: net(tokens))
