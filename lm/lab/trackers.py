"""Trackers beside metrics.csv: TensorBoard by the logger of Fabric, and Weights & Biases by its own package."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.tensorboard import TensorBoardLogger
from lightning_fabric.utilities.rank_zero import rank_zero_only

from lm.config import RunConfig, flat
from lm.errors import UserError, missing_extra, named, without_secrets
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
                except ModuleNotFoundError as error:
                    raise missing_extra(f"logger={name}", name, "track") from error
                except Exception as error:  # each library has its own
                    raise UserError(f"logger={name}: {named(error)}") from error
                finally:
                    sys.argv = typed
                loggers.append(logger)
        yield loggers
        status = "success"
    finally:
        for logger in loggers:
            logger.finalize(status)


def log_result(loggers: list[Any], settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Log the final scores under their names in result.json."""
    scores, step = {key: result[key] for key in FINAL}, result["steps"]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(without_secrets(flat(settings)), scores, step)  # its HParams take both together
        else:
            logger.log_metrics(scores, step)


class Wandb:
    """A run of Weights & Biases, with the methods of a logger of Fabric."""

    def __init__(self, folder: Path, run_id: str, resume_step: int, project: str, offline: bool, dir: str | None):
        import wandb

        mode = "offline" if offline else "online"
        place = dir or str(folder)
        self.run = wandb.init(project=project, name=folder.name, dir=place, id=run_id, resume="allow", mode=mode)
        # The step is a metric here: W&B drops rows of steps that it has seen, and a resumed run makes steps again.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step", step_sync=True)

    def log_hyperparams(self, settings: dict[str, Any]) -> None:
        self.run.config.update(settings, allow_val_change=True)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.run.log(metrics | {"step": step})

    def finalize(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "success"))  # else the next run of a sweep would go on in this one


def _tensorboard(folder: Path, run_id: str, resume_step: int, dir: str | None) -> TensorBoardLogger:
    options: dict[str, Any] = {"version": "", "default_hp_metric": False, "purge_step": resume_step + 1}
    return TensorBoardLogger(dir or folder, name="" if dir else "tensorboard", **options)


TRACKERS: dict[str, Callable[..., Any]] = {"tensorboard": _tensorboard, "wandb": Wandb}
