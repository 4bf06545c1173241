"""Processes of this machine.

They are forked from a server that has done the imports once. A worker holds the reading end of a pipe that only its
driver holds open: when the driver ends, however it ends, the pipe closes and the worker with it.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from lm.ablation.run.executors.executor import Executor
from lm.ablation.run.task import Place, Task, work
from lm.ablation.run_files import cause_of_death
from lm.config.ablation import AblateConfig
from lm.system.device import cores

START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PROCESSES: Any = multiprocessing.get_context(START)


class LocalExecutor(Executor):
    kind, remote, retries = "local", False, 0

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.gpus = torch.cuda.device_count()
        self.running: dict[int, tuple[str, Any, Connection]] = {}  # by slot: run_dir, process, line

    def prepare(self, place: Place | None) -> None:
        if START == "forkserver":  # the server imports while the driver plans
            PROCESSES.set_forkserver_preload(["lm.training.train", "datasets"])
        start_server()

    def slots(self, threads: int) -> int:
        return self.gpus or max(1, cores() // threads)

    def start(self, task: Task) -> None:
        try:
            self.fork(task)
        except (EOFError, ConnectionError):  # the server was killed; another is started when it has ended
            time.sleep(1)
            self.fork(task)

    def fork(self, task: Task) -> None:
        slot = next(slot for slot in range(len(self.running) + 1) if slot not in self.running)
        theirs, ours = PROCESSES.Pipe(duplex=False)
        gpu = slot % self.gpus if self.gpus else None
        process = PROCESSES.Process(target=work_here, args=(task, theirs, gpu), name=task.run_dir)
        start(process)
        theirs.close()
        self.running[slot] = task.run_dir, process, ours

    def poll(self) -> dict[str, str]:
        wait([process.sentinel for _, process, _ in self.running.values()], timeout=0.5)
        ended = {}
        for slot, (run_dir, process, line) in [*self.running.items()]:
            if (code := process.exitcode) is not None:
                del self.running[slot]
                line.close()
                ended[run_dir] = cause_of_death(code)
        return ended

    def cancel(self) -> None:
        for _, process, _ in self.running.values():
            process.terminate()  # each saves a checkpoint and stops
        for _, process, line in self.running.values():
            process.join(60)
            line.close()  # ends what still runs


def start_server() -> None:
    """Start the server of processes, which like all that it forks never gets SIGINT: Ctrl-C is for the driver."""
    if START == "forkserver":
        multiprocessing.resource_tracker.ensure_running()  # for the server; it would let SIGINT through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(process: Any) -> None:
    start_server()
    with held():
        process.start()


@contextmanager
def held() -> Iterator[None]:
    """Delay signals until the end of the context, so that no process is half started.

    A signal mask would not do: it applies to one thread, and the kernel may deliver a signal to a library's thread.
    """
    came: list[int] = []
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heard = [one for one, handler in handlers.items() if callable(handler)]
    if threading.current_thread() is not threading.main_thread():  # where no handler runs, and none can be set
        heard = []
    for signum in heard:
        signal.signal(signum, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for signum in heard:
            signal.signal(signum, handlers[signum])
        for number in came[:1]:
            signal.raise_signal(number)


def work_here(task: Task, line: Connection, gpu: int | None) -> None:
    threading.Thread(target=end_with_driver, args=(line,), daemon=True).start()
    if gpu is not None:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[gpu] if given else str(gpu)
    work(task)


def end_with_driver(line: Connection) -> None:
    try:
        line.recv()
    except (EOFError, OSError):
        os._exit(1)
