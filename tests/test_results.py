"""lm.results: what its frames hold and leave out, their types, and that reading writes nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from conftest import HEADS, ROOT
from helpers.ablation_folder import make
from test_runs import write_run

from lm.ablation.judge.study import read_study
from lm.ablation.report_input import contrast_row as contrast
from lm.config import BadInput, RunConfig
from lm.results import CONTRAST, contrasts, curves, runs, trials

STUDY = ROOT / "docs/studies/tying/main"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ablations at unequal depth: one is tuned and has runs without a result, one is whole."""
    top = tmp_path_factory.mktemp("study")
    make(top / "a/broken", tuned=True, broken=True, report=False)
    make(top / "whole", budgets=("tokens",), seeds=(0, 1), report=False)
    return top


def test_reported_runs_alone_are_rows_and_a_run_of_two_budgets_is_two() -> None:
    for path in (STUDY.parent / "adamw_longer", STUDY):
        kept = pd.read_csv(path / "results.csv")
        assert {"trial", "unused" if path != STUDY else "trial"} < set(kept.purpose)
        reported = kept[kept.purpose == "reported"]
        found = runs(path)
        assert set(found.run_dir) == set(reported.run_dir)
        assert len(found) == reported.budgets.str.split().str.len().sum()
    study = read_study(STUDY)
    assert len(found) > len(study.rows)
    losses = found.set_index(["budget", "arm", "seed"]).val_loss
    assert losses.index.is_unique
    assert losses["flops", "untied", 3] == study.scores("untied", "flops")[3]


def test_a_setting_is_that_of_the_run() -> None:
    found = runs(STUDY, ["trainer.max_steps", "optim.lr"]).set_index(["budget", "arm", "seed"])
    assert found["trainer.max_steps"].tolist() == found.steps.tolist()
    assert found["trainer.max_steps"].nunique() > 1
    arms = read_study(STUDY).record.arms
    assert found["optim.lr"]["tokens", "untied", 0] == arms["untied"].tuned["optim.lr"]


def test_an_outcome_without_a_result_is_a_row_without_scores(folder: Path) -> None:
    found = runs(folder / "a/broken").query("budget == 'tokens'").set_index(["arm", "seed"])
    assert found.status["tied_naive", 2] == "diverged"
    assert found.status["tied_naive", 1] == "failed"
    assert found.status["untied_matched", 2] == "missing"
    assert found.error["tied_naive", 2] == "the loss is nan at step 7"
    lost = found.query("status != 'done'")
    assert len(lost) == 3
    assert lost[["val_loss", "steps", "config_hash"]].isna().all(axis=None)


def test_columns_have_the_types_of_what_they_hold(folder: Path) -> None:
    wanted = {"seed": "Int64", "n_params": "Int64", "val_loss": "float64", "status": "string"}
    wanted |= {"optim.lr": "float64"}
    dtypes = runs(folder / "a/broken", ["optim.lr"]).dtypes
    assert {key: str(dtypes[key]) for key in wanted} == wanted
    found = runs(folder / "whole", settings=["validation.every", "head.untie_at"])
    assert (str(found["validation.every"].dtype), str(found["head.untie_at"].dtype)) == ("Int64", "float64")
    assert {str(curves(STUDY)[key].dtype) for key in ("seed", "step", "tokens")} == {"Int64"}
    assert str(contrasts(folder / "whole").primary.dtype) == "boolean"


def test_a_folder_of_ablations_names_them(folder: Path) -> None:
    found = runs(folder)
    assert list(dict.fromkeys(found.ablation)) == ["a/broken", "whole"]
    assert set(runs(folder / "whole").ablation) == {"whole"}
    assert list(found.columns[:5]) == ["ablation", "arm", "budget", "seed", "run_dir"]
    assert len(found) == len(runs(folder / "a/broken")) + len(runs(folder / "whole"))


def test_a_curve_ends_at_the_last_step_and_its_metric_can_be_chosen(folder: Path) -> None:
    found = curves(folder / "whole")
    assert set(found.groupby(["arm", "seed"]).size()) == {10}
    assert found["val/loss"].notna().all()
    assert set(found.groupby("arm").tokens.max()) == {1000 * 1024}
    path = folder / "whole/cells/tied-seed0-1000/metrics.csv"
    points = pd.read_csv(path)["train/loss"]
    ours = curves(folder / "whole", "train/loss").query("arm == 'tied' and seed == 0")["train/loss"]
    assert ours.tolist() == points.tolist()


def test_rows_without_the_metric_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunConfig(head=HEADS["tied"]))
    rows = ["step,tokens,train/loss,val/loss", "1,8,5.0,", "2,16,4.0,4.5", "3,24,nan,nan", "4,32,3"]
    (tmp_path / "run/metrics.csv").write_text("\n".join(rows))
    assert curves(tmp_path).step.tolist() == [2]
    assert curves(tmp_path / "run", "train/loss").step.tolist() == [1, 2]


def test_trials_are_every_run_of_the_search(folder: Path) -> None:
    found = trials(folder)
    assert set(found.ablation) == {"a/broken"}
    record = read_study(folder / "a/broken").record
    sizes = {arm: len(one.trials) * len(one.seeds) for arm, one in record.searches.items()}
    assert found.groupby("arm").size().to_dict() == sizes
    one = found.query("arm == 'untied' and trial == 1").iloc[0]
    assert one["optim.lr"] == record.searches["untied"].trials[1].values["optim.lr"]
    assert one.score == one.val_loss
    assert found.query("arm == 'tied'")["head.head_lr_multiplier"].isna().all()
    assert trials(folder / "whole").empty
    assert "val_loss" in trials(folder / "whole")


def test_contrasts_are_those_of_the_report(folder: Path) -> None:
    study = read_study(STUDY)
    found, wanted = contrasts(STUDY), study.contrasts()
    assert found.arm.tolist() == [one.arm for one in wanted]
    assert found.verdict.tolist() == [one.comparison.verdict for one in wanted]
    assert found.mean_difference.tolist() == [one.comparison.mean for one in wanted]
    assert found.p_adjusted.tolist() == [one.comparison.p_different_adjusted for one in wanted]
    assert found.alpha.tolist() == [study.alpha for _ in wanted]
    assert found.n_seeds.tolist() == [len(one.seeds) for one in wanted]
    assert found.sentence.tolist() == [study.say(one) for one in wanted]
    assert set(CONTRAST) <= {*contrast(study, wanted[0]), "metric", "equivalence_margin"}
    first = runs(STUDY).pivot(index=["budget", "seed"], columns="arm", values="val_loss").loc["tokens"]
    assert (first.untied - first.tied).mean() == pytest.approx(found.mean_difference[0])


def test_runs_without_an_ablation(tmp_path: Path) -> None:
    for seed in (0, 1):
        run = RunConfig(head=HEADS["tied"], seed=seed)
        write_run(tmp_path / f"runs/{seed}", replace(run, threads=seed + 1), {"val_loss": 3.0 + seed, "seed": seed})
    write_run(tmp_path / "runs/late", RunConfig(head=HEADS["untied"], seed=2))
    (tmp_path / "runs/torn").mkdir()
    (tmp_path / "runs/torn/config.yaml").write_text("[[")
    found = runs(tmp_path / "runs").set_index("run_dir")
    assert found.seed.dropna().to_dict() == {"0": 0, "1": 1, "late": 2}
    assert found.status.to_dict() == {"0": "done", "1": "done", "late": "missing", "torn": "failed"}
    assert found["head.name"].dropna().to_dict() == {"0": "tied", "1": "tied", "late": "untied"}
    assert found.val_loss.dropna().to_dict() == {"0": 3.0, "1": 4.0}
    alone = runs(tmp_path / "runs/0", settings=["optim.betas", "trainer.max_steps"])
    assert alone[["run_dir", "optim.betas", "trainer.max_steps"]].values.tolist() == [["0", "[0.9,0.95]", 40]]


def test_reading_writes_nothing(folder: Path) -> None:
    def stand() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = stand()
    for call in (runs, curves, trials, contrasts):
        call(folder)
    assert stand() == before


def test_a_mistake_is_named(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunConfig(head=HEADS["tied"]))
    for call in (trials, contrasts):
        with pytest.raises(BadInput, match=re.escape(f"folder={tmp_path}: holds no ablation.json")):
            call(tmp_path)
        with pytest.raises(BadInput, match="absent: no such folder"):
            call(tmp_path / "absent")
    with pytest.raises(BadInput, match="absent: no such folder"):
        runs(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"settings: head.untied is neither .* did you mean head.untie_at"):
        runs(folder, ["head.untied"])
    with pytest.raises(BadInput, match=r"metric=val/los: is no column of metrics.csv; choose one of step, .*val/loss"):
        curves(folder, "val/los")
    (tmp_path / "ablation.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(BadInput, match=r"ablation.json: version: no such key"):
        runs(tmp_path)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    figure, table = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/results.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len([line for line in figure.splitlines() if line and "import" not in line]) <= 10
    names: dict[str, pd.DataFrame] = {}
    exec(figure, names)
    assert (tmp_path / "gap.svg").stat().st_size > 5000
    kept, rows = (pd.read_csv(STUDY.parent / "longer" / name) for name in ("curves.csv", "results.csv"))
    last = kept.merge(rows[rows.purpose == "reported"], on="run_dir").query("step == 1600").groupby("arm")["val/loss"]
    assert names["gap"]["mean"][1600 * 1024] == pytest.approx(last.mean().untied - last.mean().tied)
    exec(table, names)
    assert set(names["table"]["tokenizer.vocab_size"]) == {512, 2048, 8192}
