"""Facts about softmax, cross-entropy and argmax that are often stated wrongly."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.inference.sampling import GREEDY, Sampling


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


ZEROS = torch.zeros(5, dtype=torch.float64)


def test_gradient_of_softmax() -> None:
    """dL/dz_i = p_i (g_i - sum_j p_j g_j) with g = dL/dp; a further factor (1 - p_i) is wrong."""
    z, g = draw(5, 7).requires_grad_(), draw(7)
    p = z.softmax(-1)
    p.backward(g.expand_as(p))
    p = p.detach()
    right = p * (g - (p * g).sum(-1, keepdim=True))
    assert torch.allclose(z.grad, right)
    assert torch.allclose(z.grad.sum(-1), ZEROS)
    for wrong in (right * (1 - p), p * (1 - p) * g):  # the second is the term i = j alone
        assert not torch.allclose(z.grad, wrong, atol=1e-3)


def test_gradient_of_cross_entropy_is_p_minus_y_and_each_row_sums_to_zero() -> None:
    z, targets = draw(5, 7).requires_grad_(), torch.tensor([0, 6, 3, 3, 1])
    nn.CrossEntropyLoss(reduction="sum")(z, targets).backward()
    assert torch.allclose(z.grad, z.detach().softmax(-1) - F.one_hot(targets, 7))
    assert torch.allclose(z.grad.sum(-1), ZEROS)
    assert z.grad.abs().max() > 0.1


def test_softmax_is_shift_invariant_but_not_scale_invariant() -> None:
    z = draw(5, 7)
    for shift in (-1000.0, 0.5, 1000.0):
        assert torch.allclose((z + shift).softmax(-1), z.softmax(-1))
    assert not torch.allclose((z * 2).softmax(-1), z.softmax(-1), atol=1e-2)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_log_sum_exp_is_finite_where_naive_exponentials_are_not(size: float) -> None:
    z, targets = size + draw(5, 7), torch.arange(5)
    assert (z.exp() / z.exp().sum(-1, keepdim=True)).isnan().all()
    assert torch.allclose(z.logsumexp(-1), size + draw(5, 7).logsumexp(-1))
    assert F.cross_entropy(z, targets).item() == pytest.approx(F.cross_entropy(draw(5, 7), targets).item())


def test_cross_entropy_takes_logits() -> None:
    """With a softmax before it the loss is another, and cannot fall below ln(1 + (V-1)/e) however sure the model."""
    z, targets, loss = draw(5, 7), torch.arange(5), nn.CrossEntropyLoss()
    by_hand = -z.softmax(-1)[torch.arange(5), targets].log().mean()
    assert loss(z, targets).item() == pytest.approx(by_hand.item())
    assert abs(loss(z.softmax(-1), targets) - by_hand) > 0.1
    sure = 100.0 * F.one_hot(targets, 7).double()
    assert loss(sure, targets) < 1e-9
    assert loss(sure.softmax(-1), targets).item() == pytest.approx(math.log(1 + 6 / math.e))


def test_argmax_of_logits_is_argmax_of_softmax() -> None:
    for scale in (0.01, 1.0, 20.0):
        z = draw(500, 50, scale=scale)
        assert torch.equal(GREEDY.next_token(z, None), z.softmax(-1).argmax(-1))


Z = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
LIMIT = 20.5  # the chi-square statistic with five degrees of freedom exceeds it once in a thousand
SAMPLINGS = [  # and how many of the six tokens are kept
    *(({"temperature": temperature}, 6) for temperature in (0.5, 2.0)),
    *(({"temperature": 1.5, "top_k": k}, kept) for k, kept in ((3, 3), (9, 6))),
    *(({"temperature": 1.5, "top_p": p}, kept) for p, kept in ((0.3, 1), (0.9, 4))),
    *(({"temperature": 1.5, "min_p": p}, kept) for p, kept in ((0.2, 4), (1.0, 1))),
]


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    """Of the tokens that have a probability; no other may occur."""
    counts, possible = torch.bincount(ids, minlength=len(probabilities)), probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities * len(ids)
    return ((counts - expected).square() / expected)[possible].sum().item()


@pytest.mark.parametrize(("options", "kept"), SAMPLINGS)
def test_gumbel_max_draws_from_the_softmax_of_what_is_kept(options: dict[str, Any], kept: int) -> None:
    """argmax(logits / temperature + Gumbel noise)."""
    ids = Sampling(**options).next_token(Z.expand(50_000, -1), torch.Generator().manual_seed(0))

    def statistic(temperature: float) -> float:
        largest = (Z / temperature).softmax(-1).topk(kept)
        return chi_square(ids, torch.zeros(6).index_add(0, largest.indices, largest.values / largest.values.sum()))

    assert statistic(options["temperature"]) < LIMIT
    if kept == 6:  # the test detects ten per cent
        assert min(statistic(options["temperature"] * factor) for factor in (1.1, 1 / 1.1)) > 3 * LIMIT
