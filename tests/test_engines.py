"""Engines and the loop that makes runs on them; real processes, and real clusters where there are any."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from lm.config import RunConfig
from lm.lab.ablation import execute as engines
from lm.lab.ablation.execute import EXECUTORS, Ending, Executor, execute, job_parameters, make_run_on_node
from lm.lab.ablation.folder import RunFiles
from lm.lab.ablation.plan import RunSpec
from lm.lab.ablation.question import AblateConfig, SlurmConfig
from lm.system.files import sha256
from tests.helpers.ablation_folder import question
from tests.helpers.ablations import SMALL
from tests.helpers.refusals import refused
from tests.helpers.runs import wait_for

KILLED, ERROR = Ending("killed", "its node is gone"), Ending("failed", "exit code 127")


class Scripted(Executor):
    """Makes nothing: it says of each run that it ended so."""

    name, seconds = "local", 0.0

    def __init__(self, end, begins=True):
        self.end, self.begins = end, begins
        self.submitted = []
        self.running = []
        self.cancelled = []
        self.most_running = 0

    def submit(self, spec):
        self.submitted.append(spec.run_dir)
        self.running.append(spec)
        self.most_running = max(self.most_running, len(self.running))
        return spec

    def ended(self, handle):
        if handle is not self.running[0]:
            return None
        self.running.remove(handle)
        if self.begins:
            handle.files.log.touch()
        return self.end

    def cancel(self, handle):
        self.cancelled.append(handle.run_dir)


class Endless(Scripted):
    """Ends no run before it is cancelled."""

    def ended(self, handle):
        return super().ended(handle) if len(self.cancelled) == self.most_running else None


@pytest.fixture
def planned(tmp_path):
    """Four runs of one arm."""

    def spec(seed):
        name = f"runs/a-seed{seed}-0"
        run = RunConfig(run_dir=str(tmp_path / name))
        return RunSpec(arm="a", seed=seed, run_dir=name, run=run, identity={"device": "cpu"})

    return [spec(seed) for seed in range(4)]


def test_each_run_is_made_once_and_its_end_is_written(planned):
    engine, ended = Scripted(KILLED), []
    execute(planned, engine, 2, lambda spec: ended.append(spec.run_dir))
    assert ended == engine.submitted == [spec.run_dir for spec in planned]
    assert (engine.most_running, engine.cancelled) == (2, [])
    assert planned[0].files.read().status == "killed"


def test_what_ends_the_loop_cancels_what_is_queued_or_running_and_waits_for_it(planned):
    def interrupt():
        raise KeyboardInterrupt

    interrupted, absent = Endless(KILLED), Scripted(ERROR, begins=False)
    absent.name = "slurm"
    with pytest.raises(KeyboardInterrupt):
        execute(planned, interrupted, 3, on_poll=interrupt)
    for spec in planned:
        spec.files.log.unlink(missing_ok=True)
    with refused(r"runs/a-seed0-0 could not begin \(exit code 127\)"):
        execute(planned, absent, 2)
    assert interrupted.cancelled == [f"runs/a-seed{seed}-0" for seed in range(3)]
    assert absent.cancelled == ["runs/a-seed1-0"]
    assert interrupted.running == absent.running == []


def test_a_node_that_lacks_what_runs_need_is_named(planned, tmp_path):
    spec, other = planned[0], replace(planned[0], identity={"device": "cpu", "source_hash": "0"})
    with refused(f"^output_dir: {tmp_path / 'runs'} is not on node {socket.gethostname()}"):
        make_run_on_node(spec, os.getcwd())
    (tmp_path / "runs").mkdir()
    with refused(r"^/nowhere: cannot be used on node "):
        make_run_on_node(spec, "/nowhere")
    with refused(r"^lm: the training code on node "):
        make_run_on_node(other, os.getcwd())
    assert not list((tmp_path / "runs").iterdir()), "no run has begun"


@pytest.mark.parametrize(("n_gpus", "workers"), [(0, 8), (1, 1), (2, 2)])
def test_one_run_has_a_gpu_and_runs_share_the_cores(n_gpus, workers, tmp_path, monkeypatch):
    """Use 16 cores and two threads for each run."""
    monkeypatch.setattr(engines, "cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    engine = EXECUTORS["local"](AblateConfig(ablation=question()), tmp_path)
    assert engine.default_workers(2, needs_gpu=n_gpus > 0) == workers
    assert engine.default_workers(2, needs_gpu=False) == 8, "runs on the CPU, whatever GPUs there are"


def test_an_absent_package_is_named(tmp_path, monkeypatch):
    for name, package in {"ray": "ray", "slurm": "submitit"}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with refused(rf"executor={name}: .*'\.\[{name}\]'"):
            EXECUTORS[name](AblateConfig(ablation=question(), executor=name), tmp_path)


def test_whatever_the_user_adds_no_second_job_of_a_name_starts():
    """Names and dependencies of the user are refused: tests/test_cli.py."""
    settings = SlurmConfig(parameters={"qos": "long", "additional_parameters": {"reservation": "lab"}})
    parameters = job_parameters("run", 2, 0, settings)
    assert (parameters["job_name"], parameters["cpus_per_task"], parameters["qos"]) == ("run", 2, "long")
    assert parameters["additional_parameters"] == {"dependency": "singleton", "reservation": "lab"}


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra `slurm`")
def test_a_slurm_without_accounting_is_refused(tmp_path, monkeypatch):
    """There submitit would wait for a cancelled job for ever."""
    for name, lines in {"srun": "", "sacct": "echo Slurm accounting storage is disabled >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with refused("sacct says Slurm accounting storage is disabled; expected"):
        EXECUTORS["slurm"](AblateConfig(ablation=question(), executor="slurm"), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra `slurm`")
def test_the_ends_of_jobs_of_submitit_are_told_apart(tmp_path):
    """By real jobs of submitit, which here are processes of this machine."""
    import submitit

    slurm = object.__new__(EXECUTORS["slurm"])
    submitter = submitit.LocalExecutor(tmp_path)
    submitter.update_parameters(timeout_min=2)
    kill = "__import__('os').kill(__import__('os').getpid(), 9)"
    jobs = [submitter.submit(*call) for call in ((abs, 1), (int, "one"), (eval, kill))]
    wait_for(lambda: None not in [slurm.ended(job) for job in jobs], 60)
    done, failed, killed = (slurm.ended(job) for job in jobs)
    assert done == Ending("failed", "ended")
    assert failed == Ending("failed", "ValueError: invalid literal for int() with base 10: 'one'")
    assert killed is not None
    assert killed.status == "killed"


@contextlib.contextmanager
def disturbed(folder, n, disturb):
    """Disturbed as soon as n runs train."""

    def wait_and_disturb():
        wait_for(lambda: sum(RunFiles(path).steps() > 5 for path in folder.glob("runs/*-*[0-9a-f]")) >= n, 200)
        disturb()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wait_and_disturb)
        yield
        future.result()


@contextlib.contextmanager
def ray(folder):
    """A cluster of two nodes, of which one is killed."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    second = cluster.add_node(**options)
    with disturbed(folder, 2, lambda: cluster.remove_node(second, allow_graceful=False)):
        yield ["executor=ray", f"ray.address={cluster.address}"]
    cluster.shutdown()


@contextlib.contextmanager
def slurm(folder):
    """The cluster whose nodes see the temporary folders of this machine. A job is cancelled."""
    cancel = "scancel $(squeue -h -t R -o %A | head -n 1)"
    with disturbed(folder, 1, lambda: subprocess.run(cancel, shell=True, check=True)):
        yield ["executor=slurm"]


NO_RAY, NO_SLURM = find_spec("ray") is None, find_spec("submitit") is None or shutil.which("sinfo") is None
CLUSTERS = [
    pytest.param(ray, marks=pytest.mark.skipif(NO_RAY, reason="needs the extra `ray`")),
    pytest.param(slurm, marks=pytest.mark.skipif(NO_SLURM, reason="needs the extra `slurm` and a cluster")),
]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_that_loses_a_run_gives_the_results_of_this_machine(cluster, script, corpus, tmp_path):
    words = ["ablation=smoke", *SMALL, "tokenizer.vocab_size=null", f"data.path={corpus}", "trainer.max_steps=400"]
    with cluster(tmp_path / "remote") as overrides:
        answer = script("ablate", *words, "output_dir=remote", *overrides)
    assert answer.returncode == 0, answer.stderr
    assert script("ablate", *words, "output_dir=local").returncode == 0
    local, remote = (outcomes(tmp_path / name) for name in ("local", "remote"))
    assert local == remote != {}, "bit for bit"


def outcomes(folder):
    """The score, the settings and the weights of each run."""
    results = {path.parent: json.loads(path.read_text()) for path in folder.glob("runs/*/result.json")}
    weights = {path: sha256(path / "model/model.safetensors") for path in results}
    return {path.name: (result["val_loss"], result["config_hash"], weights[path]) for path, result in results.items()}
