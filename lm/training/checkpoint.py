"""Checkpoints, from which a run resumes: files step-XXXXXXXX.ckpt with the content that Lightning gives them.

They are read with `weights_only=True`, so they cannot run code.
"""

import logging
import os
import re
import zipfile
from collections.abc import Callable
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

NAME = re.compile(r"step-(\d+)\.ckpt")
CONTENT = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step", "config_hash")
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
        step = trainer.global_step
        trainer.save_checkpoint(self.folder / f"step-{step:08d}.ckpt")
        made = [path for path in checkpoints(self.folder) if step_of(path) <= step]  # a damaged one may be newer
        for path in made[self.keep :]:
            trainer.strategy.remove_checkpoint(path)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first. Raises OSError if there is one that cannot be listed."""
    names = os.listdir(folder) if os.path.lexists(folder) else []  # glob takes what it may not list for empty
    return sorted((folder / name for name in names if NAME.fullmatch(name)), key=step_of, reverse=True)


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.stem.removeprefix("step-")) if checkpoint else 0


def newest_checkpoint(folder: Path, config_hash: str) -> Path | None:
    """The newest whole checkpoint, None if there is none. Raises UserError if it is one of another run.

    Each is compared with the sums that its zip file holds: torch loads damaged numbers as it finds them.
    """
    paths = checkpoints(folder)
    for path in paths:
        try:
            content = _read_whole(path)
        except OSError:
            raise
        except Exception as error:  # torch, the unpickler and zipfile have many
            log.warning("%s: is damaged (%s); trying the one before", path, str(error).partition("\n")[0])
            continue
        if content["config_hash"] != config_hash:
            raise UserError(f"{path}: a checkpoint of another run; remove it")
        if content["global_step"] == step_of(path):
            return path
        log.warning("%s: is that of step %s; trying the one before", path, content["global_step"])
    if paths:
        raise UserError(f"{folder}: no checkpoint can be resumed from; delete the folder to train from the start")
    return None


def _read_whole(path: Path) -> dict[str, Any]:
    """The content of a checkpoint. Raises some exception if it is not as it was written."""
    with zipfile.ZipFile(path) as file:
        if damaged := file.testzip():
            raise ValueError(f"the sum of {damaged} differs")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(content.get(key) for key in CONTENT):
        raise ValueError("not a checkpoint of a run")
    return content
