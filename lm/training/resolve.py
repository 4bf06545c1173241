"""Before a run is trained: what its settings leave to the machine (device, precision, steps, loss and threads), whether
it fits into memory, how long it will take, and its model.

This module does not import Lightning, which takes seconds: an ablation is planned without it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lm.config import RunConfig, UserError
from lm.config.identity import config_hash
from lm.data.ngram import MOST_TOKENS
from lm.data.tokens import TextData, prepare
from lm.formats.base import read_base
from lm.model.size import n_params, n_params_trained
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.system.device import best_device, busy, count_threads, fast_attention, has_native_bf16, is_mixed, set_threads
from lm.training.init_from import check_start
from lm.training.loss import LossOf, resolve_loss
from lm.training.optim import build_optimizer
from lm.training.run_directory import RunDirectory, default_directory
from lm.training.state import checkpoints, step_of

# tensors (B, T, d_ff) kept for backward
FFN_WIDTHS = {"relu": 1, "gelu": 2, "gelu_tanh": 2, "relu2": 2, "silu": 2, "swiglu": 4}

# Of a run whose steps are compiled, by device: about ten minutes on two cores, and two on a fast GPU. See is_compiled.
LONG_FLOPS = {"cpu": 1e14, "cuda": 2e16}
LONG_MINUTES = 10

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
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
    run = replace(run, compile=is_compiled(run, vocab_size))
    return replace(run, loss=resolve_loss(run, vocab_size))


def decide(run: RunConfig, data: TextData) -> RunConfig:
    """The run as it is trained here: resolved, and without a compiler that compile=auto has chosen and that fails.

    A step is compiled on a copy of the model, so that no number of the run moves. Raises UserError for what this
    machine cannot do.
    """
    vocab_size = data.tokenizer.vocab_size
    if run.ngram_smoothing and (n := len(data.train)) > MOST_TOKENS:
        raise UserError(f"ngram_smoothing: is for a text of at most {MOST_TOKENS:,} tokens; this one has {n:,}")
    resolved = resolve(run, vocab_size)
    check_memory(resolved, vocab_size)
    if run.compile != "auto" or not resolved.compile:
        return resolved
    log.info("compile=auto: so long a run is compiled first, which takes up to a minute")
    try:
        bare_step(resolved, vocab_size, 0, 1)()
    except Exception as error:  # whatever a compiler raises: what is wrong with the run itself will be raised again
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("compile=auto: %s; the steps are not compiled", reason)
        return resolve(replace(run, compile=False), vocab_size)
    return resolved


def is_compiled(run: RunConfig, vocab_size: int) -> bool:
    """Whether the steps of a run with a device are compiled; auto: where it is so long that this pays.

    What is asked decides, not a clock or the compiler's cache, for compiled steps round otherwise: the same command
    gives the same numbers. A token takes about 6 FLOPs for each parameter (Kaplan et al., 2020).
    """
    if run.compile != "auto":
        return bool(run.compile)
    if run.trainer.world_size > 1 or run.trainer.accelerator not in LONG_FLOPS:
        return False
    if run.max_minutes is not None:
        return run.max_minutes >= LONG_MINUTES
    flops = 6 * n_params(meta_model(run, vocab_size)) * run.steps * run.tokens_per_step
    return flops >= LONG_FLOPS[run.trainer.accelerator]


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


def check_memory(run: RunConfig, vocab_size: int) -> None:
    """Raise UserError if a run on a CPU certainly needs more memory than is free: the kernel would kill it.

    A GPU says itself that it is full, and part of what is in use there may be a cache of torch's own.
    """
    needed, free = least_bytes(run, vocab_size), _free_bytes()
    if run.trainer.accelerator == "cpu" and free is not None and needed > free:
        raise UserError(
            f"these settings need at least {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free: choose a"
            " smaller model.d_model, model.n_layers, data.seq_len or data.batch_size,"
            " trainer.accumulate_grad_batches=N or activation_checkpointing=true"
        )


def least_bytes(run: RunConfig, vocab_size: int) -> int:
    """A lower bound of the bytes of a training step: parameters, gradients, moments, and what is kept for backward."""
    model, number = run.model, 4  # bytes of a parameter or a logit
    activation = 2 if is_mixed(run.trainer.precision) else number
    net = meta_model(run, vocab_size)
    moments = 1 if run.optim.name == "muon" else 2
    copies = 2 if run.optim.ema else 1
    parameters = number * (copies * n_params(net) + (1 + moments) * n_params_trained(net))
    kept = model.d_model  # of a token in a block: its input
    if not run.activation_checkpointing and model.linear != "lora":  # behind frozen matrices little more is kept
        kept += model.d_model  # what attention is added to, with it
        kept += 0 if model.norm == "none" else 2 * model.d_model  # what both norms give
        kept += 2 * model.head_dim * (model.n_heads + model.kv_heads)  # queries, keys, values and attention's result
        kept += FFN_WIDTHS.get(model.ffn, 0) * model.d_ff
    logits = number * vocab_size * (2 if run.ngram_smoothing else 1) if run.loss == "plain" else 0  # and targets
    n_tokens = run.data.batch_size // run.trainer.accumulate_grad_batches * run.data.seq_len
    return parameters + n_tokens * (activation * model.n_layers * kept + logits)


def _free_bytes() -> int | None:
    """Memory that is free, as far as the system tells; None if it does not."""
    try:
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(meminfo["MemAvailable"].split()[0])
        with suppress(OSError, ValueError):  # of the control group, as containers have one; "max" is no limit
            free = min(free, int(MEMORY_LIMIT.read_text()))
        return free
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


# --- what a run will take


def forecast(run: RunConfig) -> dict[str, Any] | None:
    """What training a run will take, or what is left of it; None where it is finished.

    Its steps are timed on one device with a copy of the model, so that no number of the run moves. Raises UserError for
    what this machine cannot do, and if the directory holds another run.
    """
    data = prepare(run.data, run.tokenizer, quiet=not sys.stderr.isatty())
    vocab_size, tokens = data.tokenizer.vocab_size, len(data.train)
    hashes = {"data_hash": data.hash, "tokenizer_hash": data.tokenizer.hash}
    directory = RunDirectory(Path(run.run_dir or default_directory(run, config_hash(run, *hashes.values()))))
    if directory.result.exists():
        return None
    if run.init_from:
        loaded = read_base(run.init_from).settings
        check_start(run, vocab_size, loaded.model, loaded.head, loaded.seq_len)
    as_begun, begun_steps = directory.as_begun(run)
    resolved = decide(as_begun, data)
    if run.max_minutes is not None and begun_steps:
        resolved = replace(resolved, trainer=replace(resolved.trainer, max_steps=begun_steps))
    done = max(map(step_of, checkpoints(directory.checkpoints)), default=0)
    if done:
        directory.check_same_run(asdict(resolved) | hashes)
    done = done if run.checkpoint.resume else 0
    steps, first, seconds = time_run(resolved, data)
    steps = begun_steps or steps
    return {
        "run_dir": str(directory.path),
        "vocab_size": vocab_size,
        "n_params": n_params(meta_model(resolved, vocab_size)),
        "train_text_tokens": tokens,
        "steps": steps,
        "steps_done": done,
        "devices": run.trainer.world_size,
        "busy": busy(),
        "readings": steps * run.tokens_per_step / tokens,
        "least_bytes": least_bytes(resolved, vocab_size),
        "seconds": max(first - seconds, 0) + (steps - done) * seconds,
    }


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
