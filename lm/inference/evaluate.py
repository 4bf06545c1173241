"""The score of a model on a text: one pass, in which every token counts once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lm.config import DataConfig, EvaluateConfig, RunConfig, UserError
from lm.data.batches import IGNORED, validation_batches, validation_windows
from lm.data.tokenizer import Tokenizer
from lm.data.tokens import TextData, encode_whole
from lm.formats.base import model_folder, read_settings
from lm.formats.folder import load_model
from lm.inference.details import Details, Measure
from lm.inference.text import own_data, own_text
from lm.model.transformer import Transformer
from lm.system.device import best_device, set_threads

LOGIT_ROWS = 512  # rows of logits in memory at a time
# Tokens of a batch, at least one window. On a CPU more are slower; from LOGIT_ROWS on, scores are equal bit for bit.
BATCH_TOKENS = {"cpu": 1024, "cuda": 8192, "mps": 8192}


@dataclass(slots=True, frozen=True)
class Scores:
    n_tokens: int
    total_nll: float  # negative log-likelihood in nats, summed over the tokens
    n_correct: int  # tokens that are the argmax of their logits, given the true text before them

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return self.total_nll / self.n_tokens

    @property
    def perplexity(self) -> float | None:
        """None where it is larger than a number can be: JSON has no infinity."""
        return math.exp(self.loss) if self.loss < 700 else None

    @property
    def top1(self) -> float:
        return self.n_correct / self.n_tokens

    def bpb(self, n_bytes: float) -> float:
        """Bits per byte of a text of `n_bytes`: unlike the loss, comparable between tokenizers."""
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

    tokens: (n,) ids, the first of which is end of text. With `max_windows`, only that many evenly spaced ones are
    scored, an estimate. `measures` get the same logits and targets, where the loss is a number. `unscored`
    is an id that is no target: that of the tokenizer.
    """
    device = net.embed.weight.device
    seq_len = min(seq_len, len(tokens) - 1)  # a context may be said to be of any length
    was_training = net.training
    net.eval()
    sums: list[Tensor] = []  # of LOGIT_ROWS rows: NLL, correct tokens, tokens; they stay on the device until the end
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
    """`evaluate` on the validation text of a run: on all its windows, or on those of `max_batches` of its batches."""
    max_windows = None if max_batches is None else max_batches * run.data.batch_size
    return evaluate(net, data.val, run.data.seq_len, max_windows, unscored=data.tokenizer.unscored, **options)


def check(config: EvaluateConfig) -> None:
    """Raise UserError if the settings of the run, or what it says of its validation text, cannot be used."""
    read_settings(model_folder(str(config.run_dir)))
    if config.data is None:
        own_text(Path(str(config.run_dir)))


class Inputs:
    """The models and texts of several scores: the newest model, and each text once for each tokenizer."""

    def __init__(self) -> None:
        self.load = lru_cache(maxsize=1)(load_model)
        self.encoded: dict[tuple[str, str], tuple[np.ndarray, int]] = {}

    def encode(self, text: DataConfig, tokenizer: Tokenizer, bar: bool) -> tuple[np.ndarray, int]:
        """Return the tokens (n,) of a text and its number of bytes."""
        key = repr(text), tokenizer.hash
        if key not in self.encoded:
            self.encoded[key] = encode_whole(text, tokenizer, not bar)
        return self.encoded[key]


def evaluate_run(config: EvaluateConfig, bar: bool = False, inputs: Inputs | None = None) -> dict[str, Any]:
    """Score a finished run on its own validation text, or on the whole of another text.

    `inputs` are those of scores before this one. Raises UserError.
    """
    set_threads(config.threads)
    inputs = inputs or Inputs()
    net, tokenizer = inputs.load(str(config.run_dir), tuple(config.classes))
    if (config.seq_len or 1) > net.seq_len:
        raise UserError(f"seq_len={config.seq_len}: the context of run_dir={config.run_dir} is {net.seq_len}")
    if config.document_mask is not None:
        net.document_separator = tokenizer.eot if config.document_mask else None
    if config.data is None:
        data, _ = own_data(Path(str(config.run_dir)), bar)
        tokens, n_bytes, train = data.val, data.val_bytes, data.train
    else:
        tokens, n_bytes, train = *inputs.encode(config.data, tokenizer, bar), None
    details = [Details(net.vocab_size)] if config.details else []
    window = config.seq_len or net.seq_len
    net, unscored = net.to(best_device()), tokenizer.unscored
    scores = evaluate(net, tokens, window, bar=bar, measures=details, unscored=unscored)
    if not math.isfinite(scores.loss):
        raise UserError(f"run_dir={config.run_dir}: the loss is {scores.loss}; its weights are not those of a model")
    result: dict[str, Any] = {
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "bpb": scores.bpb(n_bytes),
        "top1": scores.top1,
        "tokens": scores.n_tokens,
        "bytes": n_bytes,
    }
    for measure in details:
        result |= measure.scores(train)
    return result
