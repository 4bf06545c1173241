"""The loop that carries out runs, several at a time, on whatever engine."""

import json
import logging
import secrets
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from lm.ablation.plan.arms import Arm
from lm.ablation.plan.cells import Cell, cell
from lm.ablation.plan.source import source_files, source_hash
from lm.ablation.run.executors.executor import Executor
from lm.ablation.run.executors.local import PROCESSES, LocalExecutor, start
from lm.ablation.run.task import TOKEN, Place, Task, task
from lm.ablation.run_files import RunFiles
from lm.config import UserError
from lm.config.ablation import AblateConfig
from lm.system.files import write_text

Tick = Callable[[dict[str, int], list[str]], None]
PATIENCE = 120  # times half a second in which storage that has failed may come back
log = logging.getLogger(__name__)


def run_cells(cells: list[Cell], folder: Path, executor: Executor, workers: int, tick: Tick) -> None:
    """Run these cells to their end, `workers` at a time, each in its run_dir below `folder`.

    `tick` is called about twice a second with the steps that the running cells have made and the cells that have ended
    since, by run_dir. Cells that an earlier driver has left with the engine are waited for, not started again. On an
    interrupt what is queued or running is ended, and the interrupt goes on to the caller. Raises UserError if the
    engine refuses a cell while none is with it.
    """
    place = place_of(folder) if executor.remote else None
    tasks = {one.run_dir: task(one, folder, executor.kind, place) for one in cells}
    running, tries, refused = dict[str, Task](), Counter[str](), set[str]()
    unread, failures = dict[str, str](), Counter[str]()  # what ended runs of which it is not known yet how they ended
    full = False  # until one has ended: each submission that is refused costs the engine time and leaves files
    try:
        running |= {one.run_dir: one for one in executor.adopt(tasks.values())}
        waiting = deque(one for one in tasks.values() if one.run_dir not in running)
        while waiting or running:
            while waiting and len(running) < workers and not full:
                one = waiting[0]
                try:
                    begin(one, executor)
                except UserError as error:  # the engine takes no more now, as at a limit of queued jobs
                    if not running:
                        raise
                    if str(error) not in refused:
                        log.warning("%s: %s; it is tried again when another has ended", one.run_dir, error)
                    refused.add(str(error))
                    full = True
                else:
                    running[one.run_dir] = waiting.popleft()
            ended = list[str]()
            unread |= executor.poll()
            for run_dir, cause in [*unread.items()]:
                try:
                    silent = running[run_dir].files.read().status == "missing"
                except OSError as error:  # it must not end the others
                    failures[run_dir] += 1
                    if failures[run_dir] == 1:
                        log.warning("%s: %s; it is read again for a minute", run_dir, error)
                    if failures[run_dir] < PATIENCE:
                        continue
                    silent = False  # whoever reads it next says what is wrong
                one = running.pop(run_dir)
                del unread[run_dir]
                full = False
                tries[run_dir] += 1
                if silent and tries[run_dir] <= executor.retries:
                    log.info("%s: %s; it is started again", run_dir, cause)
                    waiting.append(one)
                    continue
                if silent:
                    write_text(one.files.outcome, json.dumps({"status": "failed", "error": cause}) + "\n")
                ended.append(run_dir)
            tick({run_dir: steps(one.files) for run_dir, one in running.items()}, ended)
            if unread:
                time.sleep(0.5)
    finally:
        if running:
            executor.cancel()


def begin(task: Task, executor: Executor) -> None:
    task.files.run_dir.parent.mkdir(parents=True, exist_ok=True)
    for file in (task.files.outcome, task.files.where):
        file.unlink(missing_ok=True)
    executor.start(task)


def place_of(folder: Path) -> Place:
    """Of a driver in this process. The token stays, for what an earlier driver has left queued looks for it too."""
    token = folder / TOKEN
    if not token.exists():
        write_text(token, secrets.token_hex())
    files = source_hash(source_files())
    return Place(str(folder.resolve()), token.read_text(), str(Path.cwd()), files, str(torch.__version__))


def measure_startup(arm: Arm, config: AblateConfig) -> float:
    """Seconds of a run beyond its steps (process, model, samples, saving), from a real one that leaves nothing."""
    log.info("measuring what a run takes beyond its steps")
    with suppress(EOFError, ConnectionError):  # the server was killed; the run below starts another
        first = PROCESSES.Process(target=int)  # waits until the server of the workers has done its imports
        start(first)
        first.join()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run_cells([cell(arm, 0, 1, {})], Path(folder), LocalExecutor(config, Path(folder)), 1, lambda *_: None)
        return max(0.0, time.perf_counter() - started - arm.seconds(1))


def steps(files: RunFiles) -> int:
    """For a progress bar, which must not end the ablation."""
    with suppress(OSError):
        return files.steps()
    return 0
