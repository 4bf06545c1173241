"""The loss: chunked and plain are one function, in value and gradients; chunked never holds all logits."""

import copy
import math

import pytest
import torch
from conftest import HEADS, SEQ, VOCAB, tiny
from torch import Tensor

from lm.benchmark.memory import kept, of_a_step
from lm.benchmark.shapes import Shape
from lm.config import LOSSES as NAMES
from lm.config import BadInput, HeadConfig
from lm.model.activation_checkpointing import enable_activation_checkpointing
from lm.model.head import TiedHead
from lm.model.transformer import Transformer
from lm.training import loss as module
from lm.training.loss import CHUNKS, LOSSES, MANY, chunked, plain, which_loss

needs_chunks = pytest.mark.skipif(not CHUNKS, reason="needs torch 2.13")


def setting(head: HeadConfig, **body: object) -> tuple[Transformer, Tensor, Tensor]:
    net = Transformer(tiny(**body), head, vocab_size=VOCAB, seq_len=SEQ)
    net.head.advance(0.0, net.embed.weight, {})
    tokens, targets = torch.randint(VOCAB, (2, 3, SEQ), generator=torch.Generator().manual_seed(0))
    targets[0, :5] = -100
    return net, tokens, targets


def gradients(net: Transformer) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in net.named_parameters() if one.grad is not None}


@needs_chunks
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_chunked_is_the_plain_loss_with_its_gradients(head: HeadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 7)  # so that there are chunks, and a last one that is not full
    net, tokens, targets = setting(head)
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
    """Of a model with something to say: the losses of an untrained one are all near ln V."""
    net, tokens, targets = setting(head)
    with torch.no_grad():
        net.norm.weight.mul_(40 / net.head.matrix(net.embed.weight).norm(dim=1).mean())
    exact = plain(net, tokens, targets)
    assert exact.item() > 2 * math.log(VOCAB)
    exact.backward()
    wanted = gradients(net)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        near = chunked(net, tokens, targets)
    near.backward()
    assert near.item() == pytest.approx(exact.item(), rel=1e-2)
    found = gradients(net)
    for name, one in wanted.items():
        assert torch.cosine_similarity(one.flatten(), found[name].flatten(), dim=0) > 0.98, name


@needs_chunks
@pytest.mark.slow
def test_chunked_never_holds_all_logits() -> None:
    shape = Shape(tiny(n_layers=1), vocab_size=20000, batch=8, time=512)
    logits = 8 * 512 * 20000 * 4
    peaks = {name: of_a_step(shape, "cpu", name) for name in LOSSES}
    assert peaks["chunked"] < logits < 2 * logits < peaks["plain"], peaks


class Capped(TiedHead):
    """No product: bent at the end."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table).tanh()


def test_the_configuration_knows_each_loss() -> None:
    assert ("auto", *LOSSES) == NAMES


def test_auto_takes_the_faster_one_that_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = (Transformer(tiny(), HEADS["tied"], vocab_size=n, seq_len=SEQ) for n in (MANY[False], MANY[False] - 1))
    assert which_loss("auto", many, "cpu", False) == ("chunked" if CHUNKS else "plain")
    assert which_loss("auto", few, "cpu", False) == "plain"
    assert which_loss("auto", many, "cuda", False) == "plain"
    assert which_loss("auto", many, "cpu", True) == "plain"
    assert which_loss("auto", many, "cpu", False, mixed=True) == "plain"
    more = Transformer(tiny(), HEADS["tied"], vocab_size=MANY[True], seq_len=SEQ)
    assert MANY[True] == 8192
    assert which_loss("auto", more, "cpu", False, mixed=True) == ("chunked" if CHUNKS else "plain")
    assert which_loss("plain", many, "cpu", False) == "plain"
    monkeypatch.setattr(many.head, "__class__", Capped)
    assert which_loss("auto", many, "cpu", False) == "plain"
    with pytest.raises(BadInput, match="loss=chunked: Capped gives logits that are no product"):
        which_loss("chunked", many, "cpu", False)
    monkeypatch.setattr(module, "CHUNKS", False)  # as torch 2.12 is
    assert which_loss("auto", many, "cpu", False) == "plain"
    with pytest.raises(BadInput, match=r"loss=chunked: needs torch 2\.13 or later, not .*; loss=plain is the same"):
        which_loss("chunked", few, "cpu", False)


def test_recompute_keeps_less_and_changes_no_number() -> None:
    """With dropout, whose draws must come again as they were."""
    net, tokens, targets = setting(HEADS["tied"], n_layers=4, dropout=0.3)
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
