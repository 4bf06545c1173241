"""Make runs, several at a time, on an executor."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lm.ablation.executors import Executor
from lm.ablation.plan.cells import Cell
from lm.ablation.run_files import Ending, Failure
from lm.ablation.worker import Task, task_of
from lm.config import BadInput

MAX_TRIES = 2  # of a run whose process was killed: an arm must not lose a seed by an accident
OnProgress = Callable[[dict[str, int], list[str]], None]
log = logging.getLogger(__name__)


def execute(cells: Sequence[Cell], folder: Path, executor: Executor, workers: int, on_progress: OnProgress) -> None:
    """Make these runs below `folder`, `workers` at a time, until each has finished, failed or diverged.

    `on_progress` is called about twice a second with the steps that the running ones have made and those that have
    ended since, both by run_dir. An interrupt cancels what is queued or running and goes on to the caller. Raises
    BadInput if the executor takes no run at all, or if a machine lacks what runs need.
    """
    waiting = deque(task_of(cell, folder, executor.name) for cell in cells)
    running, tries = dict[str, Task](), Counter[str]()
    refused = warned = False
    try:
        while waiting or running:
            while waiting and len(running) < workers and not refused:
                task = waiting[0]
                try:
                    _submit(task, executor)
                except BadInput as error:  # it takes no more now, as at a limit of queued jobs
                    if not running:
                        raise
                    if not warned:
                        log.warning("%s: %s; it is tried again when another run has ended", task.name, error)
                    refused = warned = True
                else:
                    running[task.name] = waiting.popleft()
            ended = []
            for name, ending in executor.poll().items():
                task, refused = running.pop(name), False
                tries[name] += 1
                if _has_outcome(task, ending, may_retry=tries[name] < MAX_TRIES):
                    ended.append(name)
                else:
                    waiting.append(task)
            on_progress({name: _steps(task) for name, task in running.items()}, ended)
    except BaseException:
        executor.cancel()
        raise


def _submit(task: Task, executor: Executor) -> None:
    task.files.run_dir.parent.mkdir(parents=True, exist_ok=True)
    task.files.status.unlink(missing_ok=True)
    task.files.where.unlink(missing_ok=True)
    executor.submit(task)


def _has_outcome(task: Task, ending: Ending, may_retry: bool) -> bool:
    """Whether the run need not be tried again. Its status is written where its process could not."""
    if task.files.read().status != "missing":
        return True
    if task.executor != "local" and ending.kind != Failure.KILLED and not task.files.where.exists():
        expected = "expected lm, Python and output_dir on all nodes as on this machine"
        raise BadInput(f"executor={task.executor}: {task.name} could not begin ({ending.message}); {expected}")
    if ending.kind != Failure.ERROR and may_retry:
        log.info("%s: %s; it is started again", task.name, ending.message)
        return False
    task.files.write_status("failed", ending.kind or Failure.ERROR, ending.message)
    return True


def _steps(task: Task) -> int:
    with suppress(OSError):  # it is only for a bar
        return task.files.steps()
    return 0
