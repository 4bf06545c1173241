"""Lightning's Trainer and loggers as the configuration asks for them."""

import logging
import math
import warnings
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning import Callback, Trainer

from lm.callbacks import Bar, Journal
from lm.checkpoint import Checkpoints
from lm.config import BadInput, RunConfig
from lm.device import best_device


def build_trainer(run: RunConfig, folder: Path, checkpoints: Checkpoints, quiet: bool) -> tuple[Trainer, Journal]:
    """Lightning's Trainer from its own arguments, with what is ours: whole checkpoints, the journal, one bar."""
    options = {"_target_": "lightning.Trainer", **run.trainer, "enable_progress_bar": False}
    accumulate, devices = options.get("accumulate_grad_batches", 1), options.get("devices", 1)
    if not isinstance(accumulate, int) or accumulate < 1 or run.data.batch_size % accumulate:
        raise BadInput(
            f"trainer.accumulate_grad_batches={accumulate}: does not divide data.batch_size={run.data.batch_size}"
        )
    if options.get("precision") == "auto":
        device = options.get("accelerator", "auto")
        options["precision"] = "32-true" if "cpu" in (device, device == "auto" and best_device()) else "bf16-mixed"
    tokens_per_step = run.data.batch_size * run.data.seq_len
    if isinstance(devices, int) and devices > 1:
        tokens_per_step *= devices * options.get("num_nodes", 1)
    if run.max_tokens is not None:
        options["max_steps"] = math.ceil(run.max_tokens / tokens_per_step)
    if not isinstance(options.get("max_steps"), int) or options["max_steps"] < 1:
        raise BadInput(f"trainer.max_steps={options.get('max_steps')}: expected a number of steps, 1 or more")
    journal = Journal(tokens_per_step, options.get("log_every_n_steps") or 1)
    callbacks: list[Callback] = [journal] if quiet else [journal, Bar(tokens_per_step)]
    fixed = {
        "max_epochs": -1,
        "limit_val_batches": 0,  # the journal validates, in the order that a resume repeats
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "logger": False,
        "default_root_dir": str(folder),
    }
    for key in fixed.keys() & run.trainer.keys():
        raise BadInput(f"trainer.{key}: is decided by this project; see validation, checkpoint and logger")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its tips and its list of absent accelerators
    warnings.filterwarnings("ignore", module="lightning", message=".*(num_workers|train_dataloader|LeafSpec).*")
    try:
        return instantiate(options | fixed, callbacks=callbacks, plugins=[checkpoints]), journal
    except Exception as error:
        reason = error.__cause__ or error
        raise BadInput(f"trainer: {str(reason).splitlines()[0]}") from error


def build_loggers(run: RunConfig, folder: Path) -> list[Any]:
    """The configured Lightning loggers, writing into the run directory."""
    try:
        return [instantiate(one, save_dir=str(folder)) for one in run.logger.values()]
    except Exception as error:
        raise BadInput(f"logger: {str(error.__cause__ or error).splitlines()[0]}") from error
