"""The score of a model on a text: one pass, in which every token counts once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lm.config import RunConfig
from lm.data.batches import IGNORED, validation_batches, validation_windows
from lm.data.tokens import TextData
from lm.model.transformer import Transformer

LOGIT_ROWS = 512  # rows of logits in memory at a time
# Tokens of a batch, at least one window. On a CPU more tokens are slower. With LOGIT_ROWS tokens or more per batch, the
# scores do not depend on this number, bit for bit.
BATCH_TOKENS = {"cpu": 1024, "cuda": 8192, "mps": 8192}


class Measure(Protocol):
    """Sums over the targets of a text in pieces: logits (N, V) and targets (N,), IGNORED where there is no target."""

    def add(self, logits: Tensor, targets: Tensor) -> None: ...


@dataclass(slots=True, frozen=True)
class Scores:
    n_tokens: int
    total_nll: float  # negative log-likelihood in nats, summed over the tokens
    n_correct: int  # tokens that are the argmax of their logits, given the true text before them

    @property
    def loss(self) -> float:
        """Return the mean cross-entropy in nats per token."""
        return self.total_nll / self.n_tokens

    @property
    def perplexity(self) -> float | None:
        """Return e to the loss, or None if it is too large for a number: JSON has no infinity."""
        return math.exp(self.loss) if self.loss < 700 else None

    @property
    def top1(self) -> float:
        return self.n_correct / self.n_tokens

    def bpb(self, n_bytes: float) -> float:
        """Return the bits per byte of a text of `n_bytes`: unlike the loss, comparable between tokenizers."""
        return self.total_nll / (math.log(2) * n_bytes)


@torch.no_grad()
def evaluate(
    net: Transformer,
    tokens: np.ndarray,
    seq_len: int,
    max_windows: int | None = None,
    bar: bool = False,
    measures: Sequence[Measure] = (),
    unscored: int | None = None,
) -> Scores:
    """Score every token of the stream except the first, in windows without overlap, in the precision of the weights.

    tokens: (n,) ids, with end of text as the first id. With `max_windows`, score that many evenly spaced windows: an
    estimate. `measures` get the same logits and targets, if the loss is finite. `unscored` is the id that follows end
    of text and is no text, such as <|begin_of_text|> of Llama 3; None if the tokenizer has no such id.
    """
    device = net.embed.weight.device
    seq_len = min(seq_len, len(tokens) - 1)  # a user may give any length of a context
    was_training = net.training
    net.eval()
    sums: list[Tensor] = []  # of LOGIT_ROWS rows: NLL, correct tokens, tokens; on the device until the end
    batch_size = max(1, BATCH_TOKENS[device.type] // seq_len)
    total = math.ceil(len(validation_windows(len(tokens), seq_len, max_windows)) / batch_size)
    batches = validation_batches(tokens, seq_len, batch_size, max_windows)
    try:
        for inputs, targets in tqdm(batches, "validation", total, leave=False, disable=not bar):
            hidden_states = net.hidden_states(inputs.to(device)).flatten(0, 1)
            labels = targets.to(device).flatten()
            if unscored is not None:
                labels = labels.masked_fill(labels == unscored, IGNORED)
            for x, y in zip(torch.split(hidden_states, LOGIT_ROWS), torch.split(labels, LOGIT_ROWS), strict=True):
                logits = net.head(x, net.embed.weight).float()  # (LOGIT_ROWS, V)
                nll = F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum")
                sums.append(torch.stack([nll, (logits.argmax(-1) == y).sum(), (y != IGNORED).sum()]))
                for measure in measures if measures and nll.isfinite() else ():
                    measure.add(logits, y)
    finally:
        net.train(was_training)
    total_nll, n_correct, n_tokens = 0.0, 0, 0
    for nll_of_rows, correct, scored in torch.stack(sums).tolist():
        total_nll += nll_of_rows
        n_correct += int(correct)
        n_tokens += int(scored)
    return Scores(n_tokens, total_nll, n_correct)


def validate(
    net: Transformer, run: RunConfig, data: TextData, max_batches: int | None = None, **options: Any
) -> Scores:
    """Score the validation text of a run by `evaluate`: all windows, or the windows of `max_batches` batches."""
    max_windows = None if max_batches is None else max_batches * run.data.batch_size
    return evaluate(net, data.val, run.data.seq_len, max_windows, unscored=data.tokenizer.unscored, **options)
