"""What a run reports while it trains: the rows of metrics.csv, and the trackers that the setting `logger` names."""

import csv
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lm.config import RunConfig, UserError
from lm.config.checks import reading, without_secrets
from lm.config.identity import flat
from lm.data.tokens import TextData
from lm.scoring import Scores
from lm.system.files import csv_text, json_sha256, write_text
from lm.training.run_directory import read_rows

COLUMNS = ("step", "tokens", "lr", "train/loss", "train/grad_norm", "val/loss", "val/bpb", "val/top1", "val/tokens")
FINAL = (  # of result.json, for the trackers
    *("val_loss", "val_bpb", "val_top1", "n_params", "flops_per_token"),
    *("steps", "tokens", "seconds", "tokens_per_second"),
)
log = logging.getLogger(__name__)


def validation_metrics(scores: Scores, data: TextData) -> dict[str, float]:
    """Scores as columns. In bits per byte, an estimate takes the bytes per token of the whole text."""
    n_bytes = data.val_bytes * (scores.n_tokens / data.n_targets)
    bpb = scores.bpb(n_bytes)
    return {"val/loss": scores.loss, "val/bpb": bpb, "val/top1": scores.top1, "val/tokens": scores.n_tokens}


class MetricsFile:
    """A CSV file with a row for each logged step, in order, also after a resume, without times; trackers get a copy.

    Rows of an existing file up to `resume_step` are kept; it is told if some of those up to `logged_step` are lost.
    """

    def __init__(
        self, path: Path, resume_step: int = 0, logged_step: int = 0, loggers: Any = (), columns: Any = COLUMNS
    ) -> None:
        self.path, self.loggers, self.columns = path, loggers, columns
        rows = read_rows(path) if resume_step else []
        with reading(path):  # a person may have edited it
            rows = [row for row in rows if int(row["step"]) <= resume_step]
        if (int(rows[-1]["step"]) if rows else 0) < logged_step:
            log.warning("%s: its rows up to step %d are lost", path, logged_step)
        write_text(path, csv_text(columns, rows))

    def append(self, step: int, metrics: dict[str, float]) -> None:
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n", extrasaction="ignore").writerow(
                {"step": step, **metrics}
            )
        for logger in self.loggers:
            logger.log_metrics(metrics, step)

    def sync(self) -> None:
        """Wait until all rows are on disk: a checkpoint must not be newer than they are."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())


@contextmanager
def trackers(run: RunConfig, folder: Path, settings: dict[str, Any], resume_step: int = 0) -> Iterator[list[Any]]:
    """The loggers of the setting `logger`, told the settings by dotted keys; closed at the end of the context.

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
    """The final scores, under their names in result.json."""
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
