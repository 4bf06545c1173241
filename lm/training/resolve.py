"""What a run's settings leave to the machine: device, precision, steps, loss and threads; whether the run fits into
memory; and the model of a run.

This module does not import Lightning, which takes seconds: an ablation is planned without it.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch

from lm.config import RunConfig, UserError
from lm.model.size import n_params, n_params_trained
from lm.model.transformer import Transformer, enable_activation_checkpointing
from lm.system.device import best_device, count_threads, has_native_bf16, is_mixed
from lm.training.loss import resolve_loss

# tensors (B, T, d_ff) kept for backward
FFN_WIDTHS = {"relu": 1, "gelu": 2, "gelu_tanh": 2, "relu2": 2, "silu": 2, "swiglu": 4}

# Of a run whose steps are compiled, by device: about ten minutes on two cores, and two on a fast GPU. See is_compiled.
LONG_FLOPS = {"cpu": 1e14, "cuda": 2e16}
LONG_MINUTES = 10


def resolve(run: RunConfig, vocab_size: int) -> RunConfig:
    """The run with every `auto` decided for this machine. Raises UserError for what this machine cannot do."""
    trainer = run.trainer
    _check_torchrun(trainer.world_size)
    name = trainer.accelerator
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
    with torch.device("meta"):
        net = build_model(run, vocab_size)
    return 6 * n_params(net) * run.steps * run.tokens_per_step >= LONG_FLOPS[run.trainer.accelerator]


def _check_torchrun(world_size: int) -> None:
    started = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and started != str(world_size):
        product = f"trainer.devices * trainer.num_nodes is {world_size}"
        raise UserError(f"trainer.devices: torchrun has started {started} processes, but {product}")


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


def n_batches(run: RunConfig, n_tokens: int) -> int:
    """Batches of a whole text of so many tokens."""
    return -(-n_tokens // (run.data.batch_size * run.data.seq_len))


def n_validations(run: RunConfig, steps: int) -> int:
    """Validations during a run of so many steps, without the final score."""
    return (steps - 1) // run.validation.every if run.validation.every else 0


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
    with torch.device("meta"):
        net = build_model(run, vocab_size)
    moments = 1 if run.optim.name == "muon" else 2
    copies = 2 if run.optim.ema else 1
    parameters = number * (copies * n_params(net) + (1 + moments) * n_params_trained(net))
    kept = model.d_model  # of a token in a block: its input
    if not run.activation_checkpointing and model.linear != "lora":  # behind frozen matrices little more is kept
        kept += model.d_model  # what attention is added to, with it
        kept += 0 if model.norm == "none" else 2 * model.d_model  # what both norms give
        kept += 2 * model.head_dim * (model.n_heads + model.kv_heads)  # queries, keys, values and attention's result
        kept += FFN_WIDTHS.get(model.ffn, 0) * model.d_ff
    logits = number * vocab_size if run.loss == "plain" else 0
    n_tokens = run.data.batch_size // run.trainer.accumulate_grad_batches * run.data.seq_len
    return parameters + n_tokens * (activation * model.n_layers * kept + logits)


def _free_bytes() -> int | None:
    """Memory that is free, as far as the system tells; None if it does not."""
    try:
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(meminfo["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
