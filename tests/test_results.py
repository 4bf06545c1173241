"""lm.lab.results: what its frames hold and leave out, their types, and what a damaged folder says."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from lm.config import RunConfig
from lm.lab.ablation.execute import describe_exit_code
from lm.lab.ablation.folder import RunFiles
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import read_results
from lm.lab.results import contrasts, curves, runs
from tests.helpers import ROOT
from tests.helpers.ablation_folder import make, write, write_run_dir
from tests.helpers.ablations import draw_nothing
from tests.helpers.refusals import refused
from tests.helpers.runs import files
from tests.helpers.tiny import HEADS

STUDIES = ROOT / "docs/studies"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An ablation of four arms and five seeds without the folders of its runs."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        path = make(tmp_path_factory.mktemp("whole") / "study", seeds=range(5))
    shutil.rmtree(path / "runs")
    return path


@pytest.fixture
def study(whole, tmp_path):
    """The same, to be changed."""
    return Path(shutil.copytree(whole, tmp_path / "top/study"))


def of(study, arm, seed):
    return RunFiles(study / f"runs/{arm}-seed{seed}-1000")


# --- an ablation


def test_reported_runs_alone_are_rows_and_those_of_the_first_budget():
    table = pd.read_csv(STUDIES / "tying/adamw_longer/results.csv")
    assert {*table.purpose} == {"trial", "reported", "unused"}
    reported = table[(table.purpose == "reported") & table.budgets.str.contains("tokens")].set_index("run_dir")
    frame = runs(STUDIES / "tying/adamw_longer").set_index("run_dir")
    assert {*frame.index} == {*reported.index}
    assert frame.val_loss.tolist() == reported.val_loss[frame.index].tolist()


def test_columns_and_their_types(whole):
    chosen = runs(whole, settings=["validation.every", "head.untie_at", "optim.betas"])
    for table, kinds in (
        (runs(whole), {"seed": "Int64", "val_loss": "float64", "optim.lr": "float64", "status": "string"}),
        (chosen, {"validation.every": "Int64", "head.untie_at": "string", "optim.betas": "string"}),
        (curves(whole), dict.fromkeys(["seed", "step", "tokens"], "Int64")),
        (contrasts(whole), {"primary": "boolean", "n_seeds": "Int64", "verdict": "string"}),
    ):
        assert table.dtypes[[*kinds]].astype(str).to_dict() == kinds


def test_settings_are_those_of_each_run_of_an_arm(tmp_path):
    """The tuned value, the part of the text and the base of a run are not those of the arm's configuration."""
    asked = {"tune": "optim.lr", "folds": True, "seed_offsets": {"tied": 100}}
    make(tmp_path / "a", tuned=True, report=False, settings={"init_from": "bases/seed{seed}"}, **asked)
    frame = runs(tmp_path / "a", ["seed", "optim.lr", "data.fold", "init_from"]).set_index(["arm", "seed", "factor"])
    assert frame.loc[("tied", 2, 2.0), ["optim.lr", "data.fold", "init_from"]].tolist() == [0.2, 2, "bases/seed102"]
    assert frame.loc[("untied", 1, 0.5), ["optim.lr", "data.fold", "init_from"]].tolist() == [0.1, 1, "bases/seed1"]


def test_curves_are_those_of_the_folder_of_a_run_where_there_is_one(study):
    steps = curves(study).groupby(["arm", "seed"]).step.apply(tuple)
    assert {*steps} == {tuple(range(100, 1001, 100))}
    write(of(study, "tied", 0).run_dir / "metrics.csv", "step,tokens,train/loss,val/loss\n1,8,5.5,\n2,16,4.5,4.75\n")
    own = curves(study).query("arm == 'tied' and seed == 0")
    assert own[["step", "val/loss"]].values.tolist() == [[2, 4.75]]
    assert curves(study, "train/loss")["train/loss"].tolist() == [5.5, 4.5]


def test_a_folder_of_ablations_names_them_and_is_only_read(study):
    shutil.copytree(study, study.parent / "a/other")
    before = files(study.parent)
    for frames in (runs, curves, contrasts):
        assert [*frames(study.parent).ablation.unique()] == ["a/other", "study"]
    assert files(study.parent) == before
    assert len(runs(study.parent)) == 2 * len(runs(study))


# --- what became of a run


def test_what_became_of_a_run_is_told_by_its_folder_and_by_its_row_when_that_is_gone(study, monkeypatch):
    draw_nothing(monkeypatch)
    endings = [describe_exit_code(code) for code in (-9, 143, 255, -11)]  # 143: 128 + SIGTERM; no signal is 127
    of(study, "tied", 0).run_dir.mkdir(parents=True)  # it is being made again
    for seed, ending in enumerate(endings):
        of(study, "untied", seed).write_status(*ending)
    of(study, "untied", 4).write_status("diverged", "the loss is nan")
    for _ in range(2):
        results = read_results(study)
        assert results.counts() == {"done": 14, "failed": 2, "killed": 2, "diverged": 1, "missing": 1}
        frame = runs(study).query("arm == 'untied'")
        assert frame.status.tolist() == ["killed", "killed", "failed", "failed", "diverged"]
        assert frame.error.tolist() == [*(ending.message for ending in endings), "the loss is nan"]
        assert frame[["val_loss", "steps"]].isna().all(axis=None)
        assert contrasts(study).loc[0, ["sd", "ci_low", "p"]].isna().all()
        write_report(results)
        shutil.rmtree(study / "runs", ignore_errors=True)


def test_runs_without_an_ablation(tmp_path):
    for seed in (0, 1):
        run = RunConfig(head=HEADS["tied"], seed=seed, threads=seed + 1)
        write_run_dir(tmp_path / f"runs/{seed}", run, {"val_loss": 3.0 + seed, "seed": seed})
    write_run_dir(tmp_path / "runs/late", RunConfig(head=HEADS["untied"], seed=2))
    write(tmp_path / "runs/torn/config.yaml", "[[")
    frame = runs(tmp_path / "runs").set_index("run_dir")
    assert frame.status.to_dict() == {"0": "done", "1": "done", "late": "missing", "torn": "failed"}
    assert frame.val_loss.dropna().to_dict() == {"0": 3.0, "1": 4.0}
    rows = "step,tokens,train/loss,val/loss\n1,8,5.0,\n2,16,4.0,4.5\n3,24,nan,nan\n4,32,3"  # a torn last row
    write(tmp_path / "runs/0/metrics.csv", rows)
    alone = runs(tmp_path / "runs/0", settings=["optim.betas", "trainer.max_steps"])
    assert alone[["run_dir", "optim.betas", "trainer.max_steps"]].values.tolist() == [["0", "[0.9,0.95]", 40]]
    assert curves(tmp_path / "runs/0").step.tolist() == [2]  # rows without a finite value are left out
    assert curves(tmp_path / "runs/0", "train/loss").step.tolist() == [1, 2]


# --- mistakes and damage


def test_a_mistake_names_the_folder_or_the_key(whole, tmp_path, caplog):
    write_run_dir(tmp_path / "run", RunConfig(head=HEADS["tied"]))
    for call, message in (
        (lambda: contrasts(tmp_path / "run"), "folder=.*/run: holds no ablation.json"),
        (lambda: runs(tmp_path / "absent"), "absent: no such folder"),
        (lambda: runs(whole, ["head.untied"]), r"^settings: head.untied .*head.untie_at"),
        (lambda: curves(whole, "val/los"), r"^metric=val/los: .*val/loss"),
    ):
        with refused(message):
            call()
    assert not caplog.messages, "the error says all"


DAMAGED = [
    ("ablation.json", lambda text: "", ""),
    ("ablation.json", lambda text: text.replace('"begun"', '"begn"'), "begn: "),
    ("results.csv", lambda text: "status\ndone\n", ""),
    ("results.csv", lambda text: text[: len(text) // 2], r".*row \d+ broke off"),
    ("curves.csv", lambda text: "step\n1\n", ""),
]


@pytest.mark.parametrize(("name", "damage", "key"), DAMAGED)
def test_a_damaged_file_is_one_line_that_names_it(name, damage, key, study):
    path = study / name
    path.write_text(damage(path.read_text()))
    with refused(f"^{re.escape(str(path))}: {key}.*$"):
        (curves if name == "curves.csv" else contrasts)(study)
