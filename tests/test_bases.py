"""Arms that continue trained models: one for each seed, trained first by the ablation itself, or one that is given."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lm.folder import read_base
from lm.lab.ablation.results import Results
from lm.lab.ablation.settings import TuneConfig
from lm.training.train import train
from tests.helpers.ablations import Lab, losses, plan_in_a_moment
from tests.helpers.runs import composed, result

ARMS = {"tied": ["head=tied"], "untied": ["head=untied_from_embedding"]}
BASE = ["head=tied", "trainer.max_steps=8"]
FEW = TuneConfig(trials=2, seeds=[77], hyperparameters=["optim.lr"])


class BaseLab(Lab):
    def run(self, *typed: str, **changes: Any) -> Results:
        return super().run(*typed, **({"arms": ARMS, "base": BASE} | changes))


@pytest.fixture
def lab(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    plan_in_a_moment(monkeypatch)
    common = ["trainer.max_steps=4", "validation.every=0", "validation.batches=null", "prompts=[]"]
    return BaseLab(tmp_path, corpus, common)


def starts(results: Results) -> dict[tuple[str, int], dict[str, Any]]:
    """What each reported run started from."""
    return {
        (run.arm, run.seed): result(results.folder / run.run_dir)["init_from"]
        for run in results.reported().itertuples()
    }


@pytest.mark.slow
def test_each_seed_continues_the_base_of_its_seed(lab: Lab) -> None:
    plan: dict[str, Any] = {"seeds": [0, 1, 2], "looks": [2, 3], "equivalence_margin": 1e9}  # the first look decides
    first = lab.run(**plan)
    bases, cells, record = lab.results("bases"), lab.results(), first.record
    assert (len(bases), len(cells), [base.seed for base in record.of("base")]) == (2, 4, [0, 1])
    for base in record.of("base"):
        own, sha256 = result(lab.out / base.run_dir), read_base(str(lab.out / base.run_dir)).sha256
        assert first.of("base").set_index("run_dir")["val_loss"][base.run_dir] == own["val_loss"]
        assert (own["seed"], own["steps"], own["init_from"]) == (base.seed, 8, None)
        for arm in ARMS:  # both begin where the base has ended
            start = starts(first)[arm, base.seed]
            assert (start["sha256"], start["val_loss"]) == (sha256, own["val_loss"])
    assert record.of("base")[1].run_dir in (lab.out / "report.html").read_text()

    lab.run(**plan)
    shutil.rmtree(lab.out / "bases")
    lab.run(**plan)
    assert (lab.results("bases"), lab.results()) == ({}, cells), "no missing run needs one"
    assert "2 base runs, one for each seed" in lab.tables[-1]
    lost = next(run for run in lab.asked() if (run.arm, run.seed) == ("tied", 0)).run_dir
    shutil.rmtree(lab.out / lost)
    (lab.out / "results.csv").unlink()
    assert losses(lab.run(**plan)) == losses(first)
    assert [name.rpartition("-")[0] for name in lab.results("bases")] == ["base-seed0"]
    assert {name for name in cells if cells[name] != lab.results()[name]} == {Path(lost).name}


@pytest.mark.slow
def test_the_plan_counts_bases_and_trains_nothing(lab: Lab) -> None:
    assert "5 base runs, one for each seed, 5 to be made" in lab.table(tune=FEW, seed_offsets={"untied": 50})
    bases = {run.run_dir: run.seed for run in lab.asked("base")}
    assert sorted(bases.values()) == [0, 1, 50, 51, 77]
    assert [bases[run.run_dir] for run in lab.steps[-1].todo] == [77], "whose runs tuning asks for first"
    assert {bases[run.after] for run in lab.asked("trial")} == {77}
    assert not lab.out.exists()
    names = []
    for base in (None, BASE):
        lab.plan(base=base)
        names += [run.run_dir for run in lab.asked()]
    assert len(names) == len({*names}) == 8, "an ablation without bases is another one"


@pytest.mark.slow
def test_one_given_run_takes_the_place_of_the_bases(lab: Lab) -> None:
    given = lab.root / "given"
    train(composed(*lab.overrides(), *BASE, f"run_dir={given}"))
    results = lab.run(f"init_from={given}", seeds=[0])
    assert not (lab.out / "bases").exists()
    assert {start["val_loss"] for start in starts(results).values()} == {result(given)["val_loss"]}
    assert "hold for that model alone" in (lab.out / "report.md").read_text()


@pytest.mark.slow
def test_tuning_has_bases_of_its_own_seeds(lab: Lab) -> None:
    results = lab.run(seeds=[0], tune=FEW)
    assert sorted(name.rpartition("-")[0] for name in lab.results("bases")) == ["base-seed0", "base-seed77"]
    sha256 = {base.seed: read_base(str(lab.out / base.run_dir)).sha256 for base in results.record.of("base")}
    trials = {run_dir: result(lab.out / run_dir) for run_dir in results.trials.run_dir}
    assert (len(trials), {trial["init_from"]["sha256"] for trial in trials.values()}) == (4, {sha256[77]})
