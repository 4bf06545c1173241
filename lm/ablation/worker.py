"""One run in a process of its own: the same function on every executor."""

import logging
import os
import signal
import socket
import sys
import time
import traceback

from lm.ablation.code_hash import code_hash
from lm.ablation.plan import RunSpec
from lm.ablation.run_files import Failure
from lm.config import Diverged, UserError, foreign_classes
from lm.config.checks import without_secrets
from lm.system.files import write_json
from lm.system.terminal import MessageHandler

CHANGED = "has changed since these runs were planned; the same command plans anew"
log = logging.getLogger(__name__)


def make_run_on_node(spec: RunSpec, executor: str, cwd: str) -> None:
    """`make_run` on another machine. Raises UserError, before the run begins, if it cannot be made there.

    Paths in settings are relative to `cwd`, the folder in which the driver was started.
    """
    node, folder = f"node {socket.gethostname()}", spec.files.run_dir.parent
    if not folder.is_dir():
        raise UserError(f"output_dir: {folder} is not on {node}; expected storage that all nodes share")
    try:
        os.chdir(cwd)
        code = code_hash(foreign_classes(spec.run.model))
    except (OSError, UserError) as error:
        raise UserError(f"{cwd}: cannot be used on {node} ({error}); expected a folder that all nodes share") from None
    if code != spec.identity["source_hash"]:
        raise UserError(f"lm: the training code on {node} is not that of the driver; install the same version there")
    make_run(spec, executor)


def make_run(spec: RunSpec, executor: str) -> None:
    """Train the run in this process, which does nothing else. All that it prints goes to the run's log.

    How it failed is written to its status file. Raises SystemExit or KeyboardInterrupt after a signal.
    """
    from lm.training.signals import Interrupted

    if not spec.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # submitit would ignore it
    with open(spec.files.log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    logging.basicConfig(level=logging.INFO, handlers=[MessageHandler()])
    write_json(spec.files.where, {"executor": executor, "host": socket.gethostname(), "pid": os.getpid()})
    try:
        _train(spec)
    except Interrupted as error:
        if error.signum == signal.SIGINT:
            raise KeyboardInterrupt from None  # with which Ray has cancelled the task, and by which it ends
        sys.exit(128 + error.signum)
    except Exception as error:
        print(without_secrets(traceback.format_exc()), file=sys.stderr)
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        spec.files.write_status("diverged" if isinstance(error, Diverged) else "failed", Failure.ERROR, kind + reason)


def _train(spec: RunSpec) -> None:
    from lm.data.tokens import prepare
    from lm.training.run_directory import RunLocked
    from lm.training.train import train

    run, planned = spec.run, spec.identity
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
