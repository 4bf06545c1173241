"""One run in several processes, on one node and on two, gives the numbers of one process with the whole batch."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, TEXT, TINY_RUN
from lightning.pytorch.strategies import StrategyRegistry
from lm.system.processes import is_first_process
from lm.training.options import resolve
from test_resume import a_run

from lm.config import BadInput, RunConfig
from lm.config.run import IN_WORKERS, NO_STRATEGIES, STRATEGIES
from lm.training.train import train

PAGE = (ROOT / "docs/distributed.md").read_text()
TRAIN = str(ROOT / "scripts/train.py")
PARTED = ["optim=adamw", "data.batch_size=2", "trainer.strategy=ddp"]  # Muon rounds to bf16, and roundings part
NODES = [*PARTED, "trainer.devices=1", "trainer.num_nodes=2"]


@pytest.mark.parametrize("name", [*StrategyRegistry.available_strategies(), "ddp_spawn_of_ones_own", "nonsense"])
def test_a_strategy_works_here_or_is_refused_with_the_reason(name: str) -> None:
    """Each of Lightning's; docs/distributed.md lists them."""
    if name in STRATEGIES:
        RunConfig(trainer={"max_steps": 1, "strategy": name})
        assert f"`{name}`" in PAGE
        return
    with pytest.raises(BadInput, match=rf"^trainer\.strategy={name}: ") as caught:
        RunConfig(trainer={"max_steps": 1, "strategy": name})
    if refused := [one for one in NO_STRATEGIES if name.startswith(one)]:
        assert f"`{refused[0]}" in PAGE
        assert NO_STRATEGIES[refused[0]] in str(caught.value)


def test_a_single_device_is_not_asked_for_several() -> None:
    for key in ("devices", "num_nodes"):
        with pytest.raises(BadInput, match=r"single_device: .* ask for more"):
            RunConfig(trainer={"max_steps": 1, "strategy": "single_device", key: 2})


CLASSES = "lightning.pytorch.strategies"


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"_target_": f"{CLASSES}.DDPStrategy", "start_method": "spawn"}, f"DDPStrategy {IN_WORKERS}; use ddp"),
        ({"_target_": f"{CLASSES}.SingleDeviceStrategy", "device": "cpu"}, "is 2, but one process trains"),
        ({"_target_": f"{CLASSES}.FSDPStrategy"}, "trainer: "),
    ],
    ids=["spawn", "one device", "fsdp"],
)
def test_what_a_name_does_not_tell_is_refused_when_it_is_built(
    corpus: Path, tmp_path: Path, strategy: dict[str, Any], said: str
) -> None:
    run = a_run(corpus, tmp_path / "run", steps=3)
    run.trainer |= {"strategy": strategy, "devices": 2}
    with pytest.raises(BadInput, match=re.escape(said)) as caught:
        train(run)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_torchrun_and_the_trainer_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(trainer={"max_steps": 1})
    monkeypatch.setenv("WORLD_SIZE", "2")
    resolve(run)  # a variable that somebody else has left
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(BadInput, match=r"torchrun has started 2 processes, trainer.devices \* trainer.num_nodes is 1"):
        resolve(run)
    run.trainer["devices"] = 2
    resolve(run)


@pytest.mark.parametrize(
    ("env", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),  # the second node of torchrun
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"NODE_RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_one_process_of_all_writes_and_prints(
    env: dict[str, str], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() is first


# --- real processes

STACKS = {"PYTHONFAULTHANDLER": "1"}  # SIGABRT prints the stacks of all threads


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def whole(corpus: Path) -> dict[str, Any]:
    """The run in one process with the batch of all."""
    words = [*TINY_RUN, f"data.path={corpus}", "optim=adamw", "data.batch_size=4", "run_dir=whole"]
    together([[sys.executable, TRAIN, *words]], corpus.parent)
    return result(corpus.parent / "whole")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["tokens"] == other["tokens"] and one["val_loss"] == pytest.approx(other["val_loss"], abs=2e-3))


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, TRAIN]


def slurm(port: str) -> list[dict[str, str]]:
    """The variables that srun sets for each of two nodes."""
    common = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    common |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID"), node) for node in "01"]


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def communicate(started: list[subprocess.Popen[str]], seconds: float) -> list[tuple[str, str]]:
    """The output of each process. One that is late is aborted with its children, which print their stacks."""
    deadline, said, hung = time.monotonic() + seconds, [], []
    for process in started:
        try:
            said.append(process.communicate(timeout=max(1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            hung.append(process.args)
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGABRT)
            said.append(process.communicate(timeout=30))
    assert not hung, said
    return said


def together(lines: list[list[str]], folder: Path, envs: list[dict[str, str]] | None = None) -> list[str]:
    """Run the commands at the same time; what each prints on standard error."""
    environments = envs or [{} for _ in lines]
    started = [
        subprocess.Popen(
            line, cwd=folder, env=os.environ | STACKS | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line, env in zip(lines, environments, strict=True)
    ]
    said = communicate(started, 240)
    assert [process.returncode for process in started] == [0] * len(lines), said
    return ["".join(one) for one in said]


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(whole: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    words = [*TINY_RUN, f"data.path={corpus}", *PARTED, "trainer.devices=2"]
    line = [sys.executable, "-m", "lm", "train", *words, "run_dir=lightning"]  # it starts the second by these words
    (said,) = together([line], tmp_path)
    assert said.count("20 steps") == 2, "the first line and the table, of one process"
    together([[*torchrun("--nproc-per-node=2", "--master-port", free_port()), *words, "run_dir=torchrun"]], tmp_path)
    for name in ("lightning", "torchrun"):
        assert same(result(tmp_path / name), whole)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_two_nodes_train_as_one_process_with_twice_the_batch(
    launcher: str, whole: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    """Two launchers on this machine stand for two nodes."""
    words, port = [*TINY_RUN, f"data.path={corpus}", *NODES, "run_dir=nodes"], free_port()
    if launcher == "torchrun":
        common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--master-port", port]
        said = together([[*torchrun(*common, f"--node-rank={node}"), *words] for node in (0, 1)], tmp_path)
    else:
        said = together([[sys.executable, TRAIN, *words]] * 2, tmp_path, slurm(port))
    assert ["20 steps" in one for one in said] == [True, False], "the second node prints nothing of the run"
    assert same(result(tmp_path / "nodes"), whole)


LATE_OPERATION = f"""
import os, runpy, time, torch
try:
    runpy.run_path({TRAIN!r}, run_name="__main__")
finally:
    time.sleep(float(os.environ["SLURM_PROCID"]))
    work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda _: [time.sleep(0.001) for _ in range(1000)])  # keeps the Gloo thread busy
"""


@pytest.mark.slow
def test_a_process_waits_for_its_last_collective_operation(corpus: Path, tmp_path: Path) -> None:
    """A Gloo thread that is busy when the interpreter exits would abort the process."""
    words = [*TINY_RUN, f"data.path={corpus}", *NODES, "run_dir=nodes"]
    together([[sys.executable, "-c", LATE_OPERATION, *words]] * 2, tmp_path, slurm(free_port()))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_the_same_command_resumes(corpus: Path, tmp_path: Path) -> None:
    words = [*TINY_RUN, f"data.path={corpus}", *PARTED, "trainer.devices=2", "trainer.max_steps=400"]
    words += ["checkpoint.every=1000", "validation.every=0"]
    whole = torchrun("--nproc-per-node=2", "--master-port", free_port())
    together([[*whole, *words, "run_dir=undisturbed"]], tmp_path)
    process = subprocess.Popen(
        [*whole, *words, "run_dir=stopped"], cwd=tmp_path, env=os.environ | STACKS, stderr=subprocess.PIPE, text=True
    )
    rows = tmp_path / "stopped/metrics.csv"
    wait_for(lambda: rows.exists() and "\n20," in rows.read_text())
    process.send_signal(signal.SIGTERM)
    ((_, errors),) = communicate([process], 120)
    assert process.returncode != 0
    assert "resume with" in errors
    assert len(list(tmp_path.glob("stopped/checkpoints/*"))) == 1
    together([[*whole, *words, "run_dir=stopped"]], tmp_path)
    ended, expected = (result(tmp_path / name) for name in ("stopped", "undisturbed"))
    assert len(ended["resumed_from"]) == 1
    assert ended["val_loss"] == expected["val_loss"], "bit for bit"
