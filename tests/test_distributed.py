"""One run in several processes, on one node and on two, gives the numbers of one process with the whole batch."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from lm.system.terminal import is_first_process
from lm.training.train import train
from tests.helpers import ROOT
from tests.helpers.runs import composed, result, rows, wait_for
from tests.helpers.tiny import TINY_RUN

TRAIN = str(ROOT / "scripts/train.py")
COMMON = ["optim=adamw", "trainer.max_steps=100", "validation.every=20"]  # Muon rounds to bf16, and roundings diverge
COMMON += ["optim.ema=0.5", "checkpoint.best=true", "checkpoint.patience=2", "checkpoint.every=1000"]
SPLIT = [*COMMON, "data.batch_size=2", "trainer.strategy=ddp"]
NODES = [*SPLIT, "trainer.devices=1", "trainer.num_nodes=2"]
STACKS = {"PYTHONFAULTHANDLER": "1"}  # SIGABRT prints the stacks of all threads


def test_one_process_of_all_prints(monkeypatch):
    """RANK is that of the second node of torchrun."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK")
    for own in ({}, {"RANK": "2", "LOCAL_RANK": "0"}, *({name: "1"} for name in names[1:])):
        for name in names:
            monkeypatch.setenv(name, own[name]) if name in own else monkeypatch.delenv(name, raising=False)
        assert is_first_process() is is_first_process(2) is (own == {})
        assert is_first_process(1), "a launcher may number runs of one process each"


# --- real processes


def words(text, *overrides):
    return [*TINY_RUN, f"data.path={text}", *overrides]


@pytest.fixture(scope="module")
def whole(text_file, tmp_path_factory):
    """The run in one process with the batch of all."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return train(composed(*words(text_file, *COMMON, "data.batch_size=4", f"run_dir={run_dir}")))[0]


@pytest.fixture(scope="module")
def two(text_file, tmp_path_factory):
    """The run in two processes, of which lm starts the second by the words of the first, and what they print."""
    folder = tmp_path_factory.mktemp("two")
    line = [sys.executable, "-m", "lm", "train", *words(text_file, *SPLIT, "trainer.devices=2", "run_dir=two")]
    (output,) = together([line], folder)
    return folder / "two", output


def same(run_dir, whole):
    scores, expected = result(run_dir), result(whole)
    assert (scores["steps"], scores["tokens"]) == (expected["steps"], expected["tokens"])
    assert scores["best"]["step"] == expected["best"]["step"]
    return bool(scores["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-3))


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options, TRAIN]


def slurm(port):
    """The variables that srun sets for each of two nodes."""
    common = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    common |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID"), node) for node in "01"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def communicate(processes, seconds):
    """The output of each process. One that is late is aborted with its children, which print their stacks."""
    deadline, outputs, hung = time.monotonic() + seconds, [], []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            hung.append(process.args)
            for late in (*psutil.Process(process.pid).children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    late.send_signal(signal.SIGABRT)
            outputs.append(process.communicate(timeout=30))
    assert not hung, outputs
    return outputs


def together(lines, folder, envs=None):
    """Run the commands at the same time; what each prints."""
    processes = [
        subprocess.Popen(
            line, cwd=folder, env=os.environ | STACKS | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line, env in zip(lines, envs or [{} for _ in lines], strict=True)
    ]
    outputs = communicate(processes, 240)
    assert [process.returncode for process in processes] == [0] * len(lines), outputs
    return ["".join(output) for output in outputs]


@pytest.mark.slow
def test_two_processes_keep_the_best_average_of_one_with_twice_the_batch(whole, two):
    run_dir, output = two
    assert output.count("100 steps") == 2, "the first line and the table, of one process"
    assert same(run_dir, whole)


def stopped(line, folder, signum, env):
    """Start a command and send a signal after ten rows of run_dir=run; its exit code."""
    process = subprocess.Popen(line, cwd=folder, env=os.environ | STACKS | env, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (folder / "run/metrics.csv").exists() and len(rows(folder / "run")) > 10, 120)
    process.send_signal(signum)
    ((_, errors),) = communicate([process], 120)
    assert "resume with: " in errors
    assert len([*(folder / "run/checkpoints").glob("step-*")]) == 1
    assert (folder / "run/model/model.safetensors").exists()
    return int(process.returncode)


@pytest.mark.nightly
def test_sigterm_to_torchrun_saves_and_is_resumed(two, text_file, tmp_path):
    line = torchrun("--nproc-per-node=2", "--master-port", free_port())
    line += words(text_file, *SPLIT, "trainer.devices=2", "run_dir=run")
    assert stopped(line, tmp_path, signal.SIGTERM, {}) != 0
    together([line], tmp_path)
    assert len(result(tmp_path / "run")["resumed_from"]) == 1
    assert rows(tmp_path / "run") == rows(two[0]), "bit for bit"


@pytest.mark.nightly
def test_a_run_in_one_process_is_whole_whatever_a_launcher_numbers(text_file, tmp_path):
    """It stops at Slurm's signal before a time limit."""
    env = {**slurm("1")[1], "SLURM_LOCALID": "1", "RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "1"}
    line = [sys.executable, TRAIN, *words(text_file, "trainer.max_steps=400", "checkpoint.every=1000")]
    line += ["trainer.strategy=ddp", "logger=tensorboard", "run_dir=run"]
    assert stopped(line, tmp_path, signal.SIGUSR1, env) == 128 + signal.SIGTERM
    (output,) = together([line], tmp_path, [env])
    assert "400 steps" in output
    assert len(result(tmp_path / "run")["resumed_from"]) == 1
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == list(range(1, 401))
    assert [*tmp_path.glob("run/tensorboard/events*")]


LATE_OPERATION = f"""
import os, runpy, time, torch
try:
    runpy.run_path({TRAIN!r}, run_name="__main__")
finally:
    time.sleep(float(os.environ["SLURM_PROCID"]))
    work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda _: [time.sleep(0.001) for _ in range(1000)])  # keeps the Gloo thread busy
"""


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_two_nodes_train_as_one_process(launcher, whole, text_file, tmp_path):
    """Two launchers on this machine stand for two nodes.

    A process waits for its last collective operation: a Gloo thread that is busy when the interpreter exits would
    abort the process.
    """
    line, port = words(text_file, *NODES, "run_dir=nodes"), free_port()
    if launcher == "torchrun":
        common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--master-port", port]
        outputs = together([[*torchrun(*common, f"--node-rank={node}"), *line] for node in (0, 1)], tmp_path)
    else:
        outputs = together([[sys.executable, "-c", LATE_OPERATION, *line]] * 2, tmp_path, slurm(port))
    assert ["100 steps" in output for output in outputs] == [True, False], "the second node prints nothing of the run"
    assert same(tmp_path / "nodes", whole)
