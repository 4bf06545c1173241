"""What goes on at the table while a model trains; measured only, so the weights stay the same bit for bit.

Every `diagnostics.every` optimizer steps, and after the last, diagnostics.csv gets a row:

- clip_rate: the fraction of the steps since the last row whose gradient was longer than trainer.gradient_clip_val
- lookup_grad, head_grad: norms of the table's gradient through the lookup and through the logits in this step, before
  clipping; cosine: of their angle. Where the head scores with a matrix of its own, that matrix's gradient is head_grad.
- loss/band1 to band5: nats per validation token by how frequent the target is in the training text, of which each
  band holds about a fifth, band1 the most frequent tokens. Over the whole split, after the last step only.
- table_norm/band1..., head_norm/band1...: mean norm of the rows that are looked up and of the rows that score
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lm.data.batches import Batch
from lm.inference.evaluate import ByTarget, evaluate
from lm.model.transformer import Transformer
from lm.training.metrics import MetricsFile
from lm.training.task import LMTask

BANDS = 5
CHUNK = 1 << 22  # training tokens counted at a time: they may be more than memory holds
SIDES = ("lookup_grad", "head_grad", "cosine")
BY_BAND = [f"{name}/band{i}" for name in ("loss", "table_norm", "head_norm") for i in range(1, BANDS + 1)]
COLUMNS = ("step", "tokens", "clip_rate", *SIDES, *BY_BAND)


def frequency_bands(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """The band of each token of the vocabulary (V,), from 0 for the most frequent ones in `tokens`."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[first : first + CHUNK], minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    reach = np.concatenate([[0], counts[order].cumsum()])  # reach[i]: what the i most frequent tokens hold
    ends = [0]
    for left in range(BANDS, 1, -1):  # an equal share of what is left: a token of half the text starves no other band
        goal = reach[ends[-1]] + (reach[-1] - reach[ends[-1]]) / left
        nearest = int(np.abs(reach - goal).argmin())
        ends.append(min(max(nearest, ends[-1] + 1), vocab_size))
    bands = np.empty(vocab_size, dtype=np.int64)
    bands[order] = np.repeat(np.arange(BANDS), np.diff([*ends, vocab_size]))
    return bands


def means(name: str, sums: np.ndarray, counts: np.ndarray, bands: np.ndarray) -> dict[str, float]:
    """Sums and counts by token, all (V,), to means by band under their columns' names; an empty band has none."""
    total, count = (np.bincount(bands, of_token, BANDS) for of_token in (sums, counts))
    return {f"{name}/band{i + 1}": float(total[i] / count[i]) for i in range(BANDS) if count[i]}


class TableGradient:
    """The table's gradient by side, from the backward pass that is made anyway.

    What comes back at the lookup's output is added up by token id; the rest of the table's gradient is the head's.
    """

    def __init__(self, net: Transformer) -> None:
        self.net = net
        self.lookup: Tensor | None = None  # (V, D), while a step is watched
        # A compiler would miss a hook that starts to act later: this one stays between two compiled parts.
        net.embed.register_forward_hook(torch.compiler.disable(self.watch))  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """From here to `sides` every backward pass counts: the micro-batches of one step."""
        if self.lookup is None:
            self.lookup = torch.zeros_like(self.net.embed.weight, dtype=torch.float32, requires_grad=False)

    def watch(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if (into := self.lookup) is not None and output.requires_grad:

            def add(grad: Tensor) -> None:  # (B, T, D)
                into.index_add_(0, inputs[0].flatten(), grad.flatten(0, 1).float())

            output.register_hook(add)  # type: ignore[no-untyped-call]

    def sides(self) -> tuple[Tensor, Tensor]:
        """The gradients (V, D) by the lookup and by the head, once `.grad` is whole."""
        table, lookup, self.lookup = self.net.embed.weight, self.lookup, None
        assert lookup is not None
        lookup *= self.net.embed.scale
        scores = self.net.head.matrix(table)
        own = scores is not table and isinstance(scores, nn.Parameter)  # any other is made from the table
        grad = (scores if own else table).grad
        assert grad is not None
        return lookup, grad.float() if own else grad.float() - lookup


class Diagnostics(Callback):
    """Stands before the Journal: the row of a step is written before its checkpoint, or a resume would lose it."""

    def __init__(self, path: Path, every: int, tokens_per_step: int) -> None:
        self.path, self.every, self.tokens_per_step = path, every, tokens_per_step
        self.steps = 0  # since the last row
        self.clipped: int | Tensor = 0  # of them; a tensor, because looking each time would make a GPU wait

    def on_train_start(self, trainer: Trainer, task: Any) -> None:
        self.file = MetricsFile(self.path, trainer.global_step, COLUMNS)
        self.bands = frequency_bands(task.data.train, task.net.vocab_size)
        self.gradient = TableGradient(task.net)

    def due(self, trainer: Trainer, step: int) -> bool:
        return step % self.every == 0 or step == trainer.max_steps

    def on_train_batch_start(self, trainer: Trainer, task: Any, batch: Batch, batch_idx: int) -> None:
        if self.due(trainer, trainer.global_step + 1):
            self.gradient.start()

    def on_before_optimizer_step(self, trainer: Trainer, task: Any, optimizer: Any) -> None:
        if self.due(trainer, trainer.global_step + 1):
            lookup, head = (side.flatten() for side in self.gradient.sides())
            self.sides = torch.stack([lookup.norm(), head.norm(), F.cosine_similarity(lookup, head, dim=0)])

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.steps += 1
        self.clipped = self.clipped + (task.grad_norm > (trainer.gradient_clip_val or math.inf))
        if self.due(trainer, step := trainer.global_step):
            self.file.log_metrics(self.row(task, step), step)
            self.steps = self.clipped = 0

    @torch.no_grad()
    def row(self, task: LMTask, step: int) -> dict[str, float]:
        net, data = task.net, task.run.data
        row = {"tokens": step * self.tokens_per_step, "clip_rate": int(self.clipped) / self.steps}
        row |= zip(SIDES, self.sides.tolist(), strict=True)
        if step == task.total_steps:  # a pass over the validation text costs more than all the rest: once, at the end
            by_target = ByTarget(net.vocab_size)
            evaluate(net, task.data.val, data.seq_len, data.batch_size, by_target=by_target)
            row |= means("loss", by_target.total_nll, by_target.counts, self.bands)
        for name, rows in (("table_norm", net.embed.matrix()), ("head_norm", net.head.matrix(net.embed.weight))):
            row |= means(name, rows.float().norm(dim=1).cpu().numpy(), np.ones(len(rows)), self.bands)
        return row

    def on_save_checkpoint(self, trainer: Trainer, task: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.file.save()  # no checkpoint without the rows before it

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "clipped": int(self.clipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.clipped = state["steps"], state["clipped"]
