"""Engines that carry out runs: the loop, what is told of an absent engine, and real clusters where there are."""

import contextlib
import csv
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Script
from test_plan import SMALL, question

from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.cells import Cell
from lm.ablation.run import workers
from lm.ablation.run.executors import EXECUTORS
from lm.ablation.run.executors.executor import Executor
from lm.ablation.run.executors.local import START, LocalExecutor, held
from lm.ablation.run.executors.ray import RayExecutor, cause
from lm.ablation.run.executors.slurm import read_jobs, request
from lm.ablation.run.task import Place, Task, task
from lm.ablation.run.workers import place_of, run_cells
from lm.ablation.run_files import Outcome, RunFiles, broke
from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import RunConfig, UserError
from lm.config.ablation import AblateConfig, SlurmConfig
from lm.system.files import write_json


class Listed(Executor):
    """Carries nothing out: it says that tasks have ended, as many as `lost` times each without an outcome."""

    kind = "local"

    def __init__(self, folder: Path, lost: int = 0, left: tuple[str, ...] = (), interrupt: bool = False) -> None:
        super().__init__(AblateConfig(ablation=question()), folder)
        self.lost, self.left, self.interrupt = lost, left, interrupt
        self.started: list[str] = []
        self.running: list[Task] = []
        self.most, self.cancelled = 0, 0
        self.room = 9  # how many it takes at a time

    def slots(self, threads: int) -> int:
        return 1

    def adopt(self, tasks: Iterable[Task]) -> list[Task]:
        self.running = [one for one in tasks if one.run_dir in self.left]
        return [*self.running]

    def start(self, task: Task) -> None:
        if len(self.running) >= self.room:
            raise UserError("too many jobs")
        assert task.run_dir not in [one.run_dir for one in self.running], "a second copy"
        self.started.append(task.run_dir)
        self.running.append(task)
        self.most = max(self.most, len(self.running))

    def poll(self) -> dict[str, str]:
        if self.interrupt:
            raise KeyboardInterrupt
        if not self.running:
            return {}
        task = self.running.pop(0)
        if self.started.count(task.run_dir) > self.lost:
            task.files.outcome.write_text('{"status": "diverged", "error": "nan"}')
        return {task.run_dir: "its node is gone"}

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    from hydra import initialize_config_dir

    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        run = compose("train", [], RunConfig)
    return [Cell("a", seed, 9, f"cells/a-seed{seed}-0", run, {}, {"device": "cpu"}) for seed in range(4)]


def carried_out(cells: list[Cell], executor: Listed) -> list[str]:
    found: list[str] = []
    run_cells(cells, executor.folder, executor, 2, lambda steps, ended: found.extend(ended))
    return found


def test_a_run_whose_process_was_lost_is_started_again(cells: list[Cell], tmp_path: Path) -> None:
    executor = Listed(tmp_path, lost=2)
    assert sorted(carried_out(cells, executor)) == [one.run_dir for one in cells]
    assert [executor.started.count(one.run_dir) for one in cells] == [3] * 4
    assert executor.most == 2
    executor = Listed(tmp_path, lost=3)
    assert sorted(carried_out(cells, executor)) == [one.run_dir for one in cells]
    assert RunFiles(tmp_path / cells[0].run_dir).read()[:2] == ("failed", "its node is gone")


def test_what_is_left_with_the_engine_is_waited_for_and_not_started(cells: list[Cell], tmp_path: Path) -> None:
    left = (cells[1].run_dir, cells[3].run_dir)
    for run_dir in left:  # which its worker may have written just now
        RunFiles(tmp_path / run_dir).outcome.parent.mkdir(exist_ok=True)
        RunFiles(tmp_path / run_dir).outcome.write_text('{"status": "diverged", "error": "before"}')
    executor = Listed(tmp_path, left=left)
    assert sorted(carried_out(cells, executor)) == [one.run_dir for one in cells]
    assert executor.started == [cells[0].run_dir, cells[2].run_dir]
    assert RunFiles(tmp_path / left[0]).read().status == "diverged"


@pytest.mark.slow
@pytest.mark.skipif(START != "forkserver", reason="needs a server that forks")
def test_a_run_is_started_though_the_server_of_the_processes_is_killed(cells: list[Cell], tmp_path: Path) -> None:
    executor = LocalExecutor(AblateConfig(ablation=question()), tmp_path)
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGSTOP)
    threading.Timer(0.1, os.kill, (server, signal.SIGKILL)).start()
    (tmp_path / "cells").mkdir()
    executor.start(task(cells[0], tmp_path, "local", None))
    (_, process, _), *others = executor.running.values()
    assert process.pid
    assert not others
    executor.cancel()


def test_an_interrupt_cancels_what_is_with_the_engine(cells: list[Cell], tmp_path: Path) -> None:
    executor = Listed(tmp_path, interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        carried_out(cells, executor)
    assert executor.cancelled == 1


def test_a_run_that_the_engine_refuses_waits_while_others_run(
    cells: list[Cell], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = Listed(tmp_path)
    executor.room = 1
    assert carried_out(cells, executor) == [one.run_dir for one in cells]
    assert (caplog.text.count("too many jobs"), executor.cancelled) == (1, 0)
    executor.room = 0
    with pytest.raises(UserError, match="too many jobs"):
        carried_out(cells, executor)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_file_that_cannot_be_read_for_a_moment_ends_nothing(
    comes_back: bool,
    cells: list[Cell],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = RunFiles(tmp_path / cells[0].run_dir)

    def read(self: RunFiles, read: Any = RunFiles.read) -> Outcome:
        if self.run_dir == first.run_dir and (not comes_back or len(waited) < 3):
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self)

    waited: list[float] = []
    monkeypatch.setattr(RunFiles, "read", read)
    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=waited.append))  # other threads may sleep meanwhile
    executor = Listed(tmp_path)
    assert sorted(carried_out(cells, executor)) == [one.run_dir for one in cells]
    assert (executor.cancelled, len(waited)) == (0, 3 if comes_back else workers.PATIENCE - 1)
    assert caplog.text.count("Stale file handle; it is read again") == 1


def test_a_node_that_lacks_what_runs_need_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = place_of(tmp_path)
    place.check()
    assert place_of(tmp_path) == place, "an earlier driver's jobs look for the same token"
    wrong: list[tuple[Place, str]] = [
        (replace(place, token="another"), f"output_dir={tmp_path}: is not the same folder on node "),
        (replace(place, output_dir="/nowhere"), "output_dir=/nowhere: is not the same folder on node "),
        (replace(place, cwd="/nowhere"), "/nowhere: No such file or directory on node "),
        (replace(place, source_hash="0"), "lm: the training code on node "),
        (replace(place, torch="1.0"), r"torch: version \d\S+ on node .*; expected the driver's, 1\.0"),
    ]
    for there, said in wrong:
        with pytest.raises(UserError, match=said):
            there.check()


@pytest.mark.parametrize("kind", ["ray", "slurm"])
def test_an_engine_that_is_absent_is_told(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=rf'executor={kind}: the package \w+ is missing; .*pip install "lm-lab\[{kind}\]"'
    ):
        EXECUTORS[kind](AblateConfig(ablation=question(), executor=kind), tmp_path)


@pytest.mark.parametrize("given", [{"job_name": "x"}, {"additional_parameters": {"job-name": "x"}}])
def test_a_job_keeps_the_name_by_which_it_is_found(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"slurm\.parameters\.job_name: expected no such key"):
        SlurmConfig(parameters=given)
    asked = request("ours", 2, 0, SlurmConfig())
    assert (asked["job_name"], asked["cpus_per_task"], asked["additional_parameters"]) == (
        "ours",
        2,
        {"dependency": "singleton"},
    )


def test_a_job_with_a_dependency_still_waits_for_the_others_of_its_name() -> None:
    further = {"dependency": "afterok:8", "reservation": "lab"}
    given = {"qos": "long", "dependency": "afterok:7", "additional_parameters": further}
    asked = request("ours", 2, 0, SlurmConfig(parameters=given))
    assert asked["qos"] == "long"
    assert asked["additional_parameters"] == {"dependency": "afterok:7,afterok:8,singleton", "reservation": "lab"}
    assert further["dependency"] == "afterok:8", "the settings are as they were for the next job"


def test_what_ray_says_of_a_process_decides_whose_fault_its_end_was() -> None:
    died = "The actor died unexpectedly before finishing this task.\n\tpid: 7\nWorker exit detail: "
    assert not broke("failed", cause(died + "Worker unexpectedly exits with a connection error code 2.", False))
    assert broke("failed", cause(died + "Worker exits with an exit code 3.", False))
    assert not broke("failed", cause(died + "Worker exits with an exit code 143.", False))
    assert broke("failed", cause("Memory on the node was too low.", True))


class NoLm(Exception):
    """Stands for Ray's own, which CI need not have: of a node on which a function cannot be unpickled."""


def test_a_node_on_which_lm_cannot_be_imported_is_named(tmp_path: Path) -> None:
    def get(answer: object) -> str:
        raise NoLm("System error\ntraceback:\nModuleNotFoundError: No module named 'lm'")

    executor = object.__new__(RayExecutor)
    nodes = [{"NodeID": "1", "NodeManagerHostname": "node7", "Alive": True}]
    known: Any = SimpleNamespace(nodes=lambda: nodes, get=get, exceptions=SimpleNamespace(RayError=NoLm))
    executor.ray = known
    executor.on_node = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"executor=ray: node node7 cannot .*No module named 'lm'"):
        executor.prepare(place_of(tmp_path))


def test_of_several_jobs_with_one_name_the_one_that_goes_on_counts() -> None:
    text = "7|FAILED|n1|lm-1-a\n8|PENDING||lm-1-a\n9|CANCELLED|n1|lm-1-a\n10|TIMEOUT|n2|lm-1-b\n11|RUNNING|n2|lm-2-a\n"
    assert read_jobs(text, "lm-1-") == {"lm-1-a": ("8", "PENDING", ""), "lm-1-b": ("10", "TIMEOUT", "n2")}


def test_a_row_says_where_its_run_was_made(tmp_path: Path) -> None:
    where = RunFiles(tmp_path / "cells/a-seed0-0").where
    where.parent.mkdir()
    assert Outcomes(tmp_path).where("cells/a-seed0-0") == {}
    write_json(where, {"executor": "ray", "host": "node7", "pid": 1})
    assert Outcomes(tmp_path).where("cells/a-seed0-0") == {"host": "node7", "executor": "ray"}


def test_a_run_whose_node_is_gone_is_no_failure_of_its_arm() -> None:
    assert not broke("failed", "lost: Slurm says NODE_FAIL on n1")
    assert broke("failed", "Slurm says OUT_OF_MEMORY on n1")


@contextlib.contextmanager
def node(*words: str) -> Iterator[None]:
    """A node of a Ray cluster, with one core."""
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    memory = ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*start, *memory, *words], **quiet)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def listening(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def scores(folder: Path) -> dict[str, Any]:
    results = {one.parent.name: json.loads(one.read_text()) for one in folder.glob("cells/*/result.json")}
    return {name: (result["val_loss"], result["config_hash"]) for name, result in results.items()}


@contextlib.contextmanager
def ray() -> Iterator[list[str]]:
    """A cluster of two nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short,  # for the names of Ray's sockets
        node("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={short}"),
    ):
        while not listening(port):
            time.sleep(0.5)
        with node(f"--address=127.0.0.1:{port}"):
            yield ["executor=ray", f"ray.address=127.0.0.1:{port}"]


@contextlib.contextmanager
def slurm() -> Iterator[list[str]]:
    """The cluster whose nodes see the temporary folders of this machine."""
    yield ["executor=slurm"]


NO_RAY, NO_SLURM = find_spec("ray") is None, find_spec("submitit") is None or shutil.which("sinfo") is None
ENGINES = [
    pytest.param(ray, marks=pytest.mark.skipif(NO_RAY, reason="needs the extra `ray`")),
    pytest.param(slurm, marks=pytest.mark.skipif(NO_SLURM, reason="needs the extra `slurm` and a cluster")),
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_gives_the_results_of_the_local_pool(
    engine: Callable[[], contextlib.AbstractContextManager[list[str]]], script: Script, corpus: Path, tmp_path: Path
) -> None:
    words = ["ablation=smoke", *SMALL, "tokenizer.vocab_size=null", f"data.path={corpus}"]
    with engine() as further:
        far = script("ablate", *words, "output_dir=far", *further)
    assert far.returncode == 0, far.stderr
    near = script("ablate", *words, "output_dir=near")
    assert near.returncode == 0, near.stderr
    assert scores(tmp_path / "far") == scores(tmp_path / "near") != {}
    with open(tmp_path / "far/results.csv", newline="") as file:
        assert {row["executor"] for row in csv.DictReader(file)} == {engine.__name__}


def test_ctrl_c_waits_until_a_process_has_started() -> None:
    def start_one() -> None:
        with held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)

    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        start_one()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
