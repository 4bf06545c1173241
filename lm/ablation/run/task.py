"""One run in a process of its own, on this machine or on another: the same function on every engine."""

import logging
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lm.ablation.plan.cells import Cell
from lm.ablation.plan.source import source_files, source_hash
from lm.ablation.run_files import RunFiles
from lm.config import Diverged, RunConfig, UserError, foreign_classes
from lm.system.files import write_json

TOKEN = ".token"
log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Place:
    """What a process on another machine must find there: the driver's folders, and the same code."""

    output_dir: str  # absolute
    token: str  # content of a file in it
    cwd: str  # that paths in settings are relative to
    source_hash: str
    torch: str  # its version

    def check(self) -> None:
        """Go to the driver's working directory. Raises UserError naming what this machine lacks."""
        here, token = f"on node {socket.gethostname()}", Path(self.output_dir) / TOKEN
        try:
            same = token.read_text() == self.token
        except OSError:
            same = False
        if not same:
            raise UserError(f"output_dir={self.output_dir}: is not the same folder {here}; expected shared storage")
        try:
            os.chdir(self.cwd)
        except OSError as error:
            raise UserError(f"{self.cwd}: {error.strerror} {here}; start the command in a shared folder") from None
        if source_hash(source_files()) != self.source_hash:
            raise UserError(f"lm: the training code {here} is not that of the driver; install the same version there")
        if torch.__version__ != self.torch:
            raise UserError(f"torch: version {torch.__version__} {here}; expected the driver's, {self.torch}")


@dataclass(slots=True, frozen=True)
class Task:
    """A cell with all that a process needs to carry it out."""

    run_dir: str  # relative to the ablation's folder
    run: RunConfig
    identity: dict[str, str]
    files: RunFiles
    executor: str
    place: Place | None  # None: this machine

    @property
    def threads(self) -> int:
        return int(self.run.threads or 1)

    @property
    def gpus(self) -> int:
        return int(self.identity["device"] in ("cuda", "gpu"))


def task(cell: Cell, folder: Path, executor: str, place: Place | None) -> Task:
    files = RunFiles(folder / cell.run_dir)
    run = replace(cell.run, run_dir=str(files.run_dir))
    return Task(cell.run_dir, run, cell.identity, files, executor, place)


def work(task: Task, **where: Any) -> None:
    """Make one run in this process. Whatever it says goes to its log. Ends in SystemExit if the run did not.

    `where` is added to the file that says where the run is made. Raises UserError if this machine lacks what it needs.
    """
    if task.place:
        task.place.check()
        if not task.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for all its processes; the driver says when to stop
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with open(task.files.log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    where = {"executor": task.executor, "host": socket.gethostname(), "pid": os.getpid(), **where}
    write_json(task.files.where, where)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from lm.training.signals import Interrupted

    try:
        carry_out(task)
    except Interrupted as error:
        sys.exit(128 + error.signum)
    except Exception as error:
        traceback.print_exc()
        status = "diverged" if isinstance(error, Diverged) else "failed"
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reason = str(error).strip() or "no reason given"
        write_json(task.files.outcome, {"status": status, "error": kind + reason.splitlines()[0]})
        sys.exit(1)


def carry_out(task: Task) -> None:
    from lm.data.tokens import prepare
    from lm.training.resolve import resolve
    from lm.training.run_directory import RunLocked
    from lm.training.train import train

    run, planned = task.run, task.identity
    data = prepare(run.data, run.tokenizer)
    changed = "has changed since these runs were planned; the same command plans anew"
    if (data.hash, data.tokenizer.hash) != (planned["data_hash"], planned["tokenizer_hash"]):
        raise UserError(f"the text {changed}")
    classes = foreign_classes(run.model)
    if classes and source_hash(source_files(classes)) != planned["source_hash"]:
        raise UserError(f"the code of {', '.join(classes)} {changed}")
    if task.place:
        trainer = resolve(run, data.tokenizer.vocab_size).trainer
        here = {"device": trainer.accelerator, "precision": trainer.precision}
        for key, value in here.items():
            if value != planned[key]:
                raise UserError(f"{key} is {value} on node {socket.gethostname()}, {planned[key]} where it was planned")
    while True:
        try:
            train(run, data)
            return
        except RunLocked as error:  # by a process whose node the engine has given up too early
            if not task.place:
                raise
            log.info("%s: waiting for it", error)
            time.sleep(5)
