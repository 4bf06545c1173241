"""Make runs, several at a time: by processes of this machine, tasks of Ray, jobs of Slurm.

The run's lock, its checkpoints and its result make runs safe to start again, here and by another driver. So an executor
need only start a run and say how it ended; retries and queues are those of Ray and Slurm.
"""

import importlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from lm.config import user_classes
from lm.errors import Diverged, UserError, first_line, missing_extra, named, without_secrets
from lm.lab.ablation.arms import code_hash
from lm.lab.ablation.forkserver import PROCESSES, warm_up
from lm.lab.ablation.plan import RunSpec
from lm.lab.ablation.question import AblateConfig, SlurmConfig
from lm.system.device import cores
from lm.system.files import json_sha256
from lm.system.signals import SHUTDOWN, Interrupted
from lm.system.terminal import MessageHandler

CRASHES = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")}
CANCEL_SECONDS = 60  # for runs to save a checkpoint

log = logging.getLogger(__name__)


class Ending(NamedTuple):
    """How a process or a job ended."""

    status: str  # failed, or killed: by a signal or with its node, at random, whatever the arm
    message: str


class Executor(Protocol):
    """Where runs are made. A handle is what the executor calls a run that it has started or queued."""

    name: str
    seconds: float  # between two questions about what has ended

    def __init__(self, config: AblateConfig, folder: Path) -> None: ...

    def default_workers(self, threads: int, needs_gpu: bool) -> int:
        """Return how many runs of so many threads it makes at a time."""

    def submit(self, spec: RunSpec) -> Any:
        """Start or queue a run and return its handle. Raises UserError."""

    def ended(self, handle: Any) -> Ending | None:
        """Return how a run ended; None if it has not."""

    def cancel(self, handle: Any) -> None:
        """Ask a run to end. It saves a checkpoint first."""


def execute(
    specs: Sequence[RunSpec],
    executor: Executor,
    workers: int,
    on_end: Callable[[RunSpec], None] = lambda spec: None,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Make each of these runs once, `workers` at a time.

    `on_end` is called with each of them, `on_poll` now and then. An interrupt cancels what is queued or running, and
    goes on to the caller. Raises UserError if the executor does not take a run, or if a machine lacks what runs need.
    """
    waiting, running = deque(specs), list[tuple[RunSpec, Any]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                spec = waiting.popleft()
                spec.files.run_dir.parent.mkdir(parents=True, exist_ok=True)
                spec.files.status.unlink(missing_ok=True)  # of an earlier try
                running.append((spec, executor.submit(spec)))
            time.sleep(executor.seconds)
            for spec, handle in [*running]:
                if (ending := executor.ended(handle)) is not None:
                    running.remove((spec, handle))
                    _write_ending(spec, ending, executor.name)
                    on_end(spec)
            on_poll()
    except BaseException:
        for _, handle in running:
            executor.cancel(handle)
        deadline = time.monotonic() + CANCEL_SECONDS
        while running and time.monotonic() < deadline:
            time.sleep(executor.seconds)
            running = [(spec, handle) for spec, handle in running if executor.ended(handle) is None]
        raise


def _write_ending(spec: RunSpec, ending: Ending, executor: str) -> None:
    """Write the status of a run whose process could not. Raises UserError if the run could not begin."""
    if spec.files.read().status != "missing":
        return
    if executor != "local" and ending.status != "killed" and not spec.files.log.exists():
        expected = "expected lm, Python and output_dir on all nodes as on this machine"
        raise UserError(f"executor={executor}: {spec.run_dir} could not begin ({ending.message}); {expected}")
    spec.files.write_status(*ending)


# --- processes of this machine


class Local(Executor):
    """Processes of this machine, which end with their driver, however it ends."""

    name, seconds = "local", 0.2

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        self.gpus = torch.cuda.device_count()
        self.slots = dict[int, Any]()  # slot -> its process; with GPUs a slot is a GPU

    def default_workers(self, threads: int, needs_gpu: bool) -> int:
        """Return one run for each GPU, or for each group of `threads` cores if runs need no GPU."""
        return self.gpus if needs_gpu else max(1, cores() // threads)

    def submit(self, spec: RunSpec) -> Any:
        warm_up()
        busy = {slot for slot, process in self.slots.items() if process.exitcode is None}
        slot = next(slot for slot in range(len(busy) + 1) if slot not in busy)
        gpu = slot % self.gpus if self.gpus else None
        process = PROCESSES.Process(target=_run_in_process, args=(spec, gpu), name=spec.run_dir)
        process.start()
        self.slots[slot] = process
        return process

    def ended(self, handle: Any) -> Ending | None:
        return None if handle.exitcode is None else describe_exit_code(handle.exitcode)

    def cancel(self, handle: Any) -> None:
        handle.terminate()


def describe_exit_code(code: int) -> Ending:
    """Return how a process ended. A code above 128 is 128 + signal: of a process that handled it, and of a shell."""
    signum = code - 128 if code > 128 else -code
    if signum in CRASHES:
        return Ending("failed", f"crashed by signal {signum}")
    if signum in signal.valid_signals():
        return Ending("killed", f"killed by signal {signum}")
    return Ending("failed", f"ended with exit code {code}")


def _run_in_process(spec: RunSpec, gpu: int | None) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SHUTDOWN} - {signal.SIGINT})
    threading.Thread(target=_exit_with_driver, daemon=True).start()
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    make_run(spec)


def _exit_with_driver() -> None:
    if driver := multiprocessing.parent_process():
        driver.join()  # reads a pipe that only the driver holds open
        os._exit(1)


# --- clusters


class Ray(Executor):
    """Tasks of a Ray cluster, each in a process of its own. Ray starts one again whose process or node is lost."""

    name, seconds = "ray", 0.5

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        self.ray = _imported("ray", self.name)
        self.function = self.ray.remote(max_calls=1, max_retries=2)(make_run_on_node)
        handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = config.ray.address
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level="error")
        except Exception as error:  # of many kinds, in several lines
            expected = "expected a running cluster, as `ray start --head` starts one"
            raise UserError(f"ray.address={address}: {first_line(error)} {expected}") from error
        signal.signal(signal.SIGTERM, handler)

    def default_workers(self, threads: int, needs_gpu: bool) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)) // threads)

    def submit(self, spec: RunSpec) -> Any:
        task = self.function.options(num_cpus=spec.threads, num_gpus=spec.gpus, name=spec.run_dir)
        return task.remote(spec, os.getcwd())

    def ended(self, handle: Any) -> Ending | None:
        errors = self.ray.exceptions
        try:
            self.ray.get(handle, timeout=0)
        except errors.GetTimeoutError:
            return None
        except errors.RayTaskError as error:
            return Ending("failed", _last_line(error))
        except errors.RayError as error:
            kind = "failed" if isinstance(error, errors.OutOfMemoryError) else "killed"
            return Ending(kind, named(error)[:300])
        return Ending("failed", "ended without a result")

    def cancel(self, handle: Any) -> None:
        self.ray.cancel(handle)  # raises KeyboardInterrupt there, on which a run saves a checkpoint


class Slurm(Executor):
    """Jobs of Slurm, submitted by submitit, which queues a job again that reached its time limit or was preempted.

    A job's name says which run of which folder it is, and by `--dependency=singleton` Slurm starts no second job of a
    name before the first has ended, whichever driver submitted it.
    """

    name, seconds = "slurm", 2.0

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        submitit = _imported("submitit", self.name)

        class Resumed(submitit.helpers.Checkpointable):  # type: ignore[name-defined]
            def __call__(self, *args: Any) -> None:
                make_run_on_node(*args)

        self.function, self.settings, self.folder = Resumed(), config.slurm, folder.absolute()
        try:
            self.submitter = submitit.SlurmExecutor(self.folder / ".slurm")
        except RuntimeError:
            raise UserError("executor=slurm: there is no srun here; expected a machine that submits to Slurm") from None
        accounting = subprocess.run(["sacct", "--noheader", "--jobs=1"], capture_output=True, text=True)
        if accounting.returncode:  # submitit would wait for ever for a job that was cancelled
            said = _last_line(accounting.stderr)
            raise UserError(f"executor=slurm: sacct says {said}; expected a cluster with accounting")

    def default_workers(self, threads: int, needs_gpu: bool) -> int:
        return 64

    def submit(self, spec: RunSpec) -> Any:
        name = f"lm-{json_sha256(str(self.folder))[:8]}-{spec.run_dir.replace('/', '-')}"
        try:
            self.submitter.update_parameters(**job_parameters(name, spec.threads, spec.gpus, self.settings))
        except (ValueError, TypeError) as error:
            raise UserError(f"slurm.parameters: {first_line(error)}") from error
        try:
            return self.submitter.submit(self.function, spec, os.getcwd())
        except Exception as error:  # submitit's own, of what sbatch said
            reason = _last_line(error)
            raise UserError(f"executor=slurm: {reason} (workers=N keeps fewer jobs in the queue)") from error

    def ended(self, handle: Any) -> Ending | None:
        if not handle.done():
            return None
        if handle.paths.result_pickle.exists():
            if (error := handle.exception()) is None:
                return Ending("failed", "ended")
            trace, _, _ = str(error).partition("You can check full logs")  # which submitit adds below its dashes
            return Ending("failed", _last_line(trace.rstrip("-\n ")))
        state = handle.state.split(" ")[0].rstrip("+")
        is_own = state in ("FAILED", "OUT_OF_MEMORY", "TIMEOUT")
        return Ending("failed" if is_own else "killed", f"job {handle.job_id} is {state}")

    def cancel(self, handle: Any) -> None:
        handle.cancel(check=False)


def job_parameters(name: str, threads: int, gpus: int, settings: SlurmConfig) -> dict[str, Any]:
    """Return the parameters of a job, as submitit names them. Whatever they are, no second job of a name starts."""
    additional = {**(settings.parameters.get("additional_parameters") or {}), "dependency": "singleton"}
    memory = settings.memory_gb and f"{1024 * settings.memory_gb:.0f}MB"
    own = {"job_name": name, "partition": settings.partition, "time": settings.minutes, "mem": memory}
    own |= {"ntasks_per_node": 1, "cpus_per_task": threads, "gpus_per_node": gpus or None}
    own = {key: value for key, value in own.items() if value is not None}
    return settings.parameters | own | {"additional_parameters": additional}


def _imported(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise missing_extra(f"executor={extra}", package, extra) from None


def _last_line(error: BaseException | str) -> str:
    return (str(error).strip() or "no reason given").splitlines()[-1]


EXECUTORS: dict[str, type[Executor]] = {kind.name: kind for kind in (Local, Ray, Slurm)}


# --- one run in a process of its own: the same function on every executor

CHANGED = "has changed since these runs were planned; the same command plans anew"


def make_run_on_node(spec: RunSpec, cwd: str) -> None:
    """`make_run` on another machine. Raises UserError, before the run begins, if it cannot be made there.

    Paths in settings are relative to `cwd`, the folder in which the driver was started.
    """
    node, folder = f"node {socket.gethostname()}", spec.files.run_dir.parent
    if not folder.is_dir():
        raise UserError(f"output_dir: {folder} is not on {node}; expected storage that all nodes share")
    try:
        os.chdir(cwd)
        code = code_hash(user_classes(spec.run.model))
    except (OSError, UserError) as error:
        raise UserError(f"{cwd}: cannot be used on {node} ({error}); expected a folder that all nodes share") from None
    if code != spec.identity["source_hash"]:
        raise UserError(
            f"lm: the training code on {node} differs from the code of the driver; install the same version there"
        )
    make_run(spec)


def make_run(spec: RunSpec) -> None:
    """Train the run in this process, which does nothing else. All that it prints goes to the log of the run.

    How it failed is written to its status file. Raises SystemExit or KeyboardInterrupt after a signal.
    """
    if not spec.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # submitit would ignore it
    with open(spec.files.log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    logging.basicConfig(level=logging.INFO, handlers=[MessageHandler()])
    log.info("process %d on %s", os.getpid(), socket.gethostname())
    try:
        _train(spec)
    except Interrupted as error:
        if error.signum == signal.SIGINT:
            raise KeyboardInterrupt from None  # with which Ray has cancelled the task, and by which it ends
        sys.exit(128 + error.signum)
    except Exception as error:
        print(without_secrets(traceback.format_exc()), file=sys.stderr)
        reason = first_line(error) if isinstance(error, UserError) else named(error)
        spec.files.write_status("diverged" if isinstance(error, Diverged) else "failed", reason)


def _train(spec: RunSpec) -> None:
    from lm.data.tokens import prepare
    from lm.training.run_directory import RunLocked
    from lm.training.train import train

    run, planned = spec.run, spec.identity
    data = prepare(run.data, run.tokenizer)
    if (data.hash, data.tokenizer.hash) != (planned["data_hash"], planned["tokenizer_hash"]):
        raise UserError(f"the text {CHANGED}")
    classes = user_classes(run.model)
    if classes and code_hash(classes) != planned["source_hash"]:
        raise UserError(f"the code of {', '.join(classes)} {CHANGED}")
    while True:
        try:
            train(run, data)
            return
        except RunLocked as error:  # by a process of an earlier driver, or of a node that was given up too early
            log.info("%s: waiting for it", error)
            time.sleep(5)
