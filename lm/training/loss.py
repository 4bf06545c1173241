"""How far a model is from the text: the mean cross-entropy of the next tokens, in nats.

Both ways below are one function of the same parameters, in value and gradients; they differ in memory and in time.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import BadInput
from lm.model.linear import linear
from lm.model.transformer import Transformer

Loss = Callable[[Transformer, Tensor, Tensor], Tensor]  # the model, token ids (B, T), targets (B, T): a scalar

CHUNKS = hasattr(nn, "LinearCrossEntropyOptions")  # from torch 2.13 on
ROWS = 512  # of logits at a time
MANY = {False: 2048, True: 8192}  # mixed: tokens of a vocabulary from which on chunks are faster on a CPU
NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing")  # what torch.compile raises without one, on a CPU and on a GPU
cross_entropy = nn.CrossEntropyLoss()  # takes logits; a softmax before it would be a second one


def plain(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """All logits (B, T, V) at once."""
    loss: Tensor = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
    return loss


def chunked(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The logits of a few rows at a time, each chunk's gradient made with it: never (B, T, V) in memory.

    Under autocast, too, this product is made in the precision of the weights.
    """
    x, matrix = net.head.factors(net.hidden_states(tokens), net.embed.weight)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=ROWS)
    return F.linear_cross_entropy(x.flatten(0, 1).to(matrix.dtype), matrix, targets.flatten(), options=options)


LOSSES: dict[str, Loss] = {"plain": plain, "chunked": chunked}


def which_loss(name: str, net: Transformer, device: str, compiled: bool, mixed: bool = False) -> str:
    """The loss that `loss` means: for auto, the faster one. Raises BadInput where chunks cannot be had.

    `mixed`: in bf16, where all logits at once are made faster, but chunks are not (`benchmark.py only=[loss]`).
    """
    if name == "chunked" and not CHUNKS:
        raise BadInput(f"loss=chunked: needs torch 2.13 or later, not {torch.__version__}; loss=plain is the same")
    if name == "chunked" and not gives_product(net):
        raise BadInput(f"loss=chunked: {type(net.head).__name__} gives logits that are no product; choose loss=plain")
    if name == "auto":
        pays = CHUNKS and device == "cpu" and net.vocab_size >= MANY[mixed] and not compiled
        return "chunked" if pays and gives_product(net) else "plain"
    return name


@torch.no_grad()
def gives_product(net: Transformer) -> bool:
    """Whether the head's logits are its factors multiplied: a head of your own may bend them."""
    table = net.embed.weight
    x = torch.linspace(-100, 100, 2 * table.shape[1], device=table.device).view(2, -1)
    return torch.allclose(net.head(x, table), linear(*net.head.factors(x, table)), rtol=1e-3)


def build_loss(name: str, compiled: bool) -> Loss:
    """A key of LOSSES as a function, through torch's compiler if asked for.

    That raises BadInput at its first call where torch finds no compiler for its code.
    """
    if not compiled:
        return LOSSES[name]
    loss: Loss = torch.compile(LOSSES[name])

    def call(net: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
        try:
            return loss(net, tokens, targets)
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            if type(cause).__name__ not in NO_COMPILER:
                raise
            reason = str(cause).partition("\n")[0]
            raise BadInput(f"compile=true: {reason}; compile=false computes the same without it") from error

    return call
