"""Make runs, several at a time: by processes of this machine, tasks of Ray, jobs of Slurm.

The run's lock, its checkpoints and its result make runs safe to start again, here and by another driver. So an
executor need only start processes and say how they ended; retries and queues are those of Ray and Slurm.
"""

import importlib.util
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from lm.ablation.plan import RunSpec
from lm.ablation.run_files import Ending, Failure, describe_exit_code
from lm.ablation.worker import make_run, make_run_on_node
from lm.config import UserError
from lm.config.ablation import AblateConfig, SlurmConfig
from lm.system.device import cores
from lm.system.files import json_sha256

CANCEL_SECONDS = 60  # for runs to save a checkpoint
SHUTDOWN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what may be sent to all processes of a command
log = logging.getLogger(__name__)


class Executor(ABC):
    name: str

    @abstractmethod
    def __init__(self, config: AblateConfig, folder: Path) -> None:
        """Raises UserError if there is nothing to run on."""

    @abstractmethod
    def default_workers(self, threads: int) -> int:
        """How many runs of so many threads to make at a time, unless the user says."""

    @abstractmethod
    def submit(self, spec: RunSpec) -> None:
        """Start or queue a run. Raises UserError if it is not taken now."""

    @abstractmethod
    def poll(self) -> dict[str, Ending]:
        """Wait a moment; how runs have ended since the last call, by their run_dir.

        Raises UserError if a machine lacks what runs need.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End what is queued or running. A run has a minute to save a checkpoint."""


# --- processes of this machine

PROCESSES: Any = multiprocessing.get_context("forkserver")


class LocalExecutor(Executor):
    """Processes that are forked from a server, which has done the imports once.

    A worker holds the reading end of a pipe that only its driver holds open. When the driver ends, however it ends,
    the pipe closes and the worker ends too.
    """

    name = "local"

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        self.gpus = torch.cuda.device_count()
        self.running: dict[int, tuple[str, Any, Connection]] = {}  # slot -> name, process, pipe

    def default_workers(self, threads: int) -> int:
        return self.gpus or max(1, cores() // threads)

    def submit(self, spec: RunSpec) -> None:
        slot = next(slot for slot in range(len(self.running) + 1) if slot not in self.running)
        reader, writer = PROCESSES.Pipe(duplex=False)
        gpu = slot % self.gpus if self.gpus else None
        process = PROCESSES.Process(target=_run_in_process, args=(spec, reader, gpu), name=spec.run_dir)
        _start_server()
        process.start()
        self.running[slot] = spec.run_dir, process, writer
        reader.close()

    def poll(self) -> dict[str, Ending]:
        wait([process.sentinel for _, process, _ in self.running.values()], timeout=0.5)
        endings = {}
        for slot, (name, process, writer) in [*self.running.items()]:
            if process.exitcode is not None:
                del self.running[slot]
                writer.close()
                endings[name] = describe_exit_code(process.exitcode)
        return endings

    def cancel(self) -> None:
        for _, process, _ in self.running.values():
            process.terminate()
        deadline = time.monotonic() + CANCEL_SECONDS
        for _, process, writer in self.running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            writer.close()


def _start_server() -> None:
    """Start the server unless it runs.

    It and all that it forks block the signals of a shutdown: without the server, runs seem to have ended that still
    save their checkpoints. Runs unblock all but SIGINT: Ctrl-C is for the driver.
    """
    PROCESSES.set_forkserver_preload(["lm.training.train", "datasets"])
    multiprocessing.resource_tracker.ensure_running()  # the server would start it, and that unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_in_process(spec: RunSpec, reader: Connection, gpu: int | None) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(SHUTDOWN) - {signal.SIGINT})
    threading.Thread(target=_exit_with_driver, args=(reader,), daemon=True).start()
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    make_run(spec, LocalExecutor.name)


def _exit_with_driver(reader: Connection) -> None:
    try:
        reader.recv()
    except (EOFError, OSError):
        os._exit(1)


# --- Ray


class RayExecutor(Executor):
    """Tasks of a Ray cluster, each in a process of its own. Ray starts one again whose process or node is lost."""

    name = "ray"

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        _require("ray", self.name)
        import ray

        self.ray, self.running = ray, dict[Any, RunSpec]()  # by the reference to what the task returns
        self.function = ray.remote(max_calls=1, max_retries=2)(make_run_on_node)
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = config.ray.address
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except Exception as error:  # of many kinds, in several lines
            expected = "expected a running cluster, as `ray start --head` starts one"
            raise UserError(f"ray.address={address}: {str(error).strip().splitlines()[0]} {expected}") from error
        for signum, handler in handlers.items():
            signal.signal(signum, handler)

    def default_workers(self, threads: int) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)) // threads)

    def submit(self, spec: RunSpec) -> None:
        options = {"num_cpus": spec.threads, "num_gpus": spec.gpus, "name": spec.run_dir}
        self.running[self.function.options(**options).remote(spec, self.name, os.getcwd())] = spec

    def poll(self) -> dict[str, Ending]:
        ready, _ = self.ray.wait([*self.running], num_returns=len(self.running), timeout=0.5)
        return {self.running.pop(reference).run_dir: self._ending(reference) for reference in ready}

    def _ending(self, reference: Any) -> Ending:
        errors = self.ray.exceptions
        try:
            refusal = self.ray.get(reference)
        except errors.RayError as error:
            own = isinstance(error, errors.RayTaskError | errors.OutOfMemoryError)
            reason = str(error).strip().splitlines()[-1 if isinstance(error, errors.RayTaskError) else 0]
            return Ending(Failure.ERROR if own else Failure.KILLED, f"{type(error).__name__}: {reason}"[:300])
        if refusal:
            raise UserError(refusal)
        return Ending(None, "ended without a result")

    def cancel(self) -> None:
        for reference in self.running:
            self.ray.cancel(reference)  # raises KeyboardInterrupt there, on which a run saves a checkpoint
        if self.running:
            _, late = self.ray.wait([*self.running], num_returns=len(self.running), timeout=CANCEL_SECONDS)
            for reference in late:
                self.ray.cancel(reference, force=True)


# --- Slurm

OWN_FAULT = ("OUT_OF_MEMORY", "TIMEOUT")
ENDED = (*OWN_FAULT, "COMPLETED", "FAILED", "BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED")


class SlurmExecutor(Executor):
    """Jobs of Slurm, submitted by submitit, which queues a job again that reached its time limit or was preempted.

    A job's name says which run of which folder it is, and by `--dependency=singleton` Slurm starts no second job of a
    name before the first has ended, whichever driver submitted it. States come from squeue, for sacct needs accounting.
    """

    name = "slurm"

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        _require("submitit", self.name)
        import submitit

        self.settings, self.folder, self.running = config.slurm, folder.absolute(), dict[str, tuple[RunSpec, Any]]()
        try:
            self.submitter = submitit.SlurmExecutor(self.folder / ".slurm")
        except RuntimeError:
            raise UserError("executor=slurm: there is no srun here; expected a machine that submits to Slurm") from None

    def default_workers(self, threads: int) -> int:
        return 64

    def submit(self, spec: RunSpec) -> None:
        name = f"lm-{json_sha256(str(self.folder))[:8]}-{spec.run_dir.replace('/', '-')}"
        try:
            self.submitter.update_parameters(**job_parameters(name, spec.threads, spec.gpus, self.settings))
        except (ValueError, TypeError) as error:
            raise UserError(f"slurm.parameters: {str(error).splitlines()[0]}") from error
        try:
            job = self.submitter.submit(_ResumedRun(), spec, self.name, os.getcwd())
        except Exception as error:  # submitit's own, of what sbatch said
            raise UserError(f"executor=slurm: {str(error).strip().splitlines()[-1]}") from error
        self.running[job.job_id] = spec, job

    def poll(self) -> dict[str, Ending]:
        time.sleep(2)
        states = _job_states()
        if states is None:
            return {}
        endings = {}
        for number, (spec, job) in [*self.running.items()]:
            state, exit_code = states.get(number, ("gone from the queue", 0))
            if state in ENDED or number not in states:
                del self.running[number]
                endings[spec.run_dir] = self._ending(spec, job, state, exit_code)
        return endings

    def _ending(self, spec: RunSpec, job: Any, state: str, exit_code: int) -> Ending:
        if job.paths.result_pickle.exists():  # what make_run_on_node returned or raised
            if error := job.exception():
                return Ending(Failure.ERROR, str(error).strip().splitlines()[-1])
            if refusal := job.result():
                raise UserError(refusal)
        message = f"job {job.job_id} is {state}"
        if state == "FAILED":
            kind, reason = describe_exit_code(exit_code)
            has_begun = spec.files.where.exists()  # else Slurm has failed, as where a node lacks the folder
            return Ending(kind if has_begun else Failure.ERROR, f"{message}, {reason}")
        if state in OWN_FAULT:
            return Ending(Failure.ERROR, message)
        if state != "COMPLETED":
            return Ending(Failure.KILLED, message)
        return Ending(None, f"{message} without a result")

    def cancel(self) -> None:
        for _, job in self.running.values():
            job.cancel(check=False)
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline:
            states = _job_states()
            if states is not None and all(states.get(number, ENDED)[0] in ENDED for number in self.running):
                return
            time.sleep(1)


class _ResumedRun:
    """`make_run_on_node`, as submitit calls it; `checkpoint` makes it queue the run again at the job's time limit."""

    def __call__(self, *args: Any) -> str:
        return make_run_on_node(*args)

    def checkpoint(self, *args: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *args)


def job_parameters(name: str, threads: int, gpus: int, settings: SlurmConfig) -> dict[str, Any]:
    """The parameters of a job, as submitit names them. Whatever the user adds, no second job of a name starts."""
    parameters = dict(settings.parameters)
    additional = dict(parameters.pop("additional_parameters", None) or {})
    dependencies = [parameters.pop("dependency", None), additional.pop("dependency", None), "singleton"]
    additional["dependency"] = ",".join(filter(None, dependencies))  # all of them
    memory = settings.memory_gb and f"{1024 * settings.memory_gb:.0f}MB"
    own = {"job_name": name, "partition": settings.partition, "time": settings.minutes, "mem": memory}
    own |= {"ntasks_per_node": 1, "cpus_per_task": threads, "gpus_per_node": gpus or None}
    own = {key: value for key, value in own.items() if value is not None}
    return parameters | own | {"additional_parameters": additional}


def _job_states() -> dict[str, tuple[str, int]] | None:
    """The state and the exit code of each of the user's jobs; None if the controller does not answer: jobs go on."""
    command = ["squeue", f"--user={os.getuid()}", "--states=all", "--noheader"]
    answer = subprocess.run([*command, "--Format=JobID:20,State:30,exit_code:20"], capture_output=True, text=True)
    if answer.returncode:
        log.warning("executor=slurm: %s", answer.stderr.strip() or "squeue failed")
        return None
    rows = (line.split() for line in answer.stdout.splitlines())
    return {number: (state, os.waitstatus_to_exitcode(int(code))) for number, state, code in rows}


def _require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        advice = f'install it with `pip install "lm-lab[{extra}]"`'
        raise UserError(f"executor={extra}: the package {package} is missing; {advice}")


EXECUTORS: dict[str, type[Executor]] = {
    executor.name: executor for executor in (LocalExecutor, RayExecutor, SlurmExecutor)
}


# --- runs on an executor

MAX_TRIES = 2  # of a run whose process was killed: an arm must not lose a seed by an accident
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
    cancels what is queued or running and goes on to the caller. Raises UserError if the executor takes no run at all,
    or if a machine lacks what runs need.
    """
    waiting, running, tries = deque(specs), dict[str, RunSpec](), Counter[str]()
    refused = warned = False
    try:
        while waiting or running:
            while waiting and len(running) < workers and not refused:
                spec = waiting[0]
                try:
                    spec.files.run_dir.parent.mkdir(parents=True, exist_ok=True)
                    spec.files.status.unlink(missing_ok=True)
                    spec.files.where.unlink(missing_ok=True)
                    executor.submit(spec)
                except UserError as error:  # it takes no more now, as at a limit of queued jobs
                    if not running:
                        raise
                    if not warned:
                        log.warning("%s: %s; it is tried again when another run has ended", spec.run_dir, error)
                    refused = warned = True
                else:
                    running[spec.run_dir] = waiting.popleft()
            for name, ending in executor.poll().items():
                spec, refused = running.pop(name), False
                tries[name] += 1
                if _has_outcome(spec, ending, executor.name, may_retry=tries[name] < MAX_TRIES):
                    on_end(spec)
                else:
                    waiting.append(spec)
            on_poll(running.values())
    except BaseException:
        executor.cancel()
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
