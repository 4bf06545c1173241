"""The reference implementation: the same weights in transformers, by way of the project's own export."""

import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from lm.ablation.plan.timing import train_step
from lm.config import UserError
from lm.data.batches import Batch
from lm.data.vocabulary import byte_tokenizer
from lm.exchange.huggingface import export
from lm.model.transformer import Transformer


def in_transformers(net: Transformer) -> Any | None:
    """The model as AutoModelForCausalLM loads it; None where transformers is not installed or has no such model."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        try:
            export(net, byte_tokenizer(), Path(folder) / "out")
        except UserError:
            return None
        theirs: Any = AutoModelForCausalLM.from_pretrained(Path(folder) / "out")
    return theirs.to(net.embed.weight.device)


def step_in_transformers(net: Transformer, tokens: Batch, mixed: bool) -> partial[None] | None:
    """A callable that makes one training step of the same model with AdamW; None where there is no such model."""
    if (theirs := in_transformers(net)) is None:
        return None
    adamw = AdamW(theirs.train().parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    return partial(train_step, loss_of(theirs, mixed), adamw, [tokens])


def loss_of(theirs: Any, mixed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of token ids (B, T) and targets (B, T) that gives the mean cross-entropy; `mixed`: in bf16."""

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            return F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())

    return loss
