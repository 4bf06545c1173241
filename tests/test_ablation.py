"""An ablation at work, with real processes: isolated, resumable, fair, and finished whatever happens to a cell."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Script
from hydra import initialize_config_dir
from test_plan import SMALL, question

from lm.ablation.ablate import AblationRunner, ablate
from lm.ablation.folder import default_dir, lock_output_dir
from lm.ablation.judge.study import Study, read_study
from lm.ablation.plan.cells import cells
from lm.ablation.plan.compose import compose_arms
from lm.ablation.plan.match import change
from lm.ablation.progress import Progress
from lm.ablation.record import read_record
from lm.ablation.report import write_report
from lm.ablation.run_files import RunFiles
from lm.ablation.summary import plan_table, result_table
from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import BadInput, RunConfig
from lm.config.ablation import AblateConfig, TuneConfig
from lm.config.identity import config_hash
from lm.training.train import train

Ablate = Callable[..., AblationRunner]


@pytest.fixture
def words(corpus: Path, tmp_path: Path) -> list[str]:
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    return [*SMALL, f"data.path={corpus}", cache, "checkpoint.every=5", "validation.every=10", "validation.batches=2"]


def composed(config: AblateConfig) -> dict[str, RunConfig]:
    return compose_arms(config.ablation, config.overrides, lambda said: compose("train", said, RunConfig))


@pytest.fixture
def lab(words: list[str], tmp_path: Path) -> Ablate:
    def at_work(*more: str, folder: str = "out", plan_only: bool = False, **changes: Any) -> AblationRunner:
        ablation = question(**changes)
        ablation = replace(ablation, overrides=[*words, *ablation.overrides])
        config = AblateConfig(
            ablation=ablation,
            output_dir=str(tmp_path / folder),
            plan_only=plan_only,
            workers=2,
            overrides=list(more),
        )
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return ablate(config, composed(config), "the command")

    return at_work


def stamps(path: Path, folder: str = "cells") -> dict[str, int]:
    return {one.parent.name: one.stat().st_mtime_ns for one in path.glob(f"{folder}/*/result.json")}


def status(study: Study) -> dict[tuple[str, int], str]:
    return {(row.arm, row.seed): row.status for row in study.rows}


@pytest.mark.slow
def test_what_is_missing_is_done_and_nothing_else(lab: Ablate, tmp_path: Path) -> None:
    first = stamps(lab().path)
    assert len(first) == 4
    assert stamps(lab().path) == first  # nothing to do
    record, report = ((tmp_path / "out" / name).read_bytes() for name in ("ablation.json", "report.html"))
    (tmp_path / "out/report.html").unlink()
    lab()
    assert (tmp_path / "out/ablation.json").read_bytes() == record
    assert (tmp_path / "out/report.html").read_bytes() == report
    more = {"tied": ["head=tied"], "untied": ["head=untied"], "copied": ["head=untied_from_embedding"]}
    grown = stamps(lab(arms=more, seeds=[0, 1, 2]).path)
    assert len(grown) == 9
    assert first.items() <= grown.items()
    assert set(status(read_study(tmp_path / "out")).values()) == {"done"}


@pytest.mark.slow
def test_a_cell_gives_what_the_run_alone_gives(lab: Ablate, tmp_path: Path) -> None:
    runner = lab(seeds=[3])
    (row,) = read_study(runner.path).finished("untied", "tokens").values()
    (_, cell), *_ = cells(runner.ablation, {"untied": runner.arms["untied"]})
    _, alone = train(replace(cell.run, run_dir=str(tmp_path / "alone")))
    for key in ("val_loss", "val_top1", "n_params", "config_hash", "threads", "samples"):
        assert alone[key] == row.result[key]
    assert alone["seed"] == 3


@pytest.mark.slow
def test_changed_sources_or_text_are_not_silently_reused(
    lab: Ablate, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stamps(lab(seeds=[0]).path)
    monkeypatch.setattr("lm.ablation.plan.arms.source_hash", lambda files: "another")
    other_code = stamps(lab(seeds=[0]).path)
    assert len(other_code) == 4
    assert first.items() <= other_code.items()
    corpus.write_text(corpus.read_text() + "another line\n" * 9)
    assert len(stamps(lab(seeds=[0]).path)) == 6


@pytest.mark.slow
def test_rows_of_results_csv_stand_for_runs_that_are_gone(
    lab: Ablate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = TuneConfig(trials=2, extension_trials=0, seeds=[77], hyperparameters=["optim.lr"])
    path = lab(tune=tune).path
    rows, contrasts = (path / "results.csv").read_text(), read_study(path).contrasts()
    curves, picture = (path / "curves.csv").read_text(), (path / "figures/learning.svg").read_text()
    shutil.rmtree(path / "cells")
    shutil.rmtree(path / "trials")
    assert "finished runs without a folder, read from results.csv: 4; remove a row to run one again" in plan_table(
        lab(tune=tune)
    )
    assert not list(path.glob("*/*/model")), "nothing was trained"
    assert (path / "results.csv").read_text() == rows
    assert (path / "curves.csv").read_text() == curves
    assert (path / "figures/learning.svg").read_text() == picture
    assert read_study(path).contrasts() == contrasts
    first = read_study(path).rows[0].run_dir
    kept = [line for line in rows.splitlines() if first not in line]
    (path / "results.csv").write_text("\n".join(kept) + "\n")
    lab(tune=tune)
    assert [one.parent.name for one in path.glob("*/*/model")] == [Path(first).name], "a run without a row is made"
    shutil.rmtree(path / "cells")
    monkeypatch.setattr("lm.ablation.plan.arms.source_hash", lambda files: "another")
    lab(tune=tune)
    assert len(list(path.glob("cells/*/model"))) == 4, "other code makes other runs"
    assert (path / "results.csv").read_text().count(",unused,") == 4 + 4, "and keeps the rows of the old ones"


def during(condition: Callable[[], object], act: Callable[[], object]) -> None:
    """Do something as soon as a condition holds, while the ablation runs."""
    threading.Thread(target=lambda: (wait_for(condition), act()), daemon=True).start()


@pytest.mark.slow
def test_a_text_edited_while_runs_go_on_gives_no_verdict_of_two_texts(
    lab: Ablate, corpus: Path, tmp_path: Path
) -> None:
    text = corpus.read_text()
    during(lambda: list(tmp_path.glob("out/cells/*/*.csv")), lambda: corpus.write_text(text + "another line\n" * 9))
    runner = lab(seeds=[0, 1, 2, 3])
    planned, rows = runner.arms["tied"].identity["data_hash"], read_study(runner.path).rows
    assert {row.result["data_hash"] for row in rows if row.result} == {planned}
    failed = [row.error for row in rows if row.status == "failed"]
    assert failed
    assert all("has changed since" in error for error in failed)
    assert set(status(read_study(lab(seeds=[0, 1, 2, 3]).path)).values()) == {"done"}


@pytest.mark.slow
def test_a_cell_that_diverges_or_breaks_is_recorded_and_the_rest_go_on(lab: Ablate) -> None:
    arms = {
        "good": ["head=tied"],
        "wild": ["head=tied", "optim.lr=1e15", "trainer.gradient_clip_val=0"],
        "broken": ["head=tied", "model.linear=brittle.Brittle"],
    }
    runner = lab(arms=arms, baseline="good", primary=[])
    study = read_study(runner.path)
    found = status(study)
    assert [found[arm, seed] for arm in arms for seed in (0, 1)] == ["done"] * 2 + ["diverged"] * 2 + ["failed"] * 2
    (broken,) = (row for row in study.rows if (row.arm, row.seed) == ("broken", 0))
    assert "a crack | in the glass" in broken.error
    logs = {path.name: path.read_text() for path in runner.path.glob("cells/*.log")}
    assert any("Traceback" in text for name, text in logs.items() if name.startswith("broken"))
    assert runner.n_failed() == 4

    again = lab(arms=arms, baseline="good", primary=[])
    assert {path.name: path.read_text() for path in again.path.glob("cells/wild*.log")} == {
        name: text for name, text in logs.items() if name.startswith("wild")
    }  # it would diverge again
    assert all(
        path.read_text().count("Traceback") > logs[path.name].count("Traceback")
        for path in again.path.glob("cells/broken*.log")
    )  # what broke may have been mended


def test_a_folder_of_something_else_is_refused(lab: Ablate, tmp_path: Path) -> None:
    lab(seeds=[0])
    with pytest.raises(BadInput, match=r"another ablation \(name is test there, other now\)"):
        lab(name="other")
    with pytest.raises(BadInput, match=r"another ablation \(overrides"):
        lab("optim.lr=0.5")
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("")
    with pytest.raises(BadInput, match="holds no ablation"):
        lab(folder="stranger")
    assert [path.name for path in stranger.iterdir()] == ["thesis.txt"]
    (tmp_path / "list").mkdir()
    (tmp_path / "list/ablation.json").write_text("[]")
    with pytest.raises(BadInput, match="not what lm wrote"):
        lab(folder="list")
    with pytest.raises(BadInput, match=r"output_dir=/proc/nowhere: cannot be written to"):
        lab(folder="/proc/nowhere")


@pytest.mark.slow
def test_a_result_of_other_settings_is_not_accepted(lab: Ablate) -> None:
    path = lab(seeds=[0]).path
    place = next(path.glob("cells/tied-*/result.json"))
    shutil.copy(next(path.glob("cells/untied-*/result.json")), place)
    (row,) = (one for one in read_study(path).rows if one.arm == "tied")
    assert (row.status, row.result) == ("failed", {})
    assert row.error == f"its config_hash is not the one planned: remove {row.run_dir}"


def test_the_default_folder_says_what_is_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def name(*words: str) -> str:
        return str(default_dir(AblateConfig(ablation=question(), overrides=list(words))))

    assert name() == "ablations/test"
    assert name("trainer.max_steps=300") == "ablations/test-max_steps=300-f4edd512"
    assert re.fullmatch(
        r"ablations/test-path=my_text.txt-untie_at=0.5-\w{8}", name("data.path=/a b/my text.txt", "head.untie_at=0.5")
    )
    assert len(name(*[f"model.d_ff={i}" for i in range(99)])) < 80


@pytest.mark.slow
def test_a_verdict_seen_early_is_told_by_the_next_call(lab: Ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ablation is interrupted after two of three pairs, and a report of these is looked at."""

    def stop(progress: Progress, steps: dict[str, int], ended: list[str]) -> None:
        update(progress, steps, ended)
        if progress.n_ended >= 4:
            raise KeyboardInterrupt

    update = Progress.update
    monkeypatch.setattr(Progress, "update", stop)
    with pytest.raises(KeyboardInterrupt):
        lab(seeds=[0, 1, 2])
    monkeypatch.setattr(Progress, "update", update)
    path = lab(seeds=[0, 1, 2], plan_only=True).path
    write_report(path)
    (path / "report.json").unlink()
    for key, seeds in {"seen with fewer seeds (at 2, now 3)": [0, 1, 2], "Seeds were taken away": [0, 1]}.items():
        heads = [head for head, _ in read_record(lab(seeds=seeds).path).cautions]
        assert any(key in head for head in heads), heads


@pytest.mark.slow
def test_a_planned_look_that_decides_ends_the_ablation(lab: Ablate, capsys: pytest.CaptureFixture[str]) -> None:
    plan: dict[str, Any] = {"seeds": [0, 1, 2], "looks": [2, 3], "equivalence_margin": 1e9}
    path = lab(**plan).path
    first = stamps(path)
    assert len(first) == 4
    assert "look with 2 of 3 seeds: decided" in capsys.readouterr().err
    said = "decided with 2 of 3 seeds: 2 runs, about"
    assert said in (path / "report.md").read_text()
    assert said in plan_table(lab(**plan, plan_only=True))
    again = lab(**plan)
    assert stamps(path) == first, "a later call finds it decided"
    assert read_record(path).cautions == []
    assert read_record(path).seeds == [0, 1]
    assert said in result_table(again.path)
    assert len(stamps(lab(**{**plan, "looks": []}).path)) == 6
    assert read_record(path).cautions[0].head == "A verdict was seen with fewer seeds (at 2, now 3):"


def test_a_plan_trains_nothing_and_leaves_nothing_behind(
    lab: Ablate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.ablation.worker.run_task", lambda task: pytest.fail(task.name))
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda process: pytest.fail(process.name))
    runner = lab(plan_only=True)
    assert not (tmp_path / "out").exists()
    assert len(runner.all_cells()) == 4


def test_bad_input_leaves_nothing_behind(lab: Ablate, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="absent"):
        lab("data.path=absent.txt", folder="new/out")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(BadInput, match="absent"):
        lab("data.path=absent.txt", folder="mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_two_drivers_do_not_share_a_folder(lab: Ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = lab(seeds=[0])
    monkeypatch.setattr("lm.ablation.ablate.measure", lambda *_: pytest.fail("measured beside another's runs"))
    with lock_output_dir(runner.path), pytest.raises(BadInput, match="another process"):
        lab(seeds=[0])


TUNE = TuneConfig(
    trials=5,
    extension_trials=2,
    seeds=[77],
    hyperparameters=["optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier"],
)


@pytest.mark.slow
def test_every_arm_is_tuned_in_proportion_on_seeds_that_are_not_reported(lab: Ablate) -> None:
    runner = lab(seeds=[0], tune=TUNE)
    study = read_study(runner.path)
    searches = study.record.searches
    assert searches["tied"].hyperparameters == ["optim.lr", "head.embedding_lr_multiplier"]
    assert searches["untied"].hyperparameters == [
        "optim.lr",
        "head.embedding_lr_multiplier",
        "head.head_lr_multiplier",
    ]
    assert [len(searches[name].trials) for name in ("tied", "untied")] in ([4, 5], [5, 7])
    assert {row.seed for row in study.trials} == {77}
    for name in searches:
        (row,) = study.finished(name, "tokens").values()
        config = change(runner.arms[name].run, runner.arms[name].tuned)
        assert config_hash(replace(config, seed=0)) == row.result["config_hash"]
    assert len({trial.values["optim.lr"] for trial in searches["tied"].trials}) > 1
    trials = stamps(runner.path, "trials")
    lab(seeds=[0, 1], tune=TUNE)
    assert stamps(runner.path, "trials") == trials
    cells, more = (
        stamps(runner.path),
        {"tied": ["head=tied"], "untied": ["head=untied"], "naive": ["head=tied_naive"]},
    )
    grown = lab(seeds=[0, 1], tune=TUNE, arms=more)  # the newcomer is far from tuned, which moves nobody else
    assert cells.items() <= stamps(grown.path).items()
    assert len(stamps(grown.path)) == 6
    assert read_record(grown.path).searches.items() >= searches.items()
    assert grown.expected_trials() == []
    moved = lab(seeds=[0, 1], tune=TUNE, arms=more | {"tied": ["head=tied", "optim.lr=0.01"]}, plan_only=True)
    assert {one.arm for one in moved.expected_trials()} == {"tied"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_killed_trial_is_tried_again_and_never_a_bad_value(lab: Ablate, tmp_path: Path) -> None:
    few = TuneConfig(trials=3, extension_trials=0, seeds=[77], hyperparameters=["optim.lr"])
    quiet = [arm.tuned for arm in lab(seeds=[0], tune=few, folder="quiet").arms.values()]

    during(lambda: kill_one(tmp_path / "once/trials/untied"), lambda: (tmp_path / "killed").touch())
    once = lab(seeds=[0], tune=few, folder="once")
    assert [arm.tuned for arm in once.arms.values()] == quiet
    assert once.n_failed() == 0
    assert (tmp_path / "killed").exists()

    stop, folder = threading.Event(), tmp_path / "always"
    threading.Thread(target=lambda: kill_until(stop, folder / "trials/untied"), daemon=True).start()
    broken = lab(seeds=[0], tune=few, folder="always")
    stop.set()
    assert broken.n_failed() == 1
    assert {row.arm: row.status for row in read_study(folder).rows} == {"tied": "done", "untied": "missing"}
    assert "untied could not be tuned" in (folder / "report.md").read_text()
    mended = lab(seeds=[0], tune=few, folder="always")
    assert [arm.tuned for arm in mended.arms.values()] == quiet
    assert mended.n_failed() == 0


def kill_until(stop: threading.Event, place: Path) -> None:
    while not stop.wait(0.02):
        kill_one(place)


def kill_one(place: Path) -> bool:
    """Whether there was a worker at all: it may have come to its end since it was looked for."""
    for worker in workers_of(place):
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
            return True
    return False


# The driver as a process of its own, to be killed.

DRIVER = f"""
import sys; sys.path[:0] = [{str(ROOT / "tests")!r}]
from test_ablation import drive
drive(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
"""


def drive(folder: str, trials: int, words: list[str]) -> None:
    tune = TuneConfig(trials=trials, extension_trials=0, seeds=[77], hyperparameters=["optim.lr"])
    config = AblateConfig(ablation=question(overrides=words, tune=tune), output_dir=folder, workers=2)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        runner = ablate(config, composed(config), "the command")
    sys.exit(int(runner.n_failed() > 0))


def start(folder: Path, words: list[str], trials: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", DRIVER, str(folder), str(trials), *words]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def far_enough(place: Path, steps: int) -> bool:
    return any(RunFiles(one).steps() >= steps for one in place.glob("*-*[0-9a-f]"))


def workers_of(place: Path) -> list[int]:
    """Processes that run a cell whose files' names begin so, by the log they have open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(str(place)) and link.endswith(".log") for link in links):
            found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_driver_killed_at_any_moment_loses_nothing(words: list[str], tmp_path: Path) -> None:
    folder, longer = tmp_path / "out", [*words, "trainer.max_steps=400"]
    for place, steps in (("trials", 5), ("cells", 5), ("cells", 150)):
        driver = start(folder, longer, trials=2)
        wait_for(partial(far_enough, folder / place, steps))
        assert workers_of(folder)
        driver.kill()
        driver.wait()
        wait_for(lambda: not workers_of(folder), 10)  # they end with it
    before = stamps(folder)
    driver = start(folder, longer, trials=2)
    assert driver.wait(300) == 0
    study = read_study(folder)
    assert set(status(study).values()) == {"done"}
    assert before.items() <= stamps(folder).items()
    assert any(row.result["resumed_from"] for row in study.rows)  # they went on, not anew
    quiet = start(tmp_path / "quiet", longer, trials=2)
    assert quiet.wait(300) == 0
    losses = [
        {(row.arm, row.seed): row.result["val_loss"] for row in read_study(p).rows}
        for p in (folder, tmp_path / "quiet")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_killed_worker_is_started_again_and_one_that_is_always_killed_is_recorded(
    words: list[str], tmp_path: Path
) -> None:
    folder, longer = tmp_path / "out", [*words, "trainer.max_steps=400"]
    driver, stop = start(folder, longer), threading.Event()
    wait_for(lambda: kill_one(folder / "cells/tied"))
    threading.Thread(target=kill_until, args=(stop, folder / "cells/untied-seed1"), daemon=True).start()
    assert driver.wait(300) == 1
    stop.set()
    study = read_study(folder)
    (killed,) = (row for row in study.rows if row.status != "done")
    assert (killed.arm, killed.seed, killed.status, killed.kind) == ("untied", 1, "failed", "killed")
    assert not study.contrasts()[0].broken, "it is lost at random"
    assert start(folder, longer).wait(300) == 0
    assert set(status(read_study(folder)).values()) == {"done"}


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_every_cell(words: list[str], tmp_path: Path, signum: int, code: int) -> None:
    folder = tmp_path / "out"
    words = [*words, "tokenizer.vocab_size=null", "trainer.max_steps=4000", "checkpoint.every=100000"]
    command = [sys.executable, str(ROOT / "scripts/ablate.py"), "ablation=smoke", f"output_dir={folder}", *words]
    heeding = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeding)
    wait_for(lambda: sum(RunFiles(one).steps() > 5 for one in folder.glob("cells/*-*[0-9a-f]")) == 2)
    driver.send_signal(signum)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == code
    assert "Traceback" not in said
    assert not workers_of(folder)
    assert len(list(folder.glob("cells/*/checkpoints/step-*"))) == 2  # no other step saves


@pytest.mark.slow
def test_the_script_answers_with_a_table_and_an_exit_code(script: Script, words: list[str], tmp_path: Path) -> None:
    words = [*words, "tokenizer.vocab_size=null"]
    answer = script("ablate", "ablation=smoke", "output_dir=out", *words)
    assert answer.returncode == 0, answer.stderr
    assert "untied" in answer.stdout
    assert "report.html" in answer.stdout
    again = script("report", "output_dir=out")
    assert again.returncode == 0, again.stderr
    assert again.stdout == answer.stdout
    failing = script(
        "ablate", "ablation=smoke", "output_dir=wild", *words, "optim.lr=1e15", "trainer.gradient_clip_val=0"
    )
    assert failing.returncode == 1
    assert "diverged" in failing.stdout
    assert json.loads((tmp_path / "wild/report.json").read_text())["cells"]["diverged"]


@pytest.mark.slow
def test_ctrl_c_while_the_workers_start_is_a_line_and_no_traceback(tmp_path: Path, corpus: Path) -> None:
    words = [*("ablation=smoke", "output_dir=out"), *SMALL, "tokenizer.vocab_size=null", f"data.path={corpus}"]
    command = [sys.executable, ROOT / "scripts/ablate.py", *words]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **options) as driver:
        assert driver.stdout
        wait_for((tmp_path / "out/ablation.json").exists)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: to all its processes
        said = driver.stdout.read()
    assert driver.returncode == 130
    assert "Traceback" not in said
    assert re.search("^interrupted; resume with: ", said, re.MULTILINE)
