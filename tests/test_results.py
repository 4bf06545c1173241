"""lm.lab.results: what its frames hold and leave out, their types, and what a damaged folder says."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest
from conftest import HEADS, ROOT, WHOLE_RESULT

from lm.config import RunConfig
from lm.errors import UserError
from lm.lab.ablation.execute import describe_exit_code
from lm.lab.ablation.folder import REPORTED, RunFiles, write_record
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import read_results
from lm.lab.results import contrasts, curves, runs
from tests.helpers.ablation_folder import write_run_dir

STUDIES = ROOT / "docs/studies"
SEEDS = [0, 1, 2, 3, 4]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """An ablation of two arms and five seeds without the folders of its runs."""
    path, source = tmp_path / "top/study", STUDIES / "tying_broken"
    path.mkdir(parents=True)
    for name in ("results.csv", "curves.csv"):
        shutil.copy(source / name, path)
    edit(path / "results.csv", lambda rows: rows[rows.purpose == REPORTED])
    for name in ("results.csv", "curves.csv"):
        (path / name).write_text((path / name).read_text().replace("cells/", "runs/"))
    record = read_results(source).record
    for run in record.runs:
        run.run_dir = run.run_dir.replace("cells/", "runs/")
    for arm in record.arms.values():
        arm.steps = 400
        arm.identity = {"source_hash": "s" * 64}
        arm.settings = {"validation.every": 100, "head.untie_at": None, "optim.betas": [0.8, 0.95], "optim.lr": 0.1}
    record.arms["broken"].settings["optim.lr"] = 0.2
    write_record(record, path)
    return path


def edit(path: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change a CSV file as a person may."""
    change(pd.read_csv(path, dtype=str, keep_default_na=False)).to_csv(path, index=False)


def run_dir_of(study: Path, arm: str, seed: int) -> str:
    rows = pd.read_csv(study / "results.csv").query("purpose == 'reported' and arm == @arm and seed == @seed")
    return str(rows.run_dir.item())


# --- an ablation


@pytest.mark.parametrize("name", ["main", "adamw_longer"])
def test_reported_runs_alone_are_rows_and_those_of_the_first_budget(name: str) -> None:
    table = pd.read_csv(STUDIES / "tying" / name / "results.csv")
    assert {"trial", "reported", *(["unused"] if name == "adamw_longer" else [])} == set(table.purpose)
    reported, frame = table[table.purpose == "reported"], runs(STUDIES / "tying" / name)
    reported = reported[reported.budgets.str.contains("tokens")]
    assert set(frame.run_dir) == set(reported.run_dir)
    assert len(frame) == len(reported)
    losses = frame.set_index(["arm", "seed"]).val_loss
    assert losses.index.is_unique
    of_run = reported.set_index("run_dir").val_loss
    assert frame.val_loss.tolist() == of_run[frame.run_dir].tolist()


def test_columns_and_their_types(study: Path) -> None:
    frame = runs(study)
    assert list(frame)[:8] == ["ablation", "arm", "seed", "factor", "run_dir", "status", "error", "optim.lr"]
    chosen = runs(study, settings=["validation.every", "head.untie_at", "optim.betas"])
    for table, kinds in (
        (frame, {"Int64": ["seed", "n_params"], "float64": ["val_loss", "optim.lr"], "string": ["status"]}),
        (chosen, {"Int64": ["validation.every"], "string": ["head.untie_at", "optim.betas"]}),
        (curves(study), {"Int64": ["seed", "step", "tokens"]}),
        (contrasts(study), {"boolean": ["primary"], "Int64": ["n_seeds", "wins"], "string": ["verdict"]}),
    ):
        for kind, keys in kinds.items():
            assert {str(table.dtypes[key]) for key in keys} == {kind}


def test_a_curve_ends_at_the_last_step_and_its_metric_can_be_chosen(study: Path) -> None:
    frame = curves(study)
    assert frame.groupby(["arm", "seed"]).step.apply(list).map(tuple).unique().tolist() == [(100, 200, 300, 400)]
    path = study / run_dir_of(study, "tied", 0)
    path.mkdir(parents=True)
    (path / "metrics.csv").write_text("step,tokens,train/loss,val/loss\n10,80,5.5,\n20,160,4.5,4.75\n")
    own = curves(study).query("arm == 'tied' and seed == 0")  # of the run's folder, where there is one
    assert own[["step", "val/loss"]].values.tolist() == [[20, 4.75]]
    assert curves(study, "train/loss")["train/loss"].tolist() == [5.5, 4.5]


def test_a_folder_of_ablations_names_them_and_is_only_read(study: Path) -> None:
    shutil.copytree(study, study.parent / "a/other")
    before = {path: path.stat().st_mtime_ns for path in study.parent.rglob("*")}
    for frame in (runs(study.parent), curves(study.parent), contrasts(study.parent)):
        assert list(dict.fromkeys(frame.ablation)) == ["a/other", "study"]
    assert {path: path.stat().st_mtime_ns for path in study.parent.rglob("*")} == before
    assert set(runs(study).ablation) == {"study"}
    assert len(runs(study.parent)) == 2 * len(runs(study))


# --- what became of a run


def test_a_run_without_a_result_is_a_row_without_scores(study: Path) -> None:
    ends = {1: ("diverged", "", "the loss is nan"), 2: ("failed", "killed", "signal 9"), 3: ("failed", "error", "no")}
    names = {seed: run_dir_of(study, "broken", seed) for seed in SEEDS}

    def change(rows: pd.DataFrame) -> pd.DataFrame:
        rows["failure"] = ""
        for seed, (status, failure, error) in ends.items():
            changed = ["status", "failure", "error", "val_loss", "steps"]
            rows.loc[rows.run_dir == names[seed], changed] = [status, failure, error, "", ""]
        return rows[rows.run_dir != names[4]]

    edit(study / "results.csv", change)
    frame = runs(study).query("arm == 'broken'").set_index("seed")
    assert frame.status.tolist() == ["done", "diverged", "failed", "failed", "missing"]
    assert frame.error.tolist() == ["", *(error for *_, error in ends.values()), ""]
    assert frame.val_loss.isna().tolist() == frame.steps.isna().tolist() == [False, True, True, True, True]
    results = read_results(study)
    assert results.counts() == {"done": 6, "failed": 2, "diverged": 1, "missing": 1}
    (row,) = results.contrasts
    assert (row.seeds, row.diverged, row.failed) == ([0], {"broken": [1]}, {"broken": [3]})
    (shown,) = contrasts(study).to_dict("records")
    assert (shown["verdict"], shown["n_seeds"]) == ("undecided", 1)
    for key in ("sd", "ci_low", "p"):
        assert pd.isna(shown[key])


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_run_that_diverged_stays_a_row_when_it_is_not_asked_for_any_more(study: Path, has_folder: bool) -> None:
    name = run_dir_of(study, "broken", 1)
    if has_folder:
        (study / name).mkdir(parents=True)
        RunFiles(study / name).write_status("diverged", "", "the loss is nan")
        edit(study / "results.csv", lambda rows: rows[rows.run_dir != name])
    else:
        edit(study / "results.csv", lambda rows: rows.assign(status=rows.status.mask(rows.run_dir == name, "diverged")))
    record = json.loads((study / "ablation.json").read_text())
    record["runs"] = [run for run in record["runs"] if run["run_dir"] != name]
    (study / "ablation.json").write_text(json.dumps(record))
    rows = read_results(study).runs
    assert rows.set_index("run_dir").loc[name, ["status", "purpose"]].tolist() == ["diverged", "unused"]


def test_the_folder_of_a_run_decides_and_a_row_stands_for_one_that_is_gone(study: Path) -> None:
    def status() -> tuple[str, float]:
        row = runs(study).query("arm == 'tied' and seed == 0").iloc[0]
        return row.status, row.val_loss

    before, path = status(), study / run_dir_of(study, "tied", 0)
    assert before[0] == "done"
    assert read_results(study).reported.has_folder.tolist() == [False] * 10
    path.mkdir(parents=True)  # it is being run again
    assert status() == ("missing", pytest.approx(float("nan"), nan_ok=True))
    path.with_name(f"{path.name}.json").write_text('{"status": "diverged", "error": "the loss is nan"}')
    assert status()[0] == "diverged"
    (path / "result.json").write_text(json.dumps(WHOLE_RESULT | {"val_loss": 3.5, "resumed_from": [5, 7]}))
    assert status() == ("done", 3.5)
    run = read_results(study).reported.iloc[0]
    assert (run.resumed_from, run.torch, run.has_folder) == ("5 7", "2", True)
    (path / "result.json").write_text("[]")
    assert status()[0] == "failed"
    assert "result.json: " in runs(study).error[0]
    shutil.rmtree(path.parent)
    assert status() == before


@pytest.mark.parametrize(("exit_code", "is_own"), [(-9, False), (143, False), (1, True), (-11, True)])  # 128 + signal
def test_a_run_that_was_killed_from_outside_did_not_fail_by_itself(study: Path, exit_code: int, is_own: bool) -> None:
    path, ending = study / run_dir_of(study, "broken", 4), describe_exit_code(exit_code)
    path.mkdir(parents=True)
    RunFiles(path).write_status("failed", str(ending.kind), ending.message)
    for _ in range(2):
        results = read_results(study)
        run = results.runs.set_index("run_dir").loc[f"runs/{path.name}"]
        assert (run.status, run.error, run.is_own_failure) == ("failed", ending.message, is_own)
        assert results.contrasts[0].failed == ({"broken": [4]} if is_own else {})
        write_report(results)
        shutil.rmtree(path.parent, ignore_errors=True)  # then the row says the same


def test_runs_without_an_ablation(tmp_path: Path) -> None:
    for seed in (0, 1):
        run = replace(RunConfig(head=HEADS["tied"], seed=seed), threads=seed + 1)
        write_run_dir(tmp_path / f"runs/{seed}", run, {"val_loss": 3.0 + seed, "seed": seed})
    write_run_dir(tmp_path / "runs/late", RunConfig(head=HEADS["untied"], seed=2))
    (tmp_path / "runs/torn").mkdir()
    (tmp_path / "runs/torn/config.yaml").write_text("[[")
    frame = runs(tmp_path / "runs").set_index("run_dir")
    assert frame.seed.dropna().to_dict() == {"0": 0, "1": 1, "late": 2}
    assert frame.status.to_dict() == {"0": "done", "1": "done", "late": "missing", "torn": "failed"}
    assert frame["head.name"].dropna().to_dict() == {"0": "tied", "1": "tied", "late": "untied"}
    assert frame.val_loss.dropna().to_dict() == {"0": 3.0, "1": 4.0}
    rows = ["step,tokens,train/loss,val/loss", "1,8,5.0,", "2,16,4.0,4.5", "3,24,nan,nan", "4,32,3"]  # a torn last row
    (tmp_path / "runs/0/metrics.csv").write_text("\n".join(rows))
    alone = runs(tmp_path / "runs/0", settings=["optim.betas", "trainer.max_steps"])
    assert alone[["run_dir", "optim.betas", "trainer.max_steps"]].values.tolist() == [["0", "[0.9,0.95]", 40]]
    assert curves(tmp_path / "runs/0").step.tolist() == [2]  # rows without a finite value are left out
    assert curves(tmp_path / "runs/0", "train/loss").step.tolist() == [1, 2]


# --- mistakes and damage


def test_a_mistake_names_the_folder_or_the_key(study: Path, tmp_path: Path) -> None:
    write_run_dir(tmp_path / "run", RunConfig(head=HEADS["tied"]))
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: contrasts(tmp_path / "run"), re.escape(f"folder={tmp_path / 'run'}: holds no ablation.json")),
        (lambda: contrasts(tmp_path / "absent"), "absent: no such folder"),
        (lambda: runs(tmp_path / "absent"), "absent: no such folder"),
        (lambda: runs(study, ["head.untied"]), r"^settings: head.untied .*head.untie_at"),
        (lambda: curves(study, "val/los"), r"^metric=val/los: .*val/loss"),
    ]
    for call, message in refused:
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("ablation.json", "", ""),
        ("ablation.json", {"begn": "x"}, "begn: "),
        ("ablation.json", {"threads": "x"}, "threads: "),
        ("ablation.json", {"question": {"name": "a", "seeds": [0, "x"]}}, "question.seeds[1]: "),
        ("results.csv", "status\ndone\n", ""),
        ("curves.csv", "step\n1\n", ""),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(study: Path, name: str, content: Any, key: str) -> None:
    path = study / name
    is_text = isinstance(content, str)
    path.write_text(content if is_text else json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(UserError) as error:
        (curves if name == "curves.csv" else contrasts)(study)
    assert str(error.value).startswith(f"{path}: {key}")
    assert "\n" not in str(error.value)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    figure, table = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/runs.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, pd.DataFrame] = {}
    exec(figure, names)
    assert (tmp_path / "gap.svg").stat().st_size > 5000
    points, rows = (pd.read_csv(STUDIES / "tying/longer" / name) for name in ("curves.csv", "results.csv"))
    last = points.merge(rows[rows.purpose == "reported"], on="run_dir").query("step == 1600").groupby("arm")["val/loss"]
    assert names["gap"]["mean"][1600 * 1024] == pytest.approx(last.mean().untied - last.mean().tied)
    exec(table, names)
    assert {"main", "vocab_512", "vocab_8192"} <= set(names["table"]["ablation"])
