"""Measurements of the embedding and the head during training; they leave the weights equal bit for bit.

diagnostics.csv gets a row every `diagnostics.every` optimizer steps and one after the last step; docs/runs.md describes
its columns. Gradients are of the weights that train, before clipping. Losses and norms are of the model that is
validated, as in metrics.csv: with optim.ema the average of the weights.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.lab.measures.details import BANDS, NLLByTarget, frequency_bands, token_counts
from lm.model.transformer import Transformer
from lm.scoring import validate
from lm.training.log import MetricsFile, Observer, Step

if TYPE_CHECKING:
    from lm.training.train import Engine

GRADIENTS = ("embedding_grad", "head_grad", "cosine")
BY_BAND = [f"{name}/band{i}" for name in ("loss", "embedding_norm", "head_norm") for i in range(1, BANDS + 1)]
COLUMNS = ("step", "tokens", *GRADIENTS, *BY_BAND)


def _means(name: str, sums: np.ndarray, counts: np.ndarray, bands: np.ndarray) -> dict[str, float]:
    """Sums and counts by token, all (V,), to means by band under the names of their columns, without empty bands."""
    total, count = (np.bincount(bands, of_token, BANDS) for of_token in (sums, counts))
    return {f"{name}/band{i + 1}": float(total[i] / count[i]) for i in range(BANDS) if count[i]}


class EmbeddingGradient:
    """The two parts of the embedding matrix's gradient, from the backward pass of training itself.

    The gradient of the input embeddings is summed by token id; the remainder comes through the logits.
    """

    def __init__(self, net: Transformer, is_measured: Callable[[], bool]) -> None:
        self.net, self.is_measured = net, is_measured  # of a step: all its backward passes, of the micro-batches
        self.input_grad: Tensor | None = None  # (V, D), while a step is measured
        # A compiler would miss a hook that acts in some steps only: this one is excluded from compilation.
        net.embed.register_forward_hook(torch.compiler.disable(self.watch))  # type: ignore[no-untyped-call]

    def watch(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if not (output.requires_grad and self.is_measured()):
            return
        if self.input_grad is None:
            self.input_grad = torch.zeros_like(self.net.embed.weight, dtype=torch.float32, requires_grad=False)
        total = self.input_grad

        def add(grad: Tensor) -> None:  # (B, T, D)
            total.index_add_(0, inputs[0].flatten(), grad.flatten(0, 1).float())

        output.register_hook(add)  # type: ignore[no-untyped-call]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients (V, D) through input embeddings and logits, after the last backward pass."""
        embedding, input_grad, self.input_grad = self.net.embed.weight, self.input_grad, None
        assert input_grad is not None
        input_grad *= self.net.embed.multiplier
        output = self.net.head.matrix(embedding)
        own = output is not embedding and isinstance(output, nn.Parameter)  # else it is computed from the embedding
        grad = (output if own else embedding).grad
        assert grad is not None
        return input_grad, grad.float() if own else grad.float() - input_grad


class Diagnostics(Observer):
    """Writes a row of diagnostics.csv every `diagnostics.every` steps and after the last one."""

    def __init__(self, engine: "Engine") -> None:
        self.run, self.data, self.state = engine.run, engine.data, engine.state
        state, data = engine.state, engine.data
        self.file = MetricsFile(engine.directory.diagnostics, state.step, columns=COLUMNS)
        self.bands = frequency_bands(token_counts(data.train, state.net.vocab_size))
        self.gradient = EmbeddingGradient(state.net, lambda: self._is_due(state.step + 1))

    def _is_due(self, step: int) -> bool:
        return step % self.run.diagnostics.every == 0 or step == self.run.steps

    def before_clip(self) -> None:
        if self._is_due(self.state.step + 1):
            embedding, head = (grad.flatten() for grad in self.gradient.gradients())
            self.norms = torch.stack([embedding.norm(), head.norm(), F.cosine_similarity(embedding, head, dim=0)])

    def after_step(self, step: Step, row: dict[str, float]) -> None:
        if self._is_due(step.number):
            self.file.append(step.number, self._row(step.number))

    @torch.no_grad()
    def _row(self, step: int) -> dict[str, float]:
        net, run = self.state.eval_net, self.run
        row = {"tokens": step * run.tokens_per_step, **dict(zip(GRADIENTS, self.norms.tolist(), strict=True))}
        if step == run.steps:  # the validation split costs more than all else
            by_target = NLLByTarget(net.vocab_size)
            validate(net, run, self.data, measures=[by_target])
            row |= _means("loss", by_target.total_nll, by_target.counts, self.bands)
        for name, rows in (("embedding_norm", net.embed.matrix()), ("head_norm", net.head.matrix(net.embed.weight))):
            row |= _means(name, rows.float().norm(dim=1).cpu().numpy(), np.ones(len(rows)), self.bands)
        return row
