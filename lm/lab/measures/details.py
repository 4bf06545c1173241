"""What the score of a text consists of: the loss by the target, and by the frequency of the target."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from lm.data.batches import IGNORED
from lm.system.terminal import printable

BANDS = 5  # of frequency
MOST_LOSS = 12  # targets that are listed
CHUNK = 1 << 22  # tokens counted at a time


class NLLByTarget:
    """For each token id, over the targets equal to it: their total negative log-likelihood and their number, (V,)."""

    def __init__(self, vocab_size: int) -> None:
        self.total_nll, self.counts = np.zeros(vocab_size), np.zeros(vocab_size, dtype=np.int64)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        nll = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        scored = targets != IGNORED
        ids = targets[scored].cpu().numpy()
        self.total_nll += np.bincount(ids, nll[scored].cpu().numpy(), len(self.total_nll))
        self.counts += np.bincount(ids, minlength=len(self.counts))


def token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each token id (V,) occurs in `tokens` (n,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[first : first + CHUNK], minlength=vocab_size)
    return counts


def frequency_bands(counts: np.ndarray) -> np.ndarray:
    """Return the band (V,) of each token id, 0 for the most frequent ones, by how often each occurs in a text, (V,).

    Each band holds about an equal share of that text.
    """
    order = np.argsort(-counts, kind="stable")
    mass = np.concatenate([[0], counts[order].cumsum()])  # mass[i]: occurrences of the i most frequent tokens
    ends = [0]
    for left in range(BANDS, 1, -1):  # each band takes an equal share of the rest, however large the band before it
        goal = mass[ends[-1]] + (mass[-1] - mass[ends[-1]]) / left
        nearest = int(np.abs(mass - goal).argmin())
        ends.append(min(max(nearest, ends[-1] + 1), len(counts)))
    bands = np.empty(len(counts), dtype=np.int64)
    bands[order] = np.repeat(np.arange(BANDS), np.diff([*ends, len(counts)]))
    return bands


class Details(NLLByTarget):
    """The measure of `evaluate details=true`, and what it adds to the scores."""

    def __init__(self, vocab_size: int, label: Callable[[int], str]) -> None:
        super().__init__(vocab_size)
        self.label = label  # of a token id

    def scores(self, train: np.ndarray | None) -> dict[str, Any]:
        """Return the loss in nats per token of each band that has targets, and of the targets that cost most in all.

        `train` (n,) are the tokens in which frequencies are counted; None: the scored tokens. Of a band, `vocabulary`
        is the number of its token ids, `least` and `most` how often the rarest and the most frequent of them occurs in
        the counted text, `tokens` the number of targets. Of a target, `share` is its part of the loss of the text.
        """
        counts = self.counts if train is None else token_counts(train, len(self.counts))
        bands, rows = frequency_bands(counts), list[dict[str, float]]()
        for i in range(BANDS):
            inside = bands == i
            if n := int(self.counts[inside].sum()):
                occurrences, loss = counts[inside], float(self.total_nll[inside].sum() / n)
                least, most = int(occurrences.min()), int(occurrences.max())
                row = {"band": i + 1, "vocabulary": len(occurrences), "least": least, "most": most}
                rows.append(row | {"tokens": n, "loss": loss})
        largest = [int(i) for i in np.argsort(-self.total_nll, kind="stable")[:MOST_LOSS] if self.counts[i]]
        by_target = [
            {
                "target": self.label(i),
                "tokens": int(self.counts[i]),
                "loss": float(self.total_nll[i] / self.counts[i]),
                "share": float(self.total_nll[i] / self.total_nll.sum()),
            }
            for i in largest
        ]
        counted = "the scored text" if train is None else "the training text"
        return {"frequency_in": counted, "by_frequency": rows, "by_target": by_target}


def tables(scores: list[dict[str, Any]], is_several: bool) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return titles and rows of the tables of each score."""
    titled = []
    for score in scores:
        place = f" ({score['run']}, {score['text']})" if is_several else ""
        by_target = [
            row | {"target": printable(json.dumps(row["target"], ensure_ascii=False))} for row in score["by_target"]
        ]
        titled.append((f"Loss by the frequency of the target in {score['frequency_in']}{place}", score["by_frequency"]))
        titled.append((f"Targets with the most loss{place}", by_target))
    return titled
