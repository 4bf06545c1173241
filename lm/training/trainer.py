"""Lightning's Trainer, built from the configuration."""

import atexit
import logging
import signal
import warnings
from pathlib import Path
from typing import Any

import torch.distributed
from hydra.utils import instantiate
from lightning import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

from lm.config import BadInput, RunConfig
from lm.config.run import IN_WORKERS, STRATEGIES
from lm.training.callbacks import ProgressBar, TrainingCallback, heard
from lm.training.checkpoint import Checkpoints
from lm.training.diagnostics import Diagnostics
from lm.training.options import tokens_per_step
from lm.training.samples import SamplesDuringTraining


def build_trainer(
    run: RunConfig, options: dict[str, Any], checkpoints: Checkpoints, folder: Path, bar: bool
) -> tuple[Trainer, TrainingCallback]:
    """Lightning's Trainer with the project's checkpoints, callbacks and, if `bar`, progress bar."""
    n_tokens = tokens_per_step(run, options)
    callback = TrainingCallback(n_tokens, options.get("log_every_n_steps") or 1)
    callbacks: list[Callback] = [ProgressBar(n_tokens)] if bar else []
    if run.diagnostics.every:
        callbacks.append(Diagnostics(folder / "diagnostics.csv", run.diagnostics.every, n_tokens))
    if run.prompts and run.validation.every:
        callbacks.append(SamplesDuringTraining(folder / "samples.jsonl", n_tokens))
    callbacks.append(callback)  # last, because it saves: the rows of a step are written before its checkpoint
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # not its tips and lists of absent accelerators
    warnings.filterwarnings("ignore", module="lightning", message=".*(num_workers|train_dataloader|LeafSpec|srun).*")
    try:
        trainer: Trainer = instantiate(
            options,
            max_epochs=-1,
            limit_val_batches=0,  # TrainingCallback validates
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            logger=False,
            callbacks=callbacks,
            plugins=[checkpoints],
        )
    except Exception as error:
        reason = error.__cause__ or error
        raise BadInput(f"trainer: {str(reason).splitlines()[0]}") from error
    check_processes(trainer, options)
    if trainer.world_size > 1:
        atexit.register(leave_process_group)
    return trainer, callback


def check_processes(trainer: Trainer, options: dict[str, Any]) -> None:
    """Raise BadInput for what the names of strategies do not tell, such as one that is given as a class."""
    strategy, wanted = trainer.strategy, options["devices"] * options["num_nodes"]
    name = type(strategy).__name__
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        raise BadInput(f"trainer.strategy: {name} {IN_WORKERS}; use ddp")
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise BadInput(f"trainer.strategy: {name} is none of {', '.join(STRATEGIES)}")
    if trainer.world_size != wanted:
        found = "one process trains" if trainer.world_size == 1 else f"{trainer.world_size} processes train"
        raise BadInput(f"trainer.strategy: trainer.devices * trainer.num_nodes is {wanted}, but {found}; use ddp")


def leave_process_group() -> None:
    """Destroy the process group when the interpreter exits: only then, for the jobs of a sweep share it.

    A Gloo thread that is still busy at exit would abort the process, and torchrun on the other nodes would wait five
    minutes for this one. Lightning destroys the group for NCCL only. This blocks until pending collectives have
    ended: at once where another process has died, after the group's timeout of 30 minutes where it hangs.
    """
    for signum in heard():  # Python's handlers are not called while this blocks
        signal.signal(signum, signal.SIG_DFL)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
