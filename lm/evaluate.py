"""How good a model is on a text: one pass, every token counted once."""

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from tqdm import tqdm

from lm.batches import IGNORED, validation_batches
from lm.config import BadInput, DataConfig, EvaluateConfig, TokenizerConfig
from lm.corpus import load_documents
from lm.data import encode, prepare
from lm.device import best_device, set_threads
from lm.portable import load_model
from lm.tokenizer import Tokenizer


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
    device = next(net.parameters()).device
    was_training = net.training
    net.eval()
    n_tokens, nats, hits = 0, 0.0, 0
    total = math.ceil(math.ceil((len(tokens) - 1) / seq_len) / batch_size)
    batches = islice(validation_batches(tokens, seq_len, batch_size), max_batches)
    for inputs, targets in tqdm(batches, "validation", min(total, max_batches or total), leave=False, disable=not bar):
        logits, targets = net(inputs.to(device)).float(), targets.to(device)
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
        hits += int((logits.argmax(-1) == targets).sum())
        n_tokens += int((targets != IGNORED).sum())
    net.train(was_training)
    return Scores(n_tokens, nats, hits)


def evaluate_run(config: EvaluateConfig, bar: bool = False) -> dict[str, Any]:
    """Score a finished run on its own validation text, or on all of another text. Raises BadInput."""
    set_threads(config.threads)
    net, tokenizer = load_model(config.run_dir, config.trust)
    if config.data is None:
        tokens, n_bytes = own_validation(Path(config.run_dir))
    else:
        tokens, n_bytes = whole_text(config.data, tokenizer, bar)
    scores = evaluate(net.to(best_device()), tokens, net.seq_len, config.batch_size, bar=bar)
    return {
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "bits_per_byte": scores.bits_per_byte(n_bytes),
        "top1": scores.top1,
        "tokens": scores.n_tokens,
        "bytes": n_bytes,
    }


def own_validation(run_dir: Path) -> tuple[np.ndarray, int]:
    """The validation tokens that a run was trained beside, and the bytes of their text."""
    try:
        settings = yaml.safe_load((run_dir / "config.yaml").read_text())
        data = prepare(DataConfig(**settings["data"]), TokenizerConfig(**settings["tokenizer"]))
    except OSError as error:
        raise BadInput(
            f"{error.filename}: {error.strerror}; name a finished run, or a text: data=text data.path=FILE"
        ) from error
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise BadInput(f"{run_dir}: not what train.py wrote ({error})") from error
    if data.hash != settings["data_hash"]:
        raise BadInput(
            f"run_dir={run_dir}: its text has changed since; name the text to score: data=text data.path=FILE"
        )
    return data.val, data.val_bytes


def whole_text(config: DataConfig, tokenizer: Tokenizer, bar: bool) -> tuple[np.ndarray, int]:
    """All of a text as tokens, and its bytes."""
    texts = [document.text for document in load_documents(config)]
    tokens = np.concatenate(list(encode(tokenizer, texts, "encoding", not bar)))
    return tokens, sum(len(text.encode()) for text in texts)
