"""Checkpoints, from which a run resumes: Lightning's checkpoint content in files of plain data.

A checkpoint's file name ends in the hash of its bytes, so a damaged one is recognised, and it says which run it is of.
It is read with `weights_only=True`, so it cannot run code.
"""

import logging
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from lm.config import BadInput
from lm.system.files import atomic_file, sha256

log = logging.getLogger(__name__)


class Checkpoints(CheckpointIO):
    """Writes each checkpoint atomically and keeps the newest `keep`. `run` identifies the run that they are of."""

    def __init__(self, folder: Path, keep: int, run: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.folder, self.keep, self.run = folder, keep, dict(run)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.folder.mkdir(exist_ok=True)
        step = checkpoint["global_step"]
        with atomic_file(self.folder, lambda file: f"step-{step:08d}-{sha256(file)[:16]}.ckpt") as file:
            try:
                torch.save({**checkpoint, "run": self.run}, file)
            except RuntimeError as error:  # what torch makes of an error of the file, such as a full disk
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise
        for old in self.paths()[self.keep :]:
            self.remove_checkpoint(old)

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return content

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """All checkpoints, the newest step first. Raises OSError if they cannot be listed: they may be there."""
        if not os.path.lexists(self.folder):
            return []
        names = [name for name in os.listdir(self.folder) if fnmatch(name, "step-*.ckpt")]
        return [self.folder / name for name in sorted(names, reverse=True)]

    def newest(self) -> Path | None:
        """The newest intact checkpoint, None if there is none.

        Raises BadInput if every one is damaged, or if it is one of another run.
        """
        damaged: list[Path] = []
        for path in self.paths():
            if path.stem.endswith(sha256(path)[:16]):
                for one in damaged:  # they must not count among those to keep
                    self.remove_checkpoint(one)
                self.refuse_another(path)
                return path
            log.warning("%s is damaged: trying the previous one", path)
            damaged.append(path)
        if damaged:
            raise BadInput(f"{self.folder}: every checkpoint is damaged; delete the folder to train from the start")
        return None

    def refuse_another(self, path: Path) -> None:
        there = plain(path).get("run", {})
        for key, here in self.run.items():
            if there.get(key, here) != here:
                found = f"{key} is {there[key]} there, {here} here"
                raise BadInput(f"{path}: a checkpoint of another run ({found}); remove it")


def plain(path: Path) -> Any:
    """The content of a checkpoint; its tensors are not read. Raises BadInput if the file is something else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # torch and the unpickler have many
        raise BadInput(f"{path}: no checkpoint that train has written; remove it") from error
