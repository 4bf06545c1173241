"""How good a model is on a text: one pass, every token counted once."""

import math
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lm.data import IGNORED, validation_batches


@dataclass(slots=True, frozen=True)
class Scores:
    n_tokens: int
    nats: float  # summed over the tokens
    hits: int  # tokens that greedy decoding would have guessed

    @property
    def loss(self) -> float:
        return self.nats / self.n_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def top1(self) -> float:
        return self.hits / self.n_tokens

    def bits_per_byte(self, n_bytes: int) -> float:
        return self.nats / (math.log(2) * n_bytes)


@torch.no_grad()
def evaluate(
    net: nn.Module, tokens: np.ndarray, seq_len: int, batch_size: int, max_batches: int | None = None, bar: bool = False
) -> Scores:
    """Score every token of the stream but the first, in windows that do not overlap, in full precision.

    tokens: (n,) ids, the first of them end of text. With `max_batches` only the first windows are read.
    """
    from tqdm import tqdm

    device = next(net.parameters()).device
    was_training = net.training
    net.eval()
    n_tokens, nats, hits = 0, 0.0, 0
    total = -(-(-(-(len(tokens) - 1) // seq_len)) // batch_size)
    batches = islice(validation_batches(tokens, seq_len, batch_size), max_batches)
    for inputs, targets in tqdm(batches, "validation", min(total, max_batches or total), leave=False, disable=not bar):
        logits, targets = net(inputs.to(device)).float(), targets.to(device)
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
        hits += int((logits.argmax(-1) == targets).sum())
        n_tokens += int((targets != IGNORED).sum())
    net.train(was_training)
    return Scores(n_tokens, nats, hits)
