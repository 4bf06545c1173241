"""Whether a run can fit into memory, before a tensor is made."""

import os
from pathlib import Path

import torch

from lm.config import RunConfig, UserError
from lm.model.size import n_params, n_params_trained
from lm.system.device import is_mixed
from lm.training.resolve import build_model

FFN_WIDTHS = {"relu": 1, "gelu": 2, "gelu_tanh": 2, "relu2": 2, "swiglu": 4}  # tensors (B, T, d_ff) kept for backward


def check_memory(run: RunConfig, vocab_size: int) -> None:
    """Raise UserError if a resolved run certainly needs more memory than there is on its device."""
    needed, free = least_bytes(run, vocab_size), _free_bytes(run.trainer.accelerator)
    if free is not None and needed > free:
        raise UserError(
            f"these settings need at least {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free: choose a"
            " smaller model.d_model, model.n_layers, data.seq_len or data.batch_size,"
            " trainer.accumulate_grad_batches=N or activation_checkpointing=true"
        )


def least_bytes(run: RunConfig, vocab_size: int) -> int:
    """A lower bound of the bytes of a training step: parameters, gradients, moments, and what is kept for backward."""
    model, precision = run.model, run.trainer.precision
    number = {"bf16-true": 2, "64-true": 8}.get(precision, 4)  # bytes of a parameter or a logit
    activation = 2 if is_mixed(precision) else number
    with torch.device("meta"):
        net = build_model(run, vocab_size)
    moments = 1 if run.optim.name == "muon" else 2
    parameters = number * (n_params(net) + (1 + moments) * n_params_trained(net))
    kept = model.d_model  # of a token in a block: its input
    if not run.activation_checkpointing and model.linear != "lora":  # behind frozen matrices little more is kept
        kept += 3 * model.d_model  # the second norm's input, and what both norms give
        kept += 2 * model.head_dim * (model.n_heads + model.kv_heads)  # queries, keys, values and attention's result
        kept += FFN_WIDTHS.get(model.ffn, 0) * model.d_ff
    logits = number * vocab_size if run.loss == "plain" else 0
    n_tokens = run.data.batch_size // run.trainer.accumulate_grad_batches * run.data.seq_len
    return parameters + n_tokens * (activation * model.n_layers * kept + logits)


def _free_bytes(device: str) -> int | None:
    """Memory that is free on the device, as far as the system tells; None if it does not."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(meminfo["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
