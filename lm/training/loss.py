"""The training loss: the mean cross-entropy of the next tokens, in nats.

`plain` and `chunked` compute the same value and gradients. They differ in memory and time.

Training divides the logits by `loss_temperature`. Below 1, the undivided logits, which are scored, come out smaller
(Agarwala et al., 2020). A model needs this if it reads its text many times and becomes overconfident (Guo et al.,
2017). With ngram_smoothing a target is a probability distribution over the vocabulary instead of a token id: 1 -
ngram_smoothing for the token that follows, and the rest as an n-gram model expects.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import RunConfig
from lm.errors import UserError
from lm.model.transformer import Transformer
from lm.system.device import is_mixed

HAS_CHUNKED = hasattr(nn, "LinearCrossEntropyOptions")  # from torch 2.13 on
CHUNK_ROWS = 512  # rows of logits in memory at a time
# The vocabulary size from which chunked is faster on a CPU, by precision (`benchmark.py only=[loss]`).
CHUNKED_FROM_VOCAB_SIZE = {"fp32": 2048, "bf16": 8192}
cross_entropy = nn.CrossEntropyLoss()  # takes raw logits, because it contains the softmax


def plain(net: Transformer, tokens: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the loss from all logits (B, T, V) at once."""
    logits = net(tokens) if temperature == 1 else net(tokens) / temperature
    logits = logits.flatten(0, 1)  # (B*T, V)
    return cross_entropy(logits, targets.flatten(0, 1))  # of ids (B*T,), or of probabilities (B*T, V)


def chunked(net: Transformer, tokens: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the loss by chunked linear cross-entropy.

    Compute the logits of CHUNK_ROWS rows and their gradient at a time, never all logits (B, T, V). This matmul runs in
    the precision of the weights, under autocast too.
    """
    x, matrix = net.head.factors(net.hidden_states(tokens), net.embed.weight)  # (B, T, D), (V, D)
    x = x if temperature == 1 else x / temperature  # the logits are linear in x
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_ROWS)
    return F.linear_cross_entropy(x.flatten(0, 1).to(matrix.dtype), matrix, targets.flatten(), options=options)


LOSSES = {"plain": plain, "chunked": chunked}


def resolve_loss(run: RunConfig, vocab_size: int) -> str:
    """Return the key of LOSSES for the setting `loss` of a run with a device and a precision; auto is the faster loss.

    Raises UserError if chunked is impossible.
    """
    if run.loss == "chunked" and not HAS_CHUNKED:
        raise UserError(f"loss=chunked: needs torch 2.13 or later, not {torch.__version__}; choose loss=plain")
    if run.loss == "chunked" and run.ngram_smoothing:
        raise UserError("loss=chunked: takes one token as a target; use loss=plain, or ngram_smoothing=0")
    if run.loss != "auto":
        return run.loss
    limit = CHUNKED_FROM_VOCAB_SIZE["bf16" if is_mixed(run.trainer.precision) else "fp32"]
    faster = HAS_CHUNKED and run.trainer.accelerator == "cpu" and vocab_size >= limit and not run.compile
    return "chunked" if faster and not run.ngram_smoothing else "plain"


class LossOf(nn.Module):
    """A model with the loss of a resolved run. torch compiles the loss if run.compile.

    Fabric moves this module to a device, runs it in a precision and wraps it for several processes.
    """

    def __init__(self, net: Transformer, run: RunConfig) -> None:
        super().__init__()
        loss = partial(LOSSES[run.loss], temperature=run.loss_temperature)
        if run.compile:
            torch.compiler.reset()  # drop what earlier runs compiled: torch compiles a function eight times at most
        self.net, self.loss = net, torch.compile(loss) if run.compile else loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.net, tokens, targets)  # ids (B, T); ids (B, T) or probabilities (B, T, V)
