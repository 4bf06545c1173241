"""Before a run is trained: what its settings leave to the machine (device, precision, steps, loss and threads), and its
model.

This module does not import Lightning, which takes seconds: an ablation is planned without it.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from lm.config import RunConfig, UserError
from lm.data.ngram import MOST_TOKENS
from lm.data.tokens import TextData
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.system.device import best_device, count_threads, fast_attention, has_native_bf16, is_mixed, set_threads
from lm.training.loss import LossOf, resolve_loss
from lm.training.optim import build_optimizer

TIMED_STEPS = 10  # after the first one
log = logging.getLogger(__name__)


def resolve(run: RunConfig, vocab_size: int) -> RunConfig:
    """The run with every `auto` decided for this machine. Raises UserError for what this machine cannot do."""
    trainer, name, started = run.trainer, run.trainer.accelerator, os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and started != str(trainer.world_size):
        product = f"trainer.devices * trainer.num_nodes is {trainer.world_size}"
        raise UserError(f"trainer.devices: torchrun has started {started} processes, but {product}")
    device = best_device() if name in ("auto", "gpu") else name
    available = {"cpu": name != "gpu", "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[device]:
        raise UserError(f"trainer.accelerator={name}: torch finds no such device; leave it at auto")
    if device == "mps" and run.activation_checkpointing and run.model.dropout:
        raise UserError("activation_checkpointing=true: torch cannot repeat dropout on MPS; choose model.dropout=0")
    precision = trainer.precision
    if precision == "auto":
        precision = "bf16-mixed" if has_native_bf16(device) else "32-true"
    trainer = replace(trainer, accelerator=device, precision=precision, max_steps=run.steps)
    run = replace(run, trainer=trainer, threads=count_threads(run.threads))
    return replace(run, loss=resolve_loss(run, vocab_size))


def decide(run: RunConfig, data: TextData) -> RunConfig:
    """Return the run as it is trained here. Raises UserError for what this machine cannot do."""
    if run.ngram_smoothing and (n := len(data.train)) > MOST_TOKENS:
        raise UserError(f"ngram_smoothing: is for a text of at most {MOST_TOKENS:,} tokens; this one has {n:,}")
    return resolve(run, data.tokenizer.vocab_size)


def build_model(run: RunConfig, vocab_size: int, separator: int = 0) -> Transformer:
    """The model of a run before its training. `separator`: the id of the token that begins each document."""
    net = Transformer(
        run.model,
        run.head,
        vocab_size=vocab_size,
        seq_len=run.data.seq_len,
        document_separator=separator if run.data.document_mask else None,
        seed=run.seed,
    )
    if run.activation_checkpointing:
        enable_activation_checkpointing(net)
    return net


def meta_model(run: RunConfig, vocab_size: int) -> Transformer:
    """The model on the meta device: shapes without values."""
    with torch.device("meta"):
        return build_model(run, vocab_size)


def n_batches(run: RunConfig, n_tokens: int) -> int:
    """Batches of a whole text of so many tokens."""
    return -(-n_tokens // (run.data.batch_size * run.data.seq_len))


# --- how many steps fit into max_minutes


def time_run(run: RunConfig, data: TextData) -> tuple[int, float, float]:
    """How many steps a run has, with max_minutes as many as take so long here, and the seconds of two of them.

    They are the first one, which warms up and compiles, and a later one.
    """
    step = bare_step(run, data.tokenizer.vocab_size, len(data.val), run.steps)
    first, seconds = step(), median(step() for _ in range(TIMED_STEPS))
    return run.steps if run.max_minutes is None else max(round(60 * run.max_minutes / seconds), 1), first, seconds


def bare_step(run: RunConfig, vocab_size: int, val_tokens: int, steps: int) -> Callable[[], float]:
    """A step on random tokens, with its share of validations, in which a forward pass is a third of a step.

    It returns its seconds.
    """
    run = resolve(run, vocab_size)
    validations = (steps - 1) // run.validation.every if run.validation.every else 0  # without the final score
    batches = n_batches(run, val_tokens)
    passes = validations * min(run.validation.batches or batches, batches)
    device, mixed = run.trainer.accelerator, is_mixed(run.trainer.precision)
    n_micro = run.trainer.accumulate_grad_batches
    net = build_model(run, vocab_size).to(device)
    net.head.on_train_step(0.0, net.embed.weight, {})
    loss, optimizer = LossOf(net, run), build_optimizer(net, run.optim, run.head)
    tokens = torch.randint(vocab_size, (run.data.batch_size // n_micro, run.data.seq_len), device=device)
    targets = F.one_hot(tokens, net.vocab_size).float() if run.ngram_smoothing else tokens

    def step() -> float:
        set_threads(run.threads)
        started = time.perf_counter()
        for _ in range(n_micro):
            with fast_attention(device, mixed, run.data.seq_len):
                with torch.autocast(device, torch.bfloat16, enabled=mixed):
                    value = loss(tokens, targets)
                value.backward()
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * (1 + passes / steps / 3)

    return step
