"""The state of a run: all that a checkpoint, a file step-XXXXXXXX.ckpt, holds, and a resume needs.

Checkpoints are read with `weights_only=True`, so they cannot run code.
"""

import logging
import math
import os
import re
import zipfile
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lm.errors import UserError, first_line, is_out_of_memory
from lm.folder import saved_state
from lm.model.transformer import Transformer
from lm.system.files import atomic_file

CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class State:
    """A run after `step` optimizer steps. Batches, dropout and learning rates are functions of (seed, step).

    A resume cuts off the rows that later steps have written to the files.
    """

    config_hash: str  # of the run
    net: Transformer
    optimizer: Optimizer
    average: Transformer | None = None  # of the weights, with optim.ema
    step: int = 0
    seconds: float = 0.0  # of the loop, in all processes that have continued the run
    best_step: int = 0  # the step of the lowest val/loss; 0: there was no validation
    best_loss: float = math.inf
    best: dict[str, Tensor] | None = None  # weights of the best step, with checkpoint.best
    ended_by: str | None = None  # steps or patience; None while it trains
    last_row: dict[str, float] = field(default_factory=dict)  # of the last step, for the row with the final score
    resumed_from: list[int] = field(default_factory=list)  # steps

    @property
    def eval_net(self) -> Transformer:
        """The model that is validated and saved: the average of the weights, if there is one."""
        return self.net if self.average is None else self.average

    def update_average(self, decay: float) -> None:
        """Move the average towards the weights after a step; step n moves it by 1 - min(decay, n / (n + 9)).

        The decay rises with the steps, as in TensorFlow's ExponentialMovingAverage: otherwise the average of a short
        run would consist of weights from its beginning. A head that is tied for now counts as the embedding, so the
        average of a head that is untied in mid-training continues the average of the embedding.
        """
        assert self.average is not None
        weights = saved_state(self.net)
        state = self.average.state_dict()
        averages = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        for name in state.keys() - averages.keys():  # a counter or a mask of a class of the user
            state[name].copy_(weights[name])
        decay = min(decay, self.step / (self.step + 9))
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        update([*averages.values()], [weights[name] for name in averages], self.step)

    def update_best(self, loss: float, keeps: bool) -> None:
        """If this loss is the lowest so far, record the step and, if `keeps`, the weights of the model."""
        if loss < self.best_loss:
            self.best_step, self.best_loss = self.step, loss
            if keeps:
                self.best = {name: tensor.cpu().clone() for name, tensor in saved_state(self.eval_net).items()}

    def best_net(self) -> Transformer:
        """Return the model of the step of the lowest val/loss, with checkpoint.best."""
        assert self.best is not None
        net = deepcopy(self.eval_net)
        net.load_state_dict(self.best)
        return net

    def save(self, folder: Path, keep: int) -> None:
        """Write a checkpoint. When the checkpoint is on disk, remove all but the newest `keep`."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content |= {"net": saved_state(self.net), "optimizer": self.optimizer.state_dict()}
        content["average"] = self.average and self.average.state_dict()
        folder.mkdir(exist_ok=True)
        with atomic_file(folder / f"step-{self.step:08d}.ckpt") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # what torch makes of an error of the file, such as a full disk
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise
        made = [path for path in checkpoints(folder) if step_of(path) <= self.step]  # a damaged one may be newer
        for path in made[keep:]:
            path.unlink()

    def load(self, content: dict[str, Any]) -> None:
        """Go on from the content of a checkpoint."""
        self.net.load_state_dict(content["net"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(content["average"])
        for name in {item.name for item in fields(self)} - {"net", "optimizer", "average"}:
            setattr(self, name, content[name])
        self.resumed_from = [*self.resumed_from, self.step]


# --- checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first. Raises OSError if the folder cannot be listed."""
    names = os.listdir(folder) if os.path.lexists(folder) else []  # glob takes what it may not list for empty
    return sorted((folder / name for name in names if CHECKPOINT.fullmatch(name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def newest_checkpoint(folder: Path, config_hash: str) -> dict[str, Any] | None:
    """Return the content of the newest whole checkpoint, or None. Raises UserError if it is of another run.

    Each is compared with the sums that its zip file holds: torch loads damaged numbers as it finds them.
    """
    paths = checkpoints(folder)
    for path in paths:
        try:
            content = _read_whole(path)
        except OSError:
            raise
        except Exception as error:  # torch, the unpickler and zipfile have many
            if is_out_of_memory(error):
                raise
            log.warning("%s: is damaged (%s); trying the one before", path, first_line(error))
            continue
        if content["config_hash"] != config_hash:
            raise UserError(f"{path}: a checkpoint of another run; remove it")
        return content
    if paths:
        raise UserError(f"{folder}: no checkpoint can be resumed from; delete the folder to train from the start")
    return None


def _read_whole(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint. Raises some exception if it is not as it was written."""
    with zipfile.ZipFile(path) as file:
        if damaged := file.testzip():
            raise ValueError(f"the sum of {damaged} differs")
    content = torch.load(path, map_location="cpu", weights_only=True)
    names = {item.name for item in fields(State)}
    if not isinstance(content, dict) or {*content} != names or not (content["net"] and content["optimizer"]):
        raise ValueError("not a checkpoint of this version")
    return content
