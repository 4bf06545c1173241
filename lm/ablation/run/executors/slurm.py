"""Jobs of Slurm, submitted by submitit, which also queues a job again that reached its time limit or was preempted.

A job's name says which task of which folder it is. The queue itself is therefore the record of what an earlier driver
has left there, and `--dependency=singleton` lets Slurm start no second job of a name before the first has ended.
"""

import contextlib
import getpass
import logging
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm.ablation.run.executors.executor import Executor
from lm.ablation.run.task import Task, work
from lm.ablation.run_files import LOST
from lm.config import UserError
from lm.config.ablation import AblateConfig, SlurmConfig

PERIOD = 2.0  # seconds between two looks at the queue
OWN_FAULT = ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT")
ENDED = (*OWN_FAULT, "BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED")
Jobs = dict[str, tuple[str, str, str]]  # name -> id, state, node
log = logging.getLogger(__name__)


class Resumed:
    """`work`, as submitit calls it; `checkpoint` makes it queue the same task again at the job's time limit."""

    def __call__(self, task: Task) -> None:
        work(task)

    def checkpoint(self, task: Task) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task)


class SlurmExecutor(Executor):
    kind, package = "slurm", "submitit"

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        super().__init__(config, folder)
        import submitit

        self.running: dict[str, Task] = {}  # by name
        self.ids: dict[str, str] = {}  # of jobs that this driver has submitted, by name
        try:
            self.submitter = submitit.SlurmExecutor(folder.resolve() / ".slurm")
        except RuntimeError:
            raise UserError("executor=slurm: there is no srun here; expected a machine that submits to Slurm") from None
        queue()  # raises what is wrong with the cluster

    def slots(self, threads: int) -> int:
        return 64

    def adopt(self, tasks: Iterable[Task]) -> list[Task]:
        left = {name for name, (_, state, _) in self.jobs().items() if state not in ENDED}
        found = {self.name(one): one for one in tasks if self.name(one) in left}
        self.running |= found
        return list(found.values())

    def start(self, task: Task) -> None:
        name = self.name(task)
        try:
            self.submitter.update_parameters(**request(name, task.threads, task.gpus, self.config.slurm))
        except (ValueError, TypeError) as error:
            raise UserError(f"slurm.parameters: {str(error).splitlines()[0]}") from error
        try:
            self.ids[name] = self.submitter.submit(Resumed(), task).job_id
        except Exception as error:  # submitit's own, of what sbatch said
            raise UserError(f"executor=slurm: {str(error).strip().splitlines()[-1]}") from error
        self.running[name] = task

    def poll(self) -> dict[str, str]:
        time.sleep(PERIOD)
        try:
            jobs = self.jobs()
        except UserError as error:  # the controller is away: jobs go on without it
            log.warning("%s", error)
            return {}
        ended = {}
        for name, task in [*self.running.items()]:
            _, state, node = jobs.get(name, ("", "gone from the queue", ""))
            if state in ENDED or name not in jobs:
                del self.running[name]
                self.refuse_silence(name, task, state, node)
                said = f"Slurm says {state}{f' on {node}' * bool(node)}"
                ended[task.run_dir] = said if state in OWN_FAULT else f"{LOST} {said}"
        return ended

    def refuse_silence(self, name: str, task: Task, state: str, node: str) -> None:
        """Raise UserError if a job of ours ran and its task has not even begun. Else remove the job's own files."""
        number = self.ids.pop(name, None)
        files = [*(Path(self.submitter.folder)).glob(f"{number}_*")] if number else []
        if number and state in ("FAILED", "COMPLETED") and not task.files.where.exists():
            logs = [line for one in files if one.suffix == ".err" for line in one.read_text().splitlines() if line]
            said = logs[-1].partition("UserError: ")[2] or logs[-1] if logs else "nothing was written to output_dir"
            raise UserError(
                f"output_dir={self.folder}: job {number} on node {node} could not begin ({said}); "
                "expected storage, Python and lm that all nodes share"
            )
        for one in files:
            one.unlink(missing_ok=True)
        for link in Path(self.submitter.folder).glob(".submission_file_*"):
            if not link.exists():  # what it points to is gone
                link.unlink(missing_ok=True)

    def cancel(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(UserError):  # the controller is away
                left = [number for number, state, _ in self.jobs().values() if state not in ENDED]
                if not left:
                    return
                subprocess.run(["scancel", *left], capture_output=True)
            time.sleep(1)

    def jobs(self) -> Jobs:
        """The jobs of this folder. Of several with one name the one that has not ended, else the newest."""
        return read_jobs(queue(), self.prefix)


def request(name: str, threads: int, gpus: int, asked: SlurmConfig) -> dict[str, Any]:
    """The parameters of a job, as submitit names them. Whatever the user adds, no second job of a name starts."""
    ours: dict[str, Any] = {"job_name": name, "partition": asked.partition, "time": asked.minutes}
    ours |= {"mem": asked.memory_gb and f"{1024 * asked.memory_gb:.0f}MB"}
    ours |= {"ntasks_per_node": 1, "cpus_per_task": threads, "gpus_per_node": gpus or None}
    theirs = dict(asked.parameters)
    further = dict(theirs.pop("additional_parameters", None) or {})
    waits = [theirs.pop("dependency", None), further.pop("dependency", None), "singleton"]
    further["dependency"] = ",".join(dict.fromkeys(one for one in waits if one))  # all of them
    ours["additional_parameters"] = further
    return theirs | {key: value for key, value in ours.items() if value is not None}


def queue() -> str:
    line = ["squeue", f"--user={getpass.getuser()}", "--states=all", "--noheader", "--format=%A|%T|%N|%j"]
    found = subprocess.run(line, capture_output=True, text=True)
    if found.returncode:
        raise UserError(f"executor=slurm: {found.stderr.strip() or 'squeue failed'}")
    return found.stdout


def read_jobs(text: str, prefix: str) -> Jobs:
    rows = [line.split("|", 3) for line in text.splitlines()]
    mine = [row for row in rows if len(row) == 4 and row[3].startswith(prefix)]
    mine.sort(key=lambda row: (row[1] not in ENDED, int(row[0])))
    return {name: (number, state, node) for number, state, node, name in mine}
