"""Checkpoints, from which a run resumes: files step-XXXXXXXX.ckpt with the content that Lightning gives them.

They are read with `weights_only=True`, so they cannot run code.
"""

import logging
import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lm.config import UserError
from lm.system.files import atomic_file
from lm.training.callbacks import StepCallback
from lm.training.signals import Interrupted

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint beside its final name and renames it when it is on disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # what torch makes of an error of the file, such as a full disk
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", weights_only=True)


class Checkpoints(StepCallback, Checkpoint):
    """Saves every `every` steps, after the last step and where a signal ends the run; keeps the newest `keep` files.

    Lightning calls it after all other callbacks, so the rows of a step are written before its checkpoint. Nothing is
    saved within a step or after an error, so each file is of a whole step. The folder is its only state: unlike
    lightning's ModelCheckpoint, whose state names absolute paths, it goes on where the folder has been moved.
    """

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep

    def on_step_end(self, trainer: Trainer, module: Any, step: int) -> None:
        if step % self.every == 0 or trainer.should_stop:
            self._save(trainer)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Interrupted):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step:08d}.ckpt")
        for path in checkpoints(self.folder)[self.keep :]:
            trainer.strategy.remove_checkpoint(path)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first. Raises OSError if there is one that cannot be listed."""
    names = os.listdir(folder) if os.path.lexists(folder) else []  # glob takes what it may not list for empty
    return sorted((folder / name for name in names if fnmatch(name, "step-*.ckpt")), reverse=True)


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.stem.split("-")[1]) if checkpoint else 0


def newest_checkpoint(folder: Path, config_hash: str) -> Path | None:
    """The newest checkpoint that can be read, None if there is none. Raises UserError if it is one of another run."""
    paths = checkpoints(folder)
    for path in paths:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch and the unpickler have many
            log.warning("%s: cannot be read (%s); trying the one before", path, str(error).partition("\n")[0])
            continue
        if content.get("config_hash") != config_hash:
            raise UserError(f"{path}: a checkpoint of another run; remove it")
        return path
    if paths:
        raise UserError(f"{folder}: no checkpoint can be read; delete the folder to train from the start")
    return None
