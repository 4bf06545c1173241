"""Runs in processes of their own, several at a time.

They are forked from a server that has done the imports once. A worker holds the reading end of a pipe that only its
driver holds open: when the driver ends, however it ends, the pipe closes and the worker with it.
"""

import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lm.ablation.outcomes import RunFiles, cause_of_death
from lm.ablation.plan.arms import Arm
from lm.ablation.plan.cells import Cell, cell
from lm.ablation.plan.source import source_files, source_hash
from lm.config import BadInput, Diverged, RunConfig
from lm.model.projection import LINEARS
from lm.system.files import write_text

START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PROCESSES: Any = multiprocessing.get_context(START)
log = logging.getLogger(__name__)


def prepare_workers() -> None:
    """Start the server that workers are forked from; it imports while the driver plans."""
    if START == "forkserver":
        PROCESSES.set_forkserver_preload(["lm.training.train", "datasets"])
        multiprocessing.forkserver.ensure_running()


def run_cells(
    cells: list[Cell], folder: Path, workers: int, gpus: int, tick: Callable[[dict[str, int], list[str]], None]
) -> None:
    """Run these cells to their end, `workers` at a time, each in its run_dir below `folder`.

    `tick` is called about twice a second with the steps that the running cells have made and the cells that have ended
    since, by run_dir. On an interrupt the workers save and stop, and the interrupt goes on to the caller.
    """
    waiting = list(reversed(cells))
    running: dict[int, tuple[str, Any, Connection]] = {}  # by slot: run_dir, process, line
    try:
        while waiting or running:
            for slot in [slot for slot in range(workers) if slot not in running][: len(waiting)]:
                one = waiting.pop()
                running[slot] = (one.run_dir, *begin(one, folder, slot % gpus if gpus else None))
            wait([process.sentinel for _, process, _ in running.values()], timeout=0.5)
            ended = {slot: one for slot, one in running.items() if one[1].exitcode is not None}
            for slot, (run_dir, process, line) in ended.items():
                del running[slot]
                line.close()
                record_death(RunFiles(folder / run_dir), process.exitcode)
            steps = {run_dir: RunFiles(folder / run_dir).steps() for run_dir, *_ in running.values()}
            tick(steps, [run_dir for run_dir, *_ in ended.values()])
    finally:
        for _, process, _ in running.values():
            process.terminate()  # each saves a checkpoint and stops
        for _, process, line in running.values():
            process.join(60)
            line.close()  # ends what still runs


def measure_startup(arm: Arm, gpus: int) -> float:
    """Seconds of a run beyond its steps (process, model, samples, saving), from a real one that leaves nothing."""
    log.info("measuring what a run takes beyond its steps")
    first = PROCESSES.Process(target=int)  # waits until the server of the workers has done its imports
    first.start()
    first.join()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run_cells([cell(arm, 0, 1, {})], Path(folder), 1, gpus, lambda *_: None)
        return max(0.0, time.perf_counter() - started - arm.seconds(1))


def begin(cell: Cell, folder: Path, gpu: int | None) -> tuple[Any, Connection]:
    files = RunFiles(folder / cell.run_dir)
    files.run_dir.parent.mkdir(parents=True, exist_ok=True)
    files.outcome.unlink(missing_ok=True)
    run = replace(cell.run, run_dir=str(files.run_dir))
    theirs, ours = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=work, args=(run, cell.identity, files, theirs, gpu), name=cell.run_dir)
    process.start()
    theirs.close()
    return process, ours


def record_death(files: RunFiles, exitcode: int) -> None:
    """What a worker that said nothing died of."""
    if files.read().status == "missing":
        said = {"status": "failed", "error": cause_of_death(exitcode)}
        write_text(files.outcome, json.dumps(said) + "\n")


def work(run: RunConfig, identity: dict[str, str], files: RunFiles, line: Connection, gpu: int | None) -> None:
    """The life of a worker: one run. Whatever it says goes to its log."""
    threading.Thread(target=end_with_driver, args=(line,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for all its processes; the driver says when to stop
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with open(files.log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if gpu is not None:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[gpu] if given else str(gpu)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from lm.data.tokens import prepare
    from lm.training.callbacks import Interrupted
    from lm.training.train import train

    try:
        data = prepare(run.data, run.tokenizer)
        if (data.hash, data.tokenizer.hash) != (identity["data_hash"], identity["tokenizer_hash"]):
            raise BadInput("the text has changed since these runs were planned; the same command plans anew")
        if run.model.linear not in LINEARS and source_hash(source_files(run.model.linear)) != identity["source_hash"]:
            raise BadInput(
                "the code of model.linear has changed since these runs were planned; the same command plans anew"
            )
        train(run, data)
    except Interrupted as error:
        sys.exit(128 + error.signum)
    except Exception as error:
        traceback.print_exc()
        status = "diverged" if isinstance(error, Diverged) else "failed"
        kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
        reason = str(error).strip() or "no reason given"
        write_text(files.outcome, json.dumps({"status": status, "error": kind + reason.splitlines()[0]}) + "\n")
        sys.exit(1)


def end_with_driver(line: Connection) -> None:
    try:
        line.recv()
    except (EOFError, OSError):
        os._exit(1)
