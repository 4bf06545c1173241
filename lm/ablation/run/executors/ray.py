"""Actors of a Ray cluster: one process for each task, which makes its run while it is constructed and then ends.

An actor is detached, so it outlives its driver, and has the task's name, which Ray gives only once in a cluster.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm.ablation.run.executors.executor import Executor
from lm.ablation.run.task import Place, Task, work
from lm.ablation.run_files import LOST, cause_of_death
from lm.config import UserError
from lm.config.ablation import AblateConfig

NAMESPACE = "lm-lab"


class Worker:
    """The class of the actors."""

    def __init__(self, task: Task) -> None:
        import ray

        self.refused = ""
        try:
            work(task, node=ray.get_runtime_context().get_node_id())
        except UserError as error:
            self.refused = str(error)
            return
        sys.exit(0)  # what became of the run is in its files

    def refusal(self) -> str:
        """Answered only by an actor whose run could not begin: the others have ended."""
        return self.refused


class RayExecutor(Executor):
    kind = package = "ray"

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        super().__init__(config, folder)
        import ray

        self.ray, self.running = ray, dict[Any, Task]()  # by the answer of its actor
        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = config.ray.address
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        except Exception as error:  # of many kinds, in several lines
            expected = "expected a running cluster, as `ray start --head` starts one"
            raise UserError(f"ray.address={address}: {str(error).strip().splitlines()[0]} {expected}") from error
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def slots(self, threads: int) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)) // threads)

    def prepare(self, place: Place | None) -> None:
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        answers = [self.on_node(node["NodeID"], refusal_at, place) for node in alive]
        for node, answer in zip(alive, answers, strict=True):
            try:
                said = self.ray.get(answer)
            except self.ray.exceptions.RayError as error:  # such as lm missing there
                last = str(error).strip().splitlines()[-1]
                name = node["NodeManagerHostname"]
                raise UserError(f"executor=ray: node {name} cannot make runs ({last}); expected lm there") from error
            if said:
                raise UserError(said)

    def on_node(self, node: str, function: Any, *words: Any) -> Any:
        """Call a function in a process of its own on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return self.ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*words)

    def adopt(self, tasks: Iterable[Task]) -> list[Task]:
        left = set(self.ray.util.list_named_actors())
        found = [one for one in tasks if self.name(one) in left]
        for one in found:
            with contextlib.suppress(ValueError):  # it has ended since
                self.running[self.ray.get_actor(self.name(one)).refusal.remote()] = one
        return [*self.running.values()]

    def start(self, task: Task) -> None:
        asked = {"num_cpus": task.threads, "num_gpus": task.gpus, "max_restarts": 0}
        lasting = {"name": self.name(task), "lifetime": "detached", "get_if_exists": True}
        actor = self.ray.remote(Worker).options(**asked, **lasting).remote(task)
        self.running[actor.refusal.remote()] = task

    def poll(self) -> dict[str, str]:
        ready, _ = self.ray.wait([*self.running], num_returns=len(self.running), timeout=0.5)
        ended = {}
        for answer in ready:
            task = self.running.pop(answer)
            try:
                refused = self.ray.get(answer)
            except self.ray.exceptions.RayError as error:
                own = isinstance(error, self.ray.exceptions.OutOfMemoryError)
                ended[task.run_dir] = cause(str(error), own or getattr(error, "actor_init_failed", False))
            else:
                self.end(self.name(task))
                raise UserError(refused)
        return ended

    def cancel(self) -> None:
        until, running = time.monotonic() + 60, {self.name(task): task for task in self.running.values()}
        names = [name for name in self.ray.util.list_named_actors() if name.startswith(self.prefix)]
        for name in names:
            try:
                where = json.loads(running[name].files.where.read_text())
                self.on_node(where["node"], terminate, where["pid"])
            except (KeyError, OSError, ValueError):  # it is queued, or about to begin
                self.end(name)
        while time.monotonic() < until and {*self.ray.util.list_named_actors()} & {*names}:
            time.sleep(0.5)
        for name in names:
            self.end(name)

    def end(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            self.ray.kill(self.ray.get_actor(name))


def refusal_at(place: Place) -> str:
    try:
        place.check()
    except UserError as error:
        return str(error)
    return ""


def terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def cause(text: str, own: bool) -> str:
    """What ended an actor. `own`: Ray says that memory ran out or that the actor raised an exception.

    A crash by a signal and a kill are one to Ray, which sees that the process is gone.
    """
    if code := re.search(r"\bexit code (\d+)", text):
        return cause_of_death(int(code[1]))
    return reason(text) if own else f"{LOST} {reason(text)}"


def reason(text: str) -> str:
    """The line of Ray's message that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "node" in line.lower() or "exit" in line.lower()), lines[0])[:200]
