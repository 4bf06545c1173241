"""The training loss: the mean cross-entropy of the next tokens, in nats.

Both implementations below compute the same value and gradients; they differ in memory and time.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import BadInput
from lm.model.transformer import Transformer

Loss = Callable[[Transformer, Tensor, Tensor], Tensor]  # the model, token ids (B, T) and targets (B, T) to a scalar

HAS_CHUNKED = hasattr(nn, "LinearCrossEntropyOptions")  # from torch 2.13 on
CHUNK_ROWS = 512  # rows of logits in memory at a time
CHUNKED_FROM_VOCAB_SIZE = {False: 2048, True: 8192}  # by `mixed`: from here on, chunked is faster on a CPU
COMPILER_ABSENT = ("InvalidCxxCompiler", "TritonMissing")  # what torch.compile raises on a CPU and on a GPU
cross_entropy = nn.CrossEntropyLoss()  # takes raw logits: it contains the softmax


def plain(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """All logits (B, T, V) at once."""
    loss: Tensor = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
    return loss


def chunked(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """Chunked linear cross-entropy: the logits of CHUNK_ROWS rows at a time and their gradient, never (B, T, V).

    This matmul runs in the precision of the weights, under autocast too.
    """
    x, matrix = net.head.factors(net.hidden_states(tokens), net.embed.weight)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_ROWS)
    return F.linear_cross_entropy(x.flatten(0, 1).to(matrix.dtype), matrix, targets.flatten(), options=options)


LOSSES: dict[str, Loss] = {"plain": plain, "chunked": chunked}


def resolve_loss(name: str, net: Transformer, device: str, compiled: bool, mixed: bool = False) -> str:
    """The key of LOSSES for the setting `loss`; auto means the faster one. Raises BadInput if chunked is impossible.

    `mixed` says that matmuls run in bf16: this makes plain faster but not chunked (`benchmark.py only=[loss]`).
    """
    if name == "chunked" and not HAS_CHUNKED:
        raise BadInput(
            f"loss=chunked: needs torch 2.13 or later, not {torch.__version__}; loss=plain computes the same"
        )
    if name == "chunked" and not net.head.is_linear:
        raise BadInput(
            f"loss=chunked: {type(net.head).__name__} has logits that are not a matrix product; choose loss=plain"
        )
    if name == "auto":
        faster = HAS_CHUNKED and device == "cpu" and net.vocab_size >= CHUNKED_FROM_VOCAB_SIZE[mixed] and not compiled
        return "chunked" if faster and net.head.is_linear else "plain"
    return name


def build_loss(name: str, compiled: bool) -> Loss:
    """The function of a key of LOSSES, compiled by torch if `compiled`.

    A compiled loss raises BadInput at its first call if torch finds no C++ compiler or no Triton.
    """
    if not compiled:
        return LOSSES[name]
    loss: Loss = torch.compile(LOSSES[name])

    def call(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
        try:
            return loss(net, tokens, targets)
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            if type(cause).__name__ not in COMPILER_ABSENT:
                raise
            reason = str(cause).partition("\n")[0]
            raise BadInput(f"compile=true: {reason}; compile=false computes the same without a compiler") from error

    return call
