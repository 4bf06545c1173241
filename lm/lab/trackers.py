"""Trackers beside metrics.csv: TensorBoard's logger of Fabric, and W&B's of Lightning."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lm.config import RunConfig, flat
from lm.errors import UserError, without_secrets
from lm.system.files import json_sha256

FINAL = (  # figures of result.json
    "val_loss",
    "val_bpb",
    "val_top1",
    "n_params",
    "flops_per_token",
    "steps",
    "tokens",
    "seconds",
    "tokens_per_second",
)


@contextmanager
def trackers(run: RunConfig, folder: Path, settings: dict[str, Any], resume_step: int = 0) -> Iterator[list[Any]]:
    """Yield the loggers of the setting `logger`, which get the settings by dotted keys and are closed at the end.

    What an interrupted process sent is continued: W&B by the id of the run, TensorBoard without steps that come again.
    Raises UserError if one cannot begin, for example because nobody has logged in.
    """
    rank_zero_only.rank = 0  # type: ignore[attr-defined]  # whatever number a launcher of many runs gave this one
    loggers: list[Any] = []
    status, typed = "failed", sys.argv
    run_id = json_sha256([settings["config_hash"], str(folder.absolute())])[:16]  # a repetition elsewhere has its own
    try:
        for name, options in asdict(run.logger).items():
            if options is not None:
                try:
                    sys.argv = without_secrets(typed)  # W&B sends the command line too when a run begins
                    logger = TRACKERS[name](folder, run_id, resume_step, **options)
                    logger.log_hyperparams(without_secrets(flat(settings)))
                except Exception as error:  # each library has its own
                    message = (str(error) or type(error).__name__).splitlines()[0]
                    raise UserError(f"logger={name}: {message}") from error
                finally:
                    sys.argv = typed
                loggers.append(logger)
        yield loggers
        status = "success"
    finally:
        for logger in loggers:
            logger.finalize(status)
            if not isinstance(logger, TensorBoardLogger):  # else the next run of a sweep would go on in this one
                logger.experiment.finish()


def log_result(loggers: list[Any], settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Log the final scores under their names in result.json."""
    scores, step = {key: result[key] for key in FINAL}, result["steps"]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(without_secrets(flat(settings)), scores, step)  # its HParams take both together
        else:
            logger.log_metrics(scores, step)


def _tensorboard(folder: Path, run_id: str, resume_step: int, dir: str | None) -> Logger:
    options: dict[str, Any] = {"version": "", "default_hp_metric": False, "purge_step": resume_step + 1}
    return TensorBoardLogger(dir or folder, name="" if dir else "tensorboard", **options)


def _wandb(folder: Path, run_id: str, resume_step: int, project: str, offline: bool, dir: str | None) -> Logger:
    from lightning.pytorch.loggers import WandbLogger

    options: dict[str, Any] = {"project": project, "offline": offline, "id": run_id, "resume": "allow"}
    return WandbLogger(name=folder.name, save_dir=dir or folder, **options)


TRACKERS: dict[str, Callable[..., Logger]] = {"tensorboard": _tensorboard, "wandb": _wandb}
