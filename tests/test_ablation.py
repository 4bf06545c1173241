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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from lm.errors import UserError
from lm.lab.ablation.execute import ENGINES
from lm.lab.ablation.folder import (
    AblationRecord,
    Failure,
    RunFiles,
    default_dir,
    existing_record,
    lock_output_dir,
    read_record,
    write_record,
)
from lm.lab.ablation.plan import RunSpec
from lm.lab.ablation.question import AblateConfig
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import read_results
from lm.lab.ablation.warnings import report_warnings
from lm.training.train import train
from tests.helpers.ablation_folder import Page
from tests.helpers.ablations import (
    SHORT,
    Lab,
    draw_nothing,
    instant,
    losses,
    plan_in_a_moment,
    question,
    statuses,
    workers_of,
)
from tests.helpers.runs import composed, wait_for

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
THREE = {"tied": ["head=tied"], "untied": ["head=untied"], "copied": ["head=untied_from_embedding"]}


@pytest.fixture
def lab(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    plan_in_a_moment(monkeypatch)
    return Lab(tmp_path, corpus, SHORT)


Instantly = Callable[[Callable[[RunSpec], float | Failure]], list[str]]


@pytest.fixture
def instantly(monkeypatch: pytest.MonkeyPatch) -> Instantly:
    """Let runs end at once with a loss of their own; returns the list to which the name of each run is added."""

    def set_loss(loss: Callable[[RunSpec], float | Failure]) -> list[str]:
        executor = instant(loss)
        draw_nothing(monkeypatch)
        monkeypatch.setitem(ENGINES, "local", executor)
        return executor.made  # type: ignore[attr-defined, no-any-return]

    return set_loss


def summaries(results: Any) -> str:
    return " ".join(warning.summary for warning in report_warnings(results))


def near(spec: RunSpec) -> float:
    is_untied = spec.run.head.name == "untied"
    return 1 + 0.1 * is_untied + 0.001 * math.sin((9 + is_untied) * spec.run.seed)


# --- what is missing is made, and nothing else


@pytest.mark.nightly
def test_what_is_missing_is_made_and_nothing_else(lab: Lab) -> None:
    done = lab.run()
    first = lab.results()
    assert ({*statuses(done).values()}, len(first)) == ({"done"}, 4)
    files = {name: (lab.out / name).read_bytes() for name in ("ablation.json", "report.html", "results.csv")}
    lab.run()
    assert {name: (lab.out / name).read_bytes() for name in files} == files
    spec = next(spec for spec in lab.asked() if (spec.arm, spec.seed) == ("untied", 1))
    alone = train(replace(spec.run, run_dir=str(lab.root / "alone")))[1]
    whole = json.loads((lab.out / spec.run_dir / "result.json").read_text())
    clock = ("seconds", "tokens_per_second")
    assert {key: alone[key] for key in alone if key not in clock} == {k: whole[k] for k in whole if k not in clock}
    grown = lab.run(arms=THREE, seeds=[0, 1, 2])
    assert (len(lab.results()), first.items() <= lab.results().items()) == (9, True)
    assert {*statuses(grown).values()} == {"done"}
    lab.text.write_text(lab.text.read_text() + "another line\n" * 9)
    assert "9 finished runs in this folder no longer count" in lab.table(arms=THREE, seeds=[0])
    assert len(lab.results()) == 9


@pytest.mark.slow
def test_rows_of_results_csv_stand_for_runs_without_folders(lab: Lab, instantly: Instantly) -> None:
    made = instantly(near)
    before = lab.run(seeds=[0, 1, 2])
    n, kept = len(made), (lab.out / "results.csv").read_text()
    shutil.rmtree(lab.out / "runs")
    (lab.out / "report.html").unlink()  # so that all is written again
    after = lab.run(seeds=[0, 1, 2])
    assert "finished runs without a folder, read from results.csv: 6; " in lab.tables[-1]
    assert len(made) == n
    assert (lab.out / "results.csv").read_text() == kept
    assert after.contrasts == before.contrasts
    first = before.runs.run_dir[0]
    rows = [line for line in kept.splitlines() if first not in line]
    (lab.out / "results.csv").write_text("\n".join(rows) + "\n")
    again = lab.run(seeds=[0, 1, 2])
    assert made[n:] == [first], "a run without a row is made"
    assert losses(again) == losses(before)
    fewer = lab.run(seeds=[0, 1])
    assert [*fewer.runs.purpose].count("unused") == 2
    assert (lab.out / "results.csv").read_text().count(",unused,") == 2, "rows that are not asked for are kept"


@pytest.mark.slow
def test_what_is_asked_anew_of_the_same_runs_is_reported_and_a_changed_design_is_told(
    lab: Lab, instantly: Instantly
) -> None:
    made = instantly(near)
    first = lab.run(seeds=[0, 1, 2])
    assert json.loads((lab.out / "report.json").read_text())["contrasts"][0]["verdict"] == "worse"
    assert "design" not in summaries(first)
    assert "Design: unchanged since before the first result." in (lab.out / "report.md").read_text()
    again = lab.run(seeds=[0, 1, 2], equivalence_margin=9.0)
    assert json.loads((lab.out / "report.json").read_text())["equivalence_margin"] == 9.0
    assert read_record(lab.out).question.equivalence_margin == 9.0
    assert "The design changed after 6 results." in summaries(again)
    lab.run(seeds=[0, 1, 2], equivalence_margin=8.0, report=False)
    lab.run(seeds=[0, 1, 2], equivalence_margin=8.0)
    assert json.loads((lab.out / "report.json").read_text())["equivalence_margin"] == 8.0, (
        "a stale report is drawn again"
    )
    assert "refresh" not in Page(lab.out).meta
    more = lab.run(seeds=[0, 1, 2, 3], arms=THREE, equivalence_margin=9.0)
    assert (len(made), "The design changed after 6 and 6 and 6 results." in summaries(more)) == (12, True)


def test_runs_of_a_folder_are_of_one_question(lab: Lab, instantly: Instantly) -> None:
    """Two files of one name never share a folder, and a question in it may only grow."""
    made = instantly(near)
    lab.run(seeds=[0])
    files = {path: path.read_bytes() for path in lab.out.rglob("*") if path.is_file()}
    others: list[dict[str, Any]] = [
        {"arms": {"tied": ["head=tied"], "other": ["head=untied", "model.d_ff=48"]}, "primary": []},
        {"arms": {"tied": ["head=tied"], "untied": ["head=untied", "model.d_ff=48"]}},
        {"overrides": ["optim.lr=0.01"]},
    ]
    for changes in others:
        with pytest.raises(UserError, match=r"out: holds another ablation, with finished runs of (un)?tied \("):
            lab.run(**changes, seeds=[0])
    assert {path: path.read_bytes() for path in lab.out.rglob("*") if path.is_file()} == files
    lab.run(seeds=[0, 1], arms=THREE, baseline="untied", primary=[])
    assert len(made) == 6, "arms and seeds are added, and the baseline changes"


@pytest.mark.slow
def test_the_page_is_written_while_the_runs_are_made(
    lab: Lab, instantly: Instantly, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def until_the_fourth(spec: RunSpec) -> float:
        if len(made) > 3:
            raise KeyboardInterrupt
        return near(spec)

    made = instantly(until_the_fourth)
    monkeypatch.setattr("lm.lab.ablation.ablate.REPORT_SHARE", 1e9)
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    page = (lab.out / "report.html").read_text()
    assert "Results so far" in page
    assert 'http-equiv="refresh"' in page, "it is written again"
    assert (lab.out / "results.csv").read_text().count(",done,") == 2
    write_report(read_results(lab.out))
    assert "refresh" not in Page(lab.out).meta, "nobody is at work there any more"
    assert "results so far: " in capsys.readouterr().err


def test_runs_of_other_code_are_refused(lab: Lab, instantly: Instantly, monkeypatch: pytest.MonkeyPatch) -> None:
    made = instantly(near)
    monkeypatch.setattr("lm.lab.ablation.arms.code_hash", lambda classes: "first")
    lab.run(seeds=[0])
    files = {path: path.read_bytes() for path in lab.out.rglob("*") if path.is_file()}
    monkeypatch.setattr("lm.lab.ablation.arms.code_hash", lambda classes: "second")
    message = r"out: holds 2 finished runs of other code \(tied, untied\); name another output_dir=DIR, or install"
    for changes in ({"seeds": [0]}, {"seeds": [0, 1]}):
        with pytest.raises(UserError, match=message):
            lab.run(**changes)
    assert {path: path.read_bytes() for path in lab.out.rglob("*") if path.is_file()} == files
    assert len(made) == 2


@pytest.mark.nightly
def test_arms_that_diverge_or_fail_are_recorded_and_the_rest_go_on(lab: Lab) -> None:
    arms = {
        "good": ["head=tied"],
        "wild": ["head=tied", "optim.lr=1e15", "trainer.gradient_clip_val=0"],
        "broken": ["head=tied", "model.linear=tests.helpers.layers.Brittle"],
    }
    asked: dict[str, Any] = {"arms": arms, "baseline": "good", "primary": [], "seeds": [0]}
    results = lab.run(**asked)
    ends = {"good": "done", "wild": "diverged", "broken": "failed"}
    assert statuses(results) == {(arm, 0): ends[arm] for arm in arms}
    (error,) = {run.error for run in results.runs.itertuples() if run.arm == "broken"}
    assert "a crack | in the glass" in error
    logs = {path.name: path.read_text().count("Traceback") for path in lab.out.glob("runs/*.log")}
    assert lab.run(**asked).counts()["failed"] == 1
    for path in lab.out.glob("runs/*.log"):  # it would diverge again, and what failed may have been mended
        is_repeated = path.read_text().count("Traceback") > logs[path.name]
        assert is_repeated == path.name.startswith("broken")


@pytest.mark.nightly
def test_a_text_edited_while_runs_go_on_gives_no_verdict_of_two_texts(lab: Lab) -> None:
    def edit() -> None:
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


# --- folders


@pytest.mark.slow
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(lab: Lab, instantly: Instantly) -> None:
    instantly(lambda spec: 1.0)
    lab.out.mkdir()
    (lab.out / ".partial-host-1-0-ablation.json").touch()  # as a kill leaves it in the first write
    lab.run(seeds=[0])
    (lab.root / "stranger").mkdir()
    (lab.root / "stranger/thesis.txt").touch()
    before = sorted(path for path in lab.root.rglob("*") if "cache" not in path.parts)
    for folder, typed, message in (
        ("out", ["optim.lr=0.5"], r"^output_dir=.*/out: holds another ablation, with finished runs of tied"),
        ("stranger", [], "^output_dir=.*/stranger: holds no ablation"),
        ("/proc/nowhere", [], "^output_dir=/proc/nowhere: cannot be written to"),
        ("new/out", ["data.path=absent.txt"], "absent"),
    ):
        with pytest.raises(UserError, match=message):
            lab.run(*typed, folder=folder)
    with lock_output_dir(lab.out), pytest.raises(UserError, match=r"^output_dir=.*: another process is at"):
        lab.run(seeds=[0, 1])
    assert sorted(path for path in lab.root.rglob("*") if "cache" not in path.parts) == before


def folder_of(*overrides: str) -> Path:
    return default_dir(AblateConfig(ablation=question(), overrides=[*overrides]))


def test_overrides_in_another_order_or_spelling_have_one_folder(tmp_path: Path) -> None:
    typed = ["optim.lr=0.03", "model.d_ff=48", "data.path='a b.txt'", "optim.betas=[0.9,1.0]"]
    other = ["optim.lr=9", "data.path=a b.txt", "+optim={betas: [0.9, 1.0], lr: 0.030}", "model.d_ff=48.0"]
    assert folder_of(*typed) == folder_of(*typed[::-1]) == folder_of(*other)
    assert (str(folder_of()), len(str(folder_of(*typed)))) == ("ablations/test", len("ablations/test-12345678"))
    others = [["optim.lr=0.031"], ["optim.lr=0.3"], ["model.d_ff=48"], ["data.path=it's.txt"], ["data.path=its.txt"]]
    assert len({folder_of(*words) for words in (typed, *others)}) == 1 + len(others)
    write_record(AblationRecord(question=question(), overrides=typed), tmp_path)
    assert existing_record(tmp_path, AblateConfig(ablation=question(), overrides=other)), "named by output_dir"


LOOKS: dict[str, Any] = {"seeds": [0, 1, 2, 3], "looks": [3, 4]}


@pytest.mark.nightly
def test_a_look_that_decides_ends_the_ablation(lab: Lab, instantly: Instantly) -> None:
    made = instantly(near)
    results = lab.run(**LOOKS)
    assert (len(made), {*results.reported.seed}, len(read_record(lab.out).runs)) == (6, {0, 1, 2}, 6)
    assert "decided with 3 of 4 seeds, so 2 runs were not made" in (lab.out / "report.md").read_text()
    again = lab.run(**LOOKS)
    assert (len(made), {*again.reported.seed}) == (6, {0, 1, 2}), "a later call finds it decided"
    assert "decided with 3 of 4 seeds" in lab.tables[-1]
    assert "design" not in summaries(again)
    assert "The design changed after 6" in summaries(lab.run(seeds=[0, 1, 2, 3]))
    assert len(made) == 8


@pytest.mark.slow
def test_a_run_that_fails_holds_up_no_other_and_counts_once_it_is_there(lab: Lab, instantly: Instantly) -> None:
    broken = {"untied-seed1"}

    def loss(spec: RunSpec) -> float | Failure:
        if any(name in spec.run_dir for name in broken):
            return Failure.ERROR
        return near(spec)

    made = instantly(loss)
    results = lab.run(**LOOKS)
    assert results.counts() == {"done": 7, "failed": 1, "diverged": 0, "missing": 0}
    assert "1 of 8 runs have failed" in summaries(results)
    assert results.record.ended is None, "not all runs have ended"
    assert [name.rpartition("-")[0] for name in made].count("runs/untied-seed1") == 2, "it is tried twice"
    broken.clear()
    counts = lab.run(seeds=[0, 1, 2, 3]).counts()
    assert counts == {"done": 8, "failed": 0, "diverged": 0, "missing": 0}
    assert (len(made), made[-1].rpartition("-")[0]) == (10, "runs/untied-seed1")


TUNED: dict[str, Any] = {"tune": "optim.lr", "seeds": [0, 1, 2], "overrides": ["optim.lr=0.02"]}
OPTIMUM = {"tied": 0.08, "untied": 0.03}  # of the learning rate


def bowl(spec: RunSpec) -> float:
    """A loss with the same shape for all arms and its lowest point at OPTIMUM."""
    far = math.log2(spec.run.optim.lr / OPTIMUM[spec.run.head.name])
    return 1 + 0.1 * far**2 + 1e-4 * math.sin(9 * spec.run.seed + spec.factor)


@pytest.mark.slow
def test_every_arm_is_scored_at_its_own_best_value(lab: Lab, instantly: Instantly) -> None:
    made = instantly(bowl)
    results = lab.run(**TUNED)
    best = {arm: 0.02 * (ladder.best or 0.0) for arm, ladder in results.ladders.items()}
    assert best == pytest.approx(OPTIMUM, rel=0.03)
    scored = {arm: [*ladder.scores.values()] for arm, ladder in results.ladders.items()}
    assert [*scored["tied"], *scored["untied"]] == pytest.approx([1.0] * 6, abs=1e-3), "both, at their best"
    assert len(made) == len({*made}) == len(results.runs), "the runs of the pilot count in the ladder"
    assert results.runs.purpose.value_counts().to_dict() == {"reported": 2 * 5 * 3, "pilot": 2 * 2 + 1 * 2}
    page = Page(lab.out)
    assert "Best values" in page.headings
    assert (lab.out / "figures/ladder.svg").exists()
    lab.run(**TUNED)
    assert len(made) == len({*made})
    grown = lab.run(**TUNED | {"seeds": [0, 1, 2, 3]})
    assert (len(made), grown.contrasts[0].n_seeds) == (len(results.runs) + 10, 4)
    assert results.is_whole()


@pytest.mark.slow
def test_a_value_that_fails_twice_is_dropped_and_the_question_goes_on(lab: Lab, instantly: Instantly) -> None:
    made = instantly(lambda spec: Failure.ERROR if (spec.arm, spec.factor, spec.seed) == ("tied", 4, 1) else bowl(spec))
    results = lab.run(**TUNED)
    assert results.ladders["tied"].dropped == [4.0]
    assert 0.02 * (results.ladders["tied"].best or 0.0) == pytest.approx(0.057, abs=0.003), "the upper end that is left"
    assert results.contrasts[0].n_seeds == 3
    twice = {name for name in made if made.count(name) == 2}
    assert {name.rpartition("-")[0] for name in twice} == {"runs/tied-seed1"}
    assert max(map(made.count, made)) == 2
    assert results.record.ended is None
    planned = lab.run(**TUNED, plan_only=True)
    assert planned.runs.purpose.tolist() == results.runs.purpose.tolist(), "what was decided stays until it is mended"
    mended = instantly(bowl)
    assert lab.run(**TUNED).ladders["tied"].dropped == []
    assert twice <= {*mended}, "the same command makes it again"


@pytest.mark.slow
def test_an_arm_that_never_trains_gets_no_ladder(lab: Lab, instantly: Instantly) -> None:
    made = instantly(lambda spec: math.nan if spec.arm == "untied" else bowl(spec))
    results = lab.run(**TUNED)
    assert (results.contrasts[0].verdict, results.contrasts[0].untrainable) == ("worse", ["untied"])
    assert len([name for name in made if "untied" in name]) <= 2 * 9 + 3
    assert results.is_whole()


@pytest.mark.slow
def test_a_run_that_is_lost_keeps_its_seed_out_and_no_value(lab: Lab, instantly: Instantly) -> None:
    instantly(lambda spec: Failure.KILLED if (spec.arm, spec.seed) == ("tied", 2) and spec.factor == 4 else bowl(spec))
    results = lab.run(**TUNED)
    assert results.ladders["tied"].dropped == []
    assert results.contrasts[0].seeds == [0, 1]
    instantly(bowl)
    assert lab.run(**TUNED).contrasts[0].seeds == [0, 1, 2]


@pytest.mark.nightly
def test_a_known_effect_is_found_and_a_known_null_is_not(lab: Lab) -> None:
    """Real runs: a tied matrix at N(0, 1), the common mistake, and a configuration against itself."""
    asked: dict[str, Any] = {"seeds": [0, 1, 2, 3, 4], "folds": True, "primary": [], "equivalence_margin": None}
    naive = lab.run(
        "trainer.max_steps=60", arms={"tied": ["head=tied"], "naive": ["head=tied_naive"]}, baseline="tied", **asked
    )
    assert naive.contrasts[0].verdict == "worse", naive.contrasts[0].sentence
    null = lab.run(
        "trainer.max_steps=60",
        folder="null",
        arms={"one": [], "other": []},
        baseline="one",
        seed_offsets={"other": 500},
        **asked,
    )
    assert (null.contrasts[0].p or 0.0) > 0.01, null.contrasts[0].sentence


def driver(lab: Lab, *overrides: str, **options: Any) -> subprocess.Popen[str]:
    """ablate.py in a process of its own; as a shell starts it, with Ctrl-C on."""
    words = [*lab.overrides(), "tokenizer.vocab_size=null", f"output_dir={lab.out}", "workers=2", *overrides]
    command = [sys.executable, str(ROOT / "scripts/ablate.py"), "ablation=smoke", *words]
    on = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, preexec_fn=on, start_new_session=True, **(streams | options))


def wait_for_runs(lab: Lab, n: int, steps: int) -> None:
    """Until so many runs have made so many steps."""

    def are_there() -> bool:
        time.sleep(0.05)  # a busy loop would take the cores that the runs need
        return sum(RunFiles(path).steps() >= steps for path in lab.out.glob("runs/*-*[0-9a-f]")) >= n

    wait_for(are_there, 300)


@pytest.mark.nightly
@needs_proc
def test_a_driver_that_is_killed_loses_nothing(lab: Lab) -> None:
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
        ([signal.SIGTERM, signal.SIGHUP], 143, True),
        pytest.param([signal.SIGINT], 130, True, marks=pytest.mark.nightly),
        pytest.param([signal.SIGTERM], 143, True, marks=pytest.mark.nightly),
        pytest.param([signal.SIGINT], 130, False, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupt_saves_every_run(lab: Lab, signums: list[int], code: int, is_training: bool) -> None:
    """Also where its process group has the signals, as a terminal, systemd and Slurm send them."""
    process = driver(lab, "trainer.max_steps=9000", "checkpoint.every=100000", stderr=subprocess.PIPE)
    assert process.stderr
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


VERDICTS = [
    (-0.5, 0.001, "better", 0),
    (0.5, 0.001, "worse", 10),
    (0, 0.001, "equivalent", 11),
    (0, 1, "undecided", 12),
]


@pytest.mark.slow
def test_the_answer_is_one_json_object_and_an_exit_code(lab: Lab, instantly: Instantly, command: Any) -> None:
    noise = [0.0, 0.3, -0.4, 0.1]
    words = ["ablation=smoke", *lab.overrides(), "tokenizer.vocab_size=null", "ablation.seeds=[0,1,2,3]", "json=true"]
    words += ["report=false"]
    for difference, spread, verdict, code in VERDICTS:
        plus = [difference + spread * value for value in noise]
        instantly(lambda spec, plus=plus: 3 + plus[spec.run.seed] * (spec.run.head.name == "untied"))
        left, out, err = command("ablate", *words, f"output_dir={verdict}", "exit_code=verdict")
        assert (left, json.loads(out)["contrasts"][0]["verdict"]) == (code, verdict), err
        assert not Path(verdict, "report.html").exists()
    again, table, _ = command("report", "output_dir=undecided", "exit_code=verdict")
    assert (again, "report.html" in table) == (code, True)
    assert command("report", "output_dir=undecided", "json=true")[:2] == (0, out)


@pytest.mark.nightly
def test_exit_codes_of_the_command(lab: Lab, instantly: Instantly, command: Any) -> None:
    made = instantly(lambda spec: Failure.ERROR if spec.run.seed else 1.0)
    words = ["ablation=smoke", "output_dir=out", *lab.overrides(), "tokenizer.vocab_size=null"]
    two = ['+ablation.arms.gelu=["model.ffn=gelu"]', "ablation.primary=[untied,gelu]"]
    code, out, err = command("ablate", *words, *two, "exit_code=verdict")
    assert (code, out, made) == (2, "", [])
    assert err.splitlines()[-1].startswith("error: exit_code=verdict: ")
    assert not lab.out.exists()
    code, out, _ = command("ablate", *words, "plan_only=true")
    assert (code, "0 done" in out, made, lab.out.exists()) == (0, True, [], False)
    code, out, _ = command("ablate", *words, "exit_code=verdict")
    assert (code, out.count("failed: runs/")) == (1, 2)
    assert command("ablate", *words, "plan_only=true")[0] == 0, "the same ablation"
    assert command("report", "output_dir=out")[:2] == (0, out)
    assert command("report", "output_dir=.", "json=true")[:2] == (2, ""), "of one ablation"
