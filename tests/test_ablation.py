"""An ablation at work: it makes what is missing and nothing else, whatever happens to a run, a driver or a text."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lm.lab.ablation.execute import EXECUTORS
from lm.lab.ablation.folder import (
    RunFiles,
    lock_output_dir,
    read_record,
)
from lm.lab.ablation.results import read_results
from lm.lab.ablation.warnings import report_warnings
from lm.training.train import train
from tests.helpers import ROOT
from tests.helpers.ablation_folder import numbers
from tests.helpers.ablations import SHORT, Lab, draw_nothing, instant, plan_in_a_moment, statuses, workers_of
from tests.helpers.refusals import refused
from tests.helpers.runs import composed, files, wait_for

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
THREE = {"tied": ["head=tied"], "untied": ["head=untied"], "copied": ["head=untied_from_embedding"]}


@pytest.fixture
def lab(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan_in_a_moment(monkeypatch)
    return Lab(tmp_path, corpus, SHORT)


@pytest.fixture
def instantly(monkeypatch):
    """Let runs end at once with a loss of their own; returns the list to which the name of each run is added."""

    def set_loss(loss):
        engine = instant(loss)
        draw_nothing(monkeypatch)
        monkeypatch.setitem(EXECUTORS, "local", engine)
        return engine.made

    return set_loss


def summaries(results):
    return " ".join(warning.summary for warning in report_warnings(results))


def near(spec):
    is_untied = spec.run.head.name == "untied"
    return 1 + 0.1 * is_untied + 0.001 * math.sin((9 + is_untied) * spec.run.seed)


# --- what is missing is made, and nothing else


@pytest.mark.slow
def test_what_is_missing_or_failed_is_made_and_nothing_else(lab, instantly, capsys):
    """Whatever became of the runs of an earlier call."""
    ends = {("tied", 1): math.nan, ("untied", 1): "failed", ("untied", 2): "killed"}
    made = instantly(lambda spec: ends.get((spec.arm, spec.seed), near(spec)))
    asked = {"seeds": [0, 1, 2, 3]}
    first = lab.run(**asked)
    assert first.counts() == {"done": 5, "failed": 1, "killed": 1, "diverged": 1, "missing": 0}
    assert "run 8 of 8: " in (shown := capsys.readouterr().err), "runs that are tried twice count once"
    assert "of 10" not in shown
    said = summaries(first)
    assert "1 of 8 runs have failed" in said
    assert "1 of 8 runs were killed from outside" in said
    names = {(run.arm, run.seed): run.run_dir for run in first.record.runs}
    failed = {names["untied", 1], names["untied", 2]}
    assert {name for name in made if made.count(name) == 2} == failed, "a run that fails is tried twice"
    shutil.rmtree(lab.out / names["tied", 2])
    shutil.rmtree(lab.out / names["tied", 3])
    path = lab.out / "results.csv"  # which has lost the row of the last
    path.write_text("".join(line for line in path.read_text().splitlines(True) if names["tied", 3] not in line))
    made = instantly(near)
    again = lab.run(**asked)
    assert {*made} == failed | {names["tied", 3]}, "a row stands for a run without a folder"
    assert again.counts() == {"done": 7, "failed": 0, "killed": 0, "diverged": 1, "missing": 0}
    before = files(lab.out)
    lab.run(**asked)
    assert (files(lab.out), len(made)) == (before, 3), "all is there"
    (lab.out / "report.html").unlink()
    lab.run(**asked)
    assert ((lab.out / "report.html").exists(), len(made)) == (True, 3)
    other = lab.run(seeds=[0, 1, 2], arms=THREE, baseline="untied", primary=[])
    assert len(made) == 6, "an arm is added, and the baseline changes"
    assert other.runs.run_dir[other.runs.purpose == "unused"].tolist() == [names["tied", 3], names["untied", 3]]
    back = lab.run(**asked)
    assert {*back.runs.arm[back.runs.purpose == "unused"]} == {"copied"}, "an arm that is left out keeps its rows"
    assert (len(made), back.is_whole()) == (6, True), "and a seed may come back"


def test_a_seed_keeps_its_part_of_the_text(lab, instantly):
    """Also one that was left out in between."""
    made = instantly(near)
    for seeds in ([0, 1, 2], [9, 2, 0, 1], [2], [9, 1], [9, 2, 0, 1]):
        lab.run(seeds=seeds, folds=True)
    assert len(made) == 8
    too_many = r"^ablation\.seeds: 11 seeds, 4 of them from earlier calls, need 11 .* makes 10"
    with refused(too_many):
        lab.plan(seeds=[*range(20, 27)], folds=True)


@pytest.mark.slow
def test_what_is_asked_anew_of_the_same_runs_is_reported_and_a_changed_design_is_told(lab, instantly, monkeypatch):
    made = instantly(near)
    words = ["optim.lr=0.03", "optim.weight_decay=0.1"]
    lab.run(*words, primary=[])
    again = lab.run(*words[::-1])
    assert "design" not in summaries(again), "words in another order are no other design"
    assert "texts): not changed after the first result." in (lab.out / "report.md").read_text()
    again = lab.run(*words, equivalence_margin=9.0)
    assert (numbers(lab.out)["equivalence_margin"], read_record(lab.out).question.equivalence_margin) == (9.0, 9.0)
    assert "The design changed after 4 results." in summaries(again)
    assert len(made) == 4
    lab.text.write_text(lab.text.read_text()[::-1])
    lab.plan(*words, seeds=[0])
    assert "4 finished runs in this folder no longer count" in lab.tables[-1]
    monkeypatch.chdir(lab.out)  # in which the path of the text is another one
    lab.plan(*words, f"data.path=../{lab.text.name}", seeds=[0])
    assert "4 finished runs in this folder no longer count" in lab.tables[-1]
    assert len(lab.results()) == 4


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(lab, instantly, monkeypatch):
    made = instantly(near)
    lab.out.mkdir()
    (lab.out / ".partial-host-1-0-ablation.json").touch()  # as a kill leaves it in the first write
    lab.run(seeds=[0])
    (lab.root / "stranger").mkdir()
    (lab.root / "stranger/thesis.txt").touch()
    before = files(lab.root)
    another = r"^output_dir=.*/out: holds finished runs of another (un)?tied \(1; .*type output_dir=out-new$"
    others = {"arms": {"a": ["head=tied"], "b": ["head=untied"]}, "baseline": "a", "primary": []}
    for typed, changes, message in (
        ([], {"arms": {"tied": ["head=tied"], "untied": THREE["copied"]}}, another),
        (["optim.lr=0.01"], {}, another),
        ([], others, r"finished runs of other arms \(1 of tied, 1 of untied\); to ask in another folder, type"),
        ([], {"folder": "stranger"}, "^output_dir=.*/stranger: holds no ablation"),
        ([], {"folder": "/proc/nowhere"}, "^output_dir=/proc/nowhere: cannot be written to"),
        (["data.path=absent.txt"], {"folder": "new/out"}, "absent"),
    ):
        with refused(message):
            lab.run(*typed, **{"seeds": [0]} | changes)
    with lock_output_dir(lab.out), refused(r"^output_dir=.*: another process is at"):
        lab.run(seeds=[0, 1])
    monkeypatch.setattr("lm.lab.ablation.arms.code_hash", lambda classes: "other")
    with refused(r"of another tied \(1; of other code: install the version of lm"):
        lab.run(seeds=[0, 1])
    assert {path: content for path, content in files(lab.root).items() if path in before} == before
    assert (len(made), (lab.root / "new").exists()) == (2, False)
    monkeypatch.chdir(lab.out)
    lab.root = Path()
    with refused(r"^output_dir=\.: .*type output_dir=\.\./out-new$"):
        lab.run(seeds=[0], folder=".")


# --- calls that end early


def test_a_look_that_decides_ends_the_ablation(lab, instantly):
    made = instantly(near)
    for _ in range(2):  # a later call finds it decided
        results = lab.run(seeds=[0, 1, 2, 3], looks=[3, 4])
        assert (len(made), {*results.reported.seed}, len(read_record(lab.out).runs)) == (6, {0, 1, 2}, 6)
    assert "decided with 3 of 4 seeds, so 2 runs were not made" in (lab.out / "report.md").read_text()
    assert "decided with 3 of 4 seeds" in lab.tables[-1]


def test_a_look_that_has_passed_decides_nothing_afterwards(lab, instantly):
    """A run before the look has failed, so the others were made; now it is made too."""
    instantly(lambda spec: "failed" if (spec.arm, spec.seed) == ("tied", 1) else near(spec))
    asked = {"seeds": [0, 1, 2, 3, 4], "looks": [3, 5]}
    assert lab.run(**asked).counts()["done"] == 9
    instantly(near)
    results = lab.run(**asked)
    assert (results.counts()["done"], {*results.reported.seed}) == (10, {0, 1, 2, 3, 4})


# --- tuned arms

TUNED = {"tune": "optim.lr", "seeds": [0, 1, 2], "overrides": ["optim.lr=0.02"]}
OPTIMUM = {"tied": 0.08, "untied": 0.03}  # of the learning rate


def bowl(spec):
    """A loss with the same shape for all arms and its lowest point at OPTIMUM."""
    far = math.log2(spec.run.optim.lr / OPTIMUM[spec.run.head.name])
    return 1 + 0.1 * far**2 + 1e-4 * math.sin(9 * spec.run.seed + spec.factor)


@pytest.mark.slow
def test_every_arm_is_scored_at_its_own_best_value(lab, instantly):
    made = instantly(bowl)
    results = lab.run(**TUNED)
    best = {arm: 0.02 * (ladder.best or 0.0) for arm, ladder in results.ladders.items()}
    assert best == pytest.approx(OPTIMUM, rel=0.03)
    scored = [score for ladder in results.ladders.values() for score in ladder.scores.values()]
    assert scored == pytest.approx([1.0] * 6, abs=1e-3), "both, at their best"
    assert len(made) == len({*made}) == len(results.runs), "the runs of the pilot count in the ladder"
    assert results.runs.purpose.value_counts().to_dict() == {"reported": 2 * 5 * 3, "pilot": 2 * 2 + 1 * 2}
    assert results.is_whole()
    grown = lab.run(**TUNED | {"seeds": [0, 1, 2, 3]})
    assert (len(made), grown.contrasts[0].n_seeds) == (len(results.runs) + 10, 4)


@pytest.mark.slow
def test_a_value_that_fails_twice_is_dropped_and_a_lost_run_keeps_its_seed_out_until_they_are_made(lab, instantly):
    ends = {("tied", 4, 1): "failed", ("untied", 1, 2): "killed"}
    made = instantly(lambda spec: ends.get((spec.arm, spec.factor, spec.seed)) or bowl(spec))
    results = lab.run(**TUNED)
    assert {arm: ladder.dropped for arm, ladder in results.ladders.items()} == {"tied": [4.0], "untied": []}
    assert 0.02 * (results.ladders["tied"].best or 0.0) == pytest.approx(0.057, abs=0.003), "the upper end that is left"
    assert results.contrasts[0].seeds == [0, 1]
    twice = {name for name in made if made.count(name) == 2}
    assert {name.rpartition("-")[0] for name in twice} == {"runs/tied-seed1", "runs/untied-seed2"}
    planned = lab.run(**TUNED, plan_only=True)
    assert planned.runs.purpose.tolist() == results.runs.purpose.tolist(), "what was decided stays until it is mended"
    mended = instantly(bowl)
    after = lab.run(**TUNED)
    assert (after.ladders["tied"].dropped, after.contrasts[0].seeds) == ([], [0, 1, 2])
    assert twice <= {*mended}, "the same command makes them again"


def test_an_arm_that_fails_at_its_own_value_is_not_tuned(lab, instantly, capsys):
    """Another learning rate would mend neither code nor machine."""
    made = instantly(lambda spec: "failed" if (spec.arm, spec.seed) == ("untied", 1) else bowl(spec))
    results = lab.run(**TUNED)
    assert {run.factor for run in results.reported.itertuples() if run.arm == "untied"} == {1.0}
    assert sum("/untied" in name for name in {*made}) == 3 * 2 + 1, (
        "the pilot begins with three values, and goes no further"
    )
    sentence = results.answers()[0].sentence
    assert "untied failed at the value of the configuration, so it was not tuned" in sentence
    assert "untied at 1 times its optim.lr, seed 1, second try, failed" in capsys.readouterr().err
    instantly(bowl)
    assert lab.run(**TUNED).contrasts[0].n_seeds == 3, "once the run is made, the same command tunes"


# --- real runs


@pytest.mark.nightly
def test_arms_that_diverge_or_fail_are_recorded_and_the_rest_go_on(lab):
    arms = {
        "good": ["head=tied"],
        "wild": ["head=tied", "optim.lr=1e15", "trainer.gradient_clip_val=0"],
        "broken": ["head=tied", "model.linear=tests.helpers.layers.Brittle"],
    }
    results = lab.run(arms=arms, baseline="good", primary=[], seeds=[0])
    assert statuses(results) == {("good", 0): "done", ("wild", 0): "diverged", ("broken", 0): "failed"}
    (error,) = results.runs.error[results.runs.arm == "broken"]
    assert "a crack | in the glass" in error


@pytest.mark.nightly
def test_a_text_edited_while_runs_go_on_gives_no_verdict_of_two_texts(lab):
    def edit():
        wait_for(lambda: [*lab.out.glob("runs/*/*.csv")])
        lab.text.write_text(lab.text.read_text() + "another line\n" * 9)

    (thread := threading.Thread(target=edit)).start()
    results = lab.run()
    thread.join()
    planned = lab.plans[-1].arms["tied"].identity["data_hash"]
    assert {run.data_hash for run in results.runs.itertuples() if run.status == "done"} == {planned}
    errors = [run.error for run in results.runs.itertuples() if run.status == "failed"]
    assert errors
    assert all("has changed since" in error for error in errors)


def driver(lab, *overrides, **options):
    """ablate.py in a process of its own; as a shell starts it, with Ctrl-C on."""
    words = [*lab.overrides(), "tokenizer.vocab_size=null", f"output_dir={lab.out}", "workers=2", *overrides]
    command = [sys.executable, str(ROOT / "scripts/ablate.py"), "ablation=smoke", *words]
    on = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, preexec_fn=on, start_new_session=True, **(streams | options))


def wait_for_runs(lab, n, steps):
    """Until so many runs have made so many steps."""

    def are_there():
        time.sleep(0.05)  # a busy loop would take the cores that the runs need
        return sum(RunFiles(path).steps() >= steps for path in lab.out.glob("runs/*-*[0-9a-f]")) >= n

    wait_for(are_there, 300)


@pytest.mark.nightly
@needs_proc
def test_a_driver_that_is_killed_loses_nothing(lab):
    words = ["trainer.max_steps=60", "ablation.seeds=[0,1]"]
    process = driver(lab, *words)
    wait_for_runs(lab, 1, 20)
    process.kill()
    process.wait()
    wait_for(lambda: not workers_of(lab.out), 30)  # they end with it
    before = lab.results()
    assert driver(lab, *words).wait(300) == 0
    assert before.items() <= lab.results().items()
    results = read_results(lab.out)
    resumed = [run for run in results.runs.itertuples() if run.resumed_from]
    assert (len(results.runs), resumed != []) == (4, True), "they went on, not anew"
    alone = replace(composed(f"run_dir={lab.out / resumed[0].run_dir}"), run_dir=str(lab.root / "alone"))
    assert train(alone)[1]["val_loss"] == resumed[0].val_loss


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("signums", "code", "is_training"),
    [
        ([signal.SIGINT], 130, False),
        pytest.param([signal.SIGINT], 130, True, marks=pytest.mark.nightly),
        pytest.param([signal.SIGTERM], 143, True, marks=pytest.mark.nightly),
        pytest.param([signal.SIGTERM, signal.SIGHUP], 143, True, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupt_saves_every_run(lab, signums, code, is_training):
    """Also where its process group has the signals, as a terminal, systemd and Slurm send them."""
    process = driver(lab, "trainer.max_steps=9000", "checkpoint.every=100000", stderr=subprocess.PIPE)
    while "to go, as measured" not in (line := process.stderr.readline()):
        assert line
    if is_training:
        wait_for_runs(lab, 2, 5)
    for signum in signums:
        (process.send_signal if signums == [signal.SIGTERM] else partial(os.killpg, process.pid))(signum)
        time.sleep(0.05)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert ("; resume with: " in err) == lab.out.exists() >= is_training
    assert not workers_of(lab.out)
    assert len([*lab.out.glob("runs/*/checkpoints/step-*")]) == 2 * is_training  # no other step saves


# --- the command


@pytest.mark.slow
def test_the_answer_of_the_command_is_a_table_or_one_json_object_and_an_exit_code(lab, instantly, command):
    """An exit code for each verdict: tests/test_rows.py."""
    made = instantly(near)
    words = ["ablation=smoke", "output_dir=out", *lab.overrides(), "tokenizer.vocab_size=null", "exit_code=verdict"]
    two = ['+ablation.arms.gelu=["model.ffn=gelu"]', "ablation.primary=[untied,gelu]"]
    code, out, err = command("ablate", *words, *two)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: exit_code=verdict: "), "before a run is made"
    code, out, _ = command("ablate", *words, "plan_only=true")
    assert (code, "0 done" in out, made, lab.out.exists()) == (1, True, [], False), "0 would say: better"
    asked = [*words, "ablation.seeds=[0,1,2]", "json=true"]
    code, out, err = command("ablate", *asked)
    assert (code, json.loads(out)["contrasts"][0]["verdict"]) == (10, "worse"), err
    assert command("report", "output_dir=out", "json=true")[:2] == (0, out)
    assert command("report", "output_dir=.", "json=true")[:2] == (2, ""), "of one ablation"
    instantly(lambda spec: "failed")
    code, out, _ = command("ablate", *words, "ablation.seeds=[0,1,2,3]")
    assert (code, out.count("failed: runs/"), "add tune=true" in out) == (1, 2, False), "a failure asks for its mending"
