"""What a run leaves to the machine and to its text: device, precision, threads, loss and steps."""

import math
import os
import time
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from lm.config import RunConfig, change
from lm.data.tokens import TextData
from lm.errors import UserError, require
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.system.device import best_device, count_threads, fast_attention, has_native_bf16, is_mixed, set_threads
from lm.training.loss import LossOf, resolve_loss
from lm.training.optim import build_optimizer

TIMED_STEPS = 10  # after the first step, a warm-up


def resolve(run: RunConfig, vocab_size: int) -> RunConfig:
    """Return the run with device, precision, threads and loss decided for this machine.

    Raises UserError if this machine cannot do what the run asks for.
    """
    trainer, name = run.trainer, run.trainer.accelerator
    started = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and started != str(trainer.world_size):
        product = f"trainer.devices * trainer.num_nodes is {trainer.world_size}"
        raise UserError(f"trainer.devices: torchrun has started {started} processes, but {product}")
    device = best_device() if name in ("auto", "gpu") else name
    available = {
        "cpu": name != "gpu",
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available[device]:
        raise UserError(f"trainer.accelerator={name}: torch finds no such device here")
    if device == "mps" and run.activation_checkpointing and run.model.dropout:
        raise UserError("activation_checkpointing=true: torch cannot repeat dropout on MPS; choose model.dropout=0")
    precision = trainer.precision
    if precision == "auto":
        precision = "bf16-mixed" if has_native_bf16(device) else "32-true"
    decided = {"trainer.accelerator": device, "trainer.precision": precision, "threads": count_threads(run.threads)}
    run = change(run, decided)
    return replace(run, loss=resolve_loss(run, max(vocab_size, run.model.vocab_rows or 0)))


def with_steps(run: RunConfig, data: TextData) -> RunConfig:
    """Return a resolved run with its length in steps alone."""
    steps = run.steps
    if run.trainer.max_epochs is not None:
        steps = math.ceil(run.trainer.max_epochs * len(data.train) / run.tokens_per_step)
    elif run.max_minutes is not None:
        steps = max(round(60 * run.max_minutes / seconds_per_step(run, data)), 1)
    open_lengths = dict.fromkeys(("trainer.max_epochs", "max_tokens", "max_minutes"))
    return change(run, open_lengths | {"trainer.max_steps": steps})


def build_model(run: RunConfig, vocab_size: int, separator: int = 0) -> Transformer:
    """Return the model of a run before training. `separator`: id of the token that begins a document.

    Raises UserError for fewer rows of the embedding than tokens.
    """
    rows = run.model.vocab_rows
    require(rows is None or rows >= vocab_size, f"model.vocab_rows={rows}", f"{vocab_size} or more, or null")
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


def seconds_per_step(run: RunConfig, data: TextData) -> float:
    """Return the median seconds of TIMED_STEPS optimizer steps of a resolved run on random tokens, after a warm-up.

    The steps train a new model. The seconds include the share of the validations of a step: a forward pass of a
    validation counts as a third of a step.
    """
    device, mixed = run.trainer.accelerator, is_mixed(run.trainer.precision)
    n_micro, vocab_size = run.trainer.accumulate_grad_batches, data.tokenizer.vocab_size
    net = build_model(run, vocab_size).to(device)
    net.head.on_train_step(0.0, net.embed.weight, {})
    loss, optimizer = LossOf(net, run), build_optimizer(net, run.optim, run.head)
    shape = (run.data.batch_size // n_micro, run.data.seq_len)
    tokens = torch.randint(vocab_size, shape, device=device)  # (B, T)
    targets = F.one_hot(tokens, net.vocab_size).float() if run.ngram_smoothing else tokens
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    passes = 0.0  # forward passes of validation for each step
    if run.validation.every:
        n_batches = math.ceil(len(data.val) / (run.data.batch_size * run.data.seq_len))
        passes = min(run.validation.batches or n_batches, n_batches) / run.validation.every
    set_threads(run.threads)
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        started = time.perf_counter()
        for _ in range(n_micro):
            with fast_attention(device, mixed, run.data.seq_len):
                with torch.autocast(device, torch.bfloat16, enabled=mixed):
                    value = loss(tokens, targets)
                value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:]) * (1 + passes / 3)
