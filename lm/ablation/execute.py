"""Make runs, several at a time, on an executor."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from lm.ablation.executors import Executor
from lm.ablation.plan import RunSpec
from lm.ablation.run_files import Ending, Failure
from lm.config import UserError

MAX_TRIES = 2  # of a run whose process was killed: an arm must not lose a seed by an accident
CANCEL_SECONDS = 60  # for runs to save a checkpoint
log = logging.getLogger(__name__)


def execute(
    specs: Sequence[RunSpec],
    executor: Executor,
    workers: int,
    on_end: Callable[[RunSpec], None] = lambda spec: None,
    on_poll: Callable[[Collection[RunSpec]], None] = lambda running: None,
) -> None:
    """Make these runs, `workers` at a time, until each has finished, failed or diverged.

    `on_end` is called with each of them, `on_poll` about twice a second with those that are running. An interrupt
    cancels what is queued or running and goes on to the caller. Raises UserError if the executor does not take a run,
    or if a machine lacks what runs need.
    """
    waiting, running, tries = deque(specs), dict[str, RunSpec](), Counter[str]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                spec = waiting.popleft()
                spec.files.run_dir.parent.mkdir(parents=True, exist_ok=True)
                for file in (spec.files.status, spec.files.where):  # of an earlier try
                    file.unlink(missing_ok=True)
                executor.submit(spec)
                running[spec.run_dir] = spec
            for name, ending in executor.poll().items():
                spec = running.pop(name)
                tries[name] += 1
                if _has_outcome(spec, ending, executor.name, may_retry=tries[name] < MAX_TRIES):
                    on_end(spec)
                else:
                    waiting.append(spec)
            on_poll(running.values())
    except BaseException:
        executor.cancel()
        deadline = time.monotonic() + CANCEL_SECONDS
        while running and time.monotonic() < deadline:
            for name in executor.poll():
                running.pop(name, None)
        raise


def _has_outcome(spec: RunSpec, ending: Ending, executor: str, may_retry: bool) -> bool:
    """Whether the run need not be tried again. Its status is written where its process could not."""
    if spec.files.read().status != "missing":
        return True
    if executor != "local" and ending.kind != Failure.KILLED and not spec.files.where.exists():
        expected = "expected lm, Python and output_dir on all nodes as on this machine"
        raise UserError(f"executor={executor}: {spec.run_dir} could not begin ({ending.message}); {expected}")
    if ending.kind != Failure.ERROR and may_retry:
        log.info("%s: %s; it is started again", spec.run_dir, ending.message)
        return False
    spec.files.write_status("failed", ending.kind or Failure.ERROR, ending.message)
    return True
