"""Engines that carry out runs: the loop, what is told of an absent engine, and real clusters where there are."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import question

from lm.ablation.outcomes import Outcomes, RunFiles, broke
from lm.ablation.plan.cells import Cell
from lm.ablation.run.executors import EXECUTORS
from lm.ablation.run.executors.executor import Executor
from lm.ablation.run.executors.slurm import read_jobs
from lm.ablation.run.task import Place, Task
from lm.ablation.run.workers import place_of, run_cells
from lm.cli.compose import compose
from lm.cli.errors import CONFIGS
from lm.config import BadInput, RunConfig
from lm.config.ablation import AblateConfig


class Listed(Executor):
    """Carries nothing out: it says that tasks have ended, as many as `lost` times each without an outcome."""

    kind = "local"

    def __init__(self, folder: Path, lost: int = 0, left: tuple[str, ...] = (), interrupt: bool = False) -> None:
        super().__init__(AblateConfig(ablation=question()), folder)
        self.lost, self.left, self.interrupt = lost, left, interrupt
        self.started: list[str] = []
        self.running: list[Task] = []
        self.most, self.cancelled = 0, 0

    def slots(self, threads: int) -> int:
        return 1

    def adopt(self, tasks: Iterable[Task]) -> list[Task]:
        self.running = [one for one in tasks if one.run_dir in self.left]
        return [*self.running]

    def start(self, task: Task) -> None:
        assert task.run_dir not in [one.run_dir for one in self.running], "a second copy"
        self.started.append(task.run_dir)
        self.running.append(task)
        self.most = max(self.most, len(self.running))

    def poll(self) -> dict[str, str]:
        if self.interrupt:
            raise KeyboardInterrupt
        task = self.running.pop(0)
        if self.started.count(task.run_dir) > self.lost:
            task.files.outcome.write_text('{"status": "diverged"}')
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


def test_an_interrupt_cancels_what_is_with_the_engine(cells: list[Cell], tmp_path: Path) -> None:
    executor = Listed(tmp_path, interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        carried_out(cells, executor)
    assert executor.cancelled == 1


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
    ]
    for there, said in wrong:
        with pytest.raises(BadInput, match=said):
            there.check()


@pytest.mark.parametrize("kind", ["ray", "slurm"])
def test_an_engine_that_is_absent_is_told(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        BadInput, match=rf'executor={kind}: the package \w+ is missing; .*pip install "lm-lab\[{kind}\]"'
    ):
        EXECUTORS[kind](AblateConfig(ablation=question(), executor=kind), tmp_path)


def test_of_several_jobs_with_one_name_the_one_that_goes_on_counts() -> None:
    text = "7|FAILED|n1|lm-1-a\n8|PENDING||lm-1-a\n9|CANCELLED|n1|lm-1-a\n10|TIMEOUT|n2|lm-1-b\n11|RUNNING|n2|lm-2-a\n"
    assert read_jobs(text, "lm-1-") == {"lm-1-a": ("8", "PENDING", ""), "lm-1-b": ("10", "TIMEOUT", "n2")}


def test_a_row_says_where_its_run_was_made(tmp_path: Path) -> None:
    where = RunFiles(tmp_path / "cells/a-seed0-0").where
    where.parent.mkdir()
    assert Outcomes(tmp_path).where("cells/a-seed0-0") == {}
    where.write_text('{"executor": "ray", "host": "node7", "pid": 1}')
    assert Outcomes(tmp_path).where("cells/a-seed0-0") == {"host": "node7", "executor": "ray"}
    where.write_text('["node7"]')
    assert Outcomes(tmp_path).where("cells/a-seed0-0") == {}


def test_a_run_whose_node_is_gone_is_no_failure_of_its_arm() -> None:
    assert not broke("failed", "lost: Slurm says NODE_FAIL on n1")
    assert broke("failed", "Slurm says OUT_OF_MEMORY on n1")
