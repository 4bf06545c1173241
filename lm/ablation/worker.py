"""One run in a process of its own: the same function on every executor."""

import logging
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from lm.ablation.code_hash import code_hash
from lm.ablation.plan import RunSpec
from lm.ablation.run_files import Failure, RunFiles
from lm.config import Diverged, RunConfig, UserError, foreign_classes
from lm.system.files import write_json

CHANGED = "has changed since these runs were planned; the same command plans anew"
log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Task:
    """A planned run with all that a process on any machine needs to make it."""

    name: str  # the run's directory, relative to that of the ablation
    run: RunConfig  # its run_dir is absolute
    identity: dict[str, str]  # what was planned: hashes of text, tokenizer and code, the device
    executor: str
    cwd: str  # of the driver: paths in settings are relative to it

    @property
    def files(self) -> RunFiles:
        return RunFiles(Path(str(self.run.run_dir)))

    @property
    def threads(self) -> int:
        return int(self.run.threads or 1)

    @property
    def gpus(self) -> int:
        return int(self.identity["device"] in ("cuda", "gpu"))


def task_of(spec: RunSpec, folder: Path, executor: str) -> Task:
    run = replace(spec.run, run_dir=str((folder / spec.run_dir).absolute()))
    return Task(spec.run_dir, run, spec.identity, executor, os.getcwd())


def run_on_node(task: Task) -> str:
    """`run_task` on another machine. Returns why this machine cannot make the run, or nothing."""
    node, folder = f"node {socket.gethostname()}", task.files.run_dir.parent
    if not folder.is_dir():
        return f"output_dir: {folder} is not on {node}; expected storage that all nodes share"
    try:
        os.chdir(task.cwd)
        code = code_hash(foreign_classes(task.run.model))
    except (OSError, UserError) as error:
        return f"{task.cwd}: cannot be used on {node} ({error}); start the command in a folder that all nodes share"
    if code != task.identity["source_hash"]:
        return f"lm: the training code on {node} is not that of the driver; install the same version there"
    run_task(task)
    return ""


def run_task(task: Task) -> None:
    """Train the run in this process, which does nothing else. All that it prints goes to the run's log.

    How it failed is written to its status file. Raises SystemExit or KeyboardInterrupt after a signal.
    """
    from lm.training.signals import Interrupted

    if not task.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # submitit would ignore it
    with open(task.files.log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    write_json(task.files.where, {"executor": task.executor, "host": socket.gethostname(), "pid": os.getpid()})
    try:
        _train(task)
    except Interrupted as error:
        if error.signum == signal.SIGINT:
            raise KeyboardInterrupt from None  # with which Ray has cancelled the task, and by which it ends
        sys.exit(128 + error.signum)
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        task.files.write_status("diverged" if isinstance(error, Diverged) else "failed", Failure.ERROR, kind + reason)


def _train(task: Task) -> None:
    from lm.data.tokens import prepare
    from lm.training.run_directory import RunLocked
    from lm.training.train import train

    run, planned = task.run, task.identity
    data = prepare(run.data, run.tokenizer)
    if (data.hash, data.tokenizer.hash) != (planned["data_hash"], planned["tokenizer_hash"]):
        raise UserError(f"the text {CHANGED}")
    classes = foreign_classes(run.model)
    if classes and code_hash(classes) != planned["source_hash"]:
        raise UserError(f"the code of {', '.join(classes)} {CHANGED}")
    while True:
        try:
            train(run, data)
            return
        except RunLocked as error:  # by a process of an earlier driver, or of a node that was given up too early
            log.info("%s: waiting for it", error)
            time.sleep(5)
