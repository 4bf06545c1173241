"""Executors and the loop that makes runs on them; real processes, and real clusters where there are any."""

import contextlib
import csv
import json
import logging
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import Script

from lm.ablation import worker
from lm.ablation.executors import EXECUTORS, Executor, execute, job_parameters
from lm.ablation.plan import RunSpec
from lm.ablation.run_files import Ending, Failure, RunFiles
from lm.ablation.worker import make_run_on_node
from lm.config import RunConfig, UserError
from lm.config.ablation import AblateConfig, SlurmConfig
from tests.helpers.ablations import SMALL, question
from tests.helpers.runs import composed, wait_for

KILLED, ERROR = Ending(Failure.KILLED, "its node is gone"), Ending(Failure.ERROR, "exit code 127")


class Scripted(Executor):
    """Makes nothing: of each run it says how its tries end, the last of them with divergence if `ends` is short."""

    name = "local"

    def __init__(self, *ends: Ending, room: int = 9, interrupt: bool = False, begins: bool = True) -> None:
        self.ends, self.room, self.interrupt, self.begins = ends, room, interrupt, begins
        self.submitted: list[str] = []
        self.running: list[RunSpec] = []
        self.most_running = self.n_cancelled = 0

    def default_workers(self, threads: int) -> int:
        return 1

    def submit(self, spec: RunSpec) -> None:
        if len(self.running) >= self.room:
            raise UserError("too many jobs")
        self.submitted.append(spec.run_dir)
        self.running.append(spec)
        self.most_running = max(self.most_running, len(self.running))

    def poll(self) -> dict[str, Ending]:
        if self.interrupt:
            raise KeyboardInterrupt
        spec = self.running.pop(0)
        if self.begins:
            spec.files.where.write_text("{}")
        tries = self.submitted.count(spec.run_dir)
        if tries > len(self.ends):
            spec.files.write_status("diverged", "error", "nan")
        return {spec.run_dir: self.ends[min(tries, len(self.ends)) - 1] if self.ends else Ending(None, "")}

    def cancel(self) -> None:
        self.n_cancelled += 1


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return composed()


@pytest.fixture
def planned(run: RunConfig, tmp_path: Path) -> list[RunSpec]:
    names = [f"cells/a-seed{seed}-0" for seed in range(4)]
    runs = [replace(run, run_dir=str(tmp_path / name)) for name in names]
    about: dict[str, Any] = {"purpose": "reported", "arm": "a", "steps": 9, "identity": {"device": "cpu"}}
    return [RunSpec(seed=seed, run_dir=names[seed], run=runs[seed], **about) for seed in range(4)]


def executed(planned: list[RunSpec], executor: Executor) -> list[str]:
    ended: list[str] = []
    execute(planned, executor, 2, lambda spec: ended.append(spec.run_dir))
    return ended


def test_a_killed_run_is_tried_again_and_a_failed_one_is_not(planned: list[RunSpec], tmp_path: Path) -> None:
    for ends, n_tries, kind in [((KILLED,), 2, "error"), ((KILLED,) * 2, 2, "killed"), ((ERROR,), 1, "error")]:
        executor = Scripted(*ends)
        assert sorted(executed(planned, executor)) == [spec.run_dir for spec in planned]
        assert [executor.submitted.count(spec.run_dir) for spec in planned] == [n_tries] * 4
        assert (executor.most_running, executor.n_cancelled) == (2, 0)
        outcome = RunFiles(tmp_path / planned[0].run_dir).read()
        assert (outcome.status, outcome.kind) == ("failed" if len(ends) == n_tries else "diverged", kind)


def test_what_ends_the_loop_cancels_what_is_queued_or_running(planned: list[RunSpec], tmp_path: Path) -> None:
    interrupted, absent = Scripted(interrupt=True), Scripted(ERROR, begins=False)
    absent.name = "slurm"
    with pytest.raises(KeyboardInterrupt):
        executed(planned, interrupted)
    with pytest.raises(UserError, match=r"cells/a-seed0-0 could not begin \(exit code 127\)"):
        executed(planned, absent)
    assert interrupted.n_cancelled == absent.n_cancelled == 1


def test_a_refused_run_waits_for_others(
    planned: list[RunSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = Scripted(room=1)
    assert executed(planned, executor) == [spec.run_dir for spec in planned]
    assert (caplog.text.count("too many jobs"), executor.n_cancelled) == (1, 0)
    with pytest.raises(UserError, match="too many jobs"):
        executed(planned, Scripted(room=0))


def test_the_log_of_a_run_gives_no_access(planned: list[RunSpec]) -> None:
    """A message and a traceback of an address with a password."""
    (spec := planned[0]).files.run_dir.parent.mkdir()
    process = multiprocessing.get_context("fork").Process(target=make_failing_run, args=(spec,))
    process.start()
    process.join()
    text = spec.files.log.read_text()
    assert "https://host/a.txt: is read" in text
    assert "OSError: https://host/a.txt: is not there" in text
    assert "PASSWORD" not in text


def make_failing_run(spec: RunSpec) -> None:
    def fail(_: RunSpec) -> None:
        worker.log.info("https://me:PASSWORD@host/a.txt: is read")
        raise OSError("https://me:PASSWORD@host/a.txt: is not there")

    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  not that of pytest, nor its handlers
    for name in (None, "lm"):
        logging.getLogger(name).handlers.clear()
    worker._train = fail
    worker.make_run(spec, "local")


def test_a_node_that_lacks_what_runs_need_is_named(planned: list[RunSpec], tmp_path: Path) -> None:
    spec, other = planned[0], replace(planned[0], identity={"device": "cpu", "source_hash": "0"})
    absent = f"output_dir: {tmp_path / 'cells'} is not on node {socket.gethostname()}"
    assert make_run_on_node(spec, "ray", os.getcwd()).startswith(absent)
    (tmp_path / "cells").mkdir()
    assert make_run_on_node(spec, "ray", "/nowhere").startswith("/nowhere: cannot be used on node ")
    assert make_run_on_node(other, "ray", os.getcwd()).startswith("lm: the training code on node ")
    assert not list((tmp_path / "cells").iterdir()), "no run has begun"


def test_an_absent_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    for name in ("ray", "slurm"):
        with pytest.raises(UserError, match=rf"executor={name}: .*lm-lab\[{name}\]"):
            EXECUTORS[name](AblateConfig(ablation=question(), executor=name), tmp_path)


def test_whatever_the_user_adds_no_second_job_of_a_name_starts() -> None:
    for given in ({"job_name": "x"}, {"additional_parameters": {"job-name": "x"}}):
        with pytest.raises(UserError, match=r"slurm\.parameters\.job_name"):
            SlurmConfig(parameters=given)
    additional = {"dependency": "afterok:8", "reservation": "lab"}
    settings = SlurmConfig(parameters={"qos": "long", "dependency": "afterok:7", "additional_parameters": additional})
    parameters = job_parameters("run", 2, 0, settings)
    assert (parameters["job_name"], parameters["cpus_per_task"], parameters["qos"]) == ("run", 2, "long")
    dependency = "afterok:7,afterok:8,singleton"
    assert parameters["additional_parameters"] == {"dependency": dependency, "reservation": "lab"}


@contextlib.contextmanager
def ray(folder: Path) -> Iterator[list[str]]:
    """A cluster of two nodes, of which one is killed as soon as two runs train."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    second = cluster.add_node(**options)

    def kill() -> None:
        wait_for(lambda: sum(RunFiles(path).steps() > 5 for path in folder.glob("cells/*-*[0-9a-f]")) == 2, 200)
        cluster.remove_node(second, allow_graceful=False)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield ["executor=ray", f"ray.address={cluster.address}"]
    finally:
        thread.join()
        cluster.shutdown()


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[list[str]]:
    """The cluster whose nodes see the temporary folders of this machine. A job is cancelled."""

    def cancel() -> None:
        wait_for(lambda: any(RunFiles(path).steps() > 5 for path in folder.glob("cells/*-*[0-9a-f]")), 200)
        running = subprocess.run(["squeue", "-h", "-t", "R", "-o", "%A"], capture_output=True, text=True).stdout
        subprocess.run(["scancel", running.split()[0]], check=True)

    thread = threading.Thread(target=cancel)
    thread.start()
    yield ["executor=slurm"]
    thread.join()


NO_RAY, NO_SLURM = find_spec("ray") is None, find_spec("submitit") is None or shutil.which("sinfo") is None
CLUSTERS = [
    pytest.param(ray, marks=pytest.mark.skipif(NO_RAY, reason="needs the extra `ray`")),
    pytest.param(slurm, marks=pytest.mark.skipif(NO_SLURM, reason="needs the extra `slurm` and a cluster")),
]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_that_loses_a_run_gives_the_results_of_this_machine(
    cluster: Callable[[Path], Any], script: Script, corpus: Path, tmp_path: Path
) -> None:
    words = ["ablation=smoke", *SMALL, "tokenizer.vocab_size=null", f"data.path={corpus}", "trainer.max_steps=400"]
    with cluster(tmp_path / "remote") as overrides:
        remote = script("ablate", *words, "output_dir=remote", *overrides)
    assert remote.returncode == 0, remote.stderr
    assert script("ablate", *words, "output_dir=local").returncode == 0
    assert scores(tmp_path / "remote") == scores(tmp_path / "local") != {}
    with open(tmp_path / "remote/results.csv", newline="") as file:
        assert {row["executor"] for row in csv.DictReader(file)} == {cluster.__name__}


def scores(folder: Path) -> dict[str, Any]:
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("cells/*/result.json")}
    return {name: (result["val_loss"], result["config_hash"]) for name, result in results.items()}
