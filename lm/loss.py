"""How far a model is from the text: the mean cross-entropy of the next tokens, in nats.

Both ways below are one function of the same parameters, in value and gradients; they differ in memory and in time.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import BadInput
from lm.model.transformer import Transformer

Loss = Callable[[Transformer, Tensor, Tensor], Tensor]  # the model, token ids (B, T), targets (B, T): a scalar

CHUNKS = hasattr(nn, "LinearCrossEntropyOptions")  # from torch 2.13 on
ROWS = 512  # of logits at a time, in the chunked loss
MANY = 2048  # tokens of a vocabulary from which on it is the faster one on a CPU: scripts/benchmark.py only=[loss]
cross_entropy = nn.CrossEntropyLoss()  # takes logits; a softmax before it would be a second one


def plain(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """All logits (B, T, V) at once."""
    loss: Tensor = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
    return loss


def chunked(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The logits of a few rows at a time, each chunk's gradient made with it: never (B, T, V) in memory."""
    x, matrix = net.features(tokens).flatten(0, 1), net.head.matrix(net.embed.weight)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=min(ROWS, len(x)))
    return F.linear_cross_entropy(x, matrix, targets.flatten(), options=options)


LOSSES: dict[str, Loss] = {"plain": plain, "chunked": chunked}


def build_loss(name: str, vocab_size: int, device: str, compiled: bool) -> Loss:
    """The loss that `loss` and `compile` ask for. Raises BadInput for `chunked` before torch 2.13."""
    if name == "chunked" and not CHUNKS:
        raise BadInput(f"loss=chunked: needs torch 2.13 or later, not {torch.__version__}; loss=plain is the same")
    if name == "auto":
        name = "plain" if compiled else best_loss(vocab_size, device)
    return torch.compile(LOSSES[name]) if compiled else LOSSES[name]


def best_loss(vocab_size: int, device: str) -> str:
    """The faster one, uncompiled."""
    return "chunked" if CHUNKS and device == "cpu" and vocab_size >= MANY else "plain"
