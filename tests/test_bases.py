"""Arms that continue trained models: one for each seed, trained first by the ablation itself, or one that is given."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import some
from hydra import initialize_config_dir
from lm.ablation.judge.study import read_study
from lm.ablation.plan.compose import compose_arms, compose_base
from test_ablation import during, kill_one, stamps
from test_plan import SMALL, question

from lm.ablation.ablate import AblationRunner, ablate
from lm.ablation.record import read_record
from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import RunConfig, UserError
from lm.config.ablation import AblateConfig, TuneConfig
from lm.formats.base import read_base
from lm.training.train import train
from tests.helpers.ablation_folder import Page

ARMS = {"tied": ["head=tied"], "untied": ["head=untied_from_embedding"]}
BASE = ["head=tied", "trainer.max_steps=8"]
Lab = Callable[..., AblationRunner]


@pytest.fixture
def words(corpus: Path, tmp_path: Path) -> list[str]:
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    return [*SMALL, f"data.path={corpus}", cache, "validation.every=0", "validation.batches=null", "prompts=[]"]


@pytest.fixture
def lab(words: list[str], tmp_path: Path) -> Lab:
    def at_work(*more: str, plan_only: bool = False, folder: str = "out", **changes: Any) -> AblationRunner:
        asked = question(**({"arms": ARMS, "base": BASE} | changes))
        asked = replace(asked, overrides=[*words, "trainer.max_steps=4", *asked.overrides])
        place = str(tmp_path / folder)
        config = AblateConfig(ablation=asked, output_dir=place, plan_only=plan_only, workers=2, overrides=list(more))
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            runs = compose_arms(asked, list(more), run_of)
            return ablate(config, runs, "the command", base=compose_base(asked, list(more), runs, run_of))

    return at_work


def run_of(words: list[str]) -> RunConfig:
    return compose("train", words, RunConfig)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_each_seed_continues_the_base_of_its_seed(lab: Lab, tmp_path: Path) -> None:
    plan: dict[str, Any] = {"seeds": [0, 1, 2], "looks": [2, 3], "equivalence_margin": 1e9}  # the first look decides
    out = lab(**plan).path
    bases, cells = stamps(out, "bases"), stamps(out)
    assert (len(bases), len(cells)) == (2, 4)
    record = read_record(out)
    assert [one.seed for one in record.bases] == [0, 1]
    for base in record.bases:
        there = result(out / base.run_dir)
        assert (base.sha256, base.val_loss) == (read_base(str(out / base.run_dir)).sha256, there["val_loss"])
        assert (there["seed"], there["steps"], there["init_from"]) == (base.seed, 8, None)
        for arm in ARMS:  # both begin where the base has ended
            one = read_study(out).finished(arm, "tokens")[base.seed].result
            assert (one["init_from"]["sha256"], one["steps"], one["seed"]) == (base.sha256, 4, base.seed)
            assert one["init_from"]["val_loss"] == there["val_loss"]
    report = Page(out).text
    assert "all runs of a seed start from one trained model (head=tied trainer.max_steps=8" in report
    assert record.bases[1].run_dir in report

    assert (stamps(lab(**plan).path, "bases"), stamps(out)) == (bases, cells)  # nothing to do
    shutil.rmtree(out / "bases")
    assert lab(**plan).missing_bases() == []  # no missing run needs one
    assert stamps(out) == cells
    lost = next(one for one in (out / "cells").glob("tied-seed0-*") if one.is_dir())
    wanted = result(lost)["val_loss"]
    shutil.rmtree(lost)
    (out / "results.csv").unlink()
    lab(**plan)
    assert [name.rpartition("-")[0] for name in stamps(out, "bases")] == ["base-seed0"]
    assert result(lost)["val_loss"] == wanted
    assert cells.items() - stamps(out).items() == {(lost.name, cells[lost.name])}


def test_the_plan_counts_bases_and_trains_nothing(lab: Lab, tmp_path: Path) -> None:
    runner = lab(
        plan_only=True, tune=TuneConfig(trials=1, extension_trials=0, seeds=[77], hyperparameters=["optim.lr"])
    )
    assert [one.seed for one in runner.missing_bases()] == [0, 1, 77]
    assert {one.run.init_sha256 for one in runner.all_cells()} == {"not trained yet"}
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_ablation_without_bases_is_not_taken_for_one_with_them(lab: Lab) -> None:
    names = [{one.run_dir for one in lab(plan_only=True, base=base).all_cells()} for base in (None, BASE)]
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    some(
        [
            ({"base": ["seed=3"]}, "ablation.base: seed=3: the seeds of an ablation"),
            ({"base": ["init_from=x"]}, "ablation.base: init_from=x: a base starts anew"),
            (
                {"base": ["model.d_ff=48"]},
                "ablation.base: model.d_ff is 48, that of tied is 64; they have it in common",
            ),
            (
                {"base": ["head=untied"]},
                "ablation.arms.tied: head: the loaded model's input and output embeddings differ",
            ),
            ({"base": ["optim.lrr=1"]}, "ablation.base: optim.lrr: no such key"),
            ({"arms": {"base": [], "untied": ["head=untied"]}, "baseline": "base"}, "ablation.arms.base: "),
        ],
        2,
    ),
)
def test_what_no_base_can_be_is_refused_before_training(lab: Lab, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        lab(**changes, plan_only=True)
    assert str(error.value).startswith(said)


def test_a_rule_for_tying_may_be_what_an_arm_is_about(lab: Lab) -> None:
    arms = {rule: ["head=tied", f"init_tied_matrix={rule}"] for rule in ("embedding", "mean")}
    runner = lab(plan_only=True, base=["head=untied"], arms=arms, baseline="mean", primary=[])
    assert len(runner.all_cells()) == 4


@pytest.mark.slow
def test_one_given_run_takes_the_place_of_the_bases(lab: Lab, words: list[str], tmp_path: Path) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        train(run_of([*words, *BASE, f"run_dir={tmp_path / 'given'}"]))
    out = lab(f"init_from={tmp_path / 'given'}", seeds=[0]).path
    assert not (out / "bases").exists()
    for arm in ARMS:
        one = read_study(out).finished(arm, "tokens")[0].result
        assert one["init_from"]["val_loss"] == result(tmp_path / "given")["val_loss"]
    assert "verdicts and intervals hold for that model alone" in Page(out).text


@pytest.mark.slow
def test_tuning_has_bases_of_its_own_seeds(lab: Lab) -> None:
    few = TuneConfig(trials=2, extension_trials=0, seeds=[77], hyperparameters=["optim.lr"])
    runner = lab(seeds=[0], tune=few)
    out = runner.path
    assert sorted(name.rpartition("-")[0] for name in stamps(out, "bases")) == ["base-seed0", "base-seed77"]
    base = {one.seed: one.sha256 for one in read_record(out).bases}
    trials = [result(path) for path in (out / "trials").glob("*/") if (path / "result.json").exists()]
    assert {one["init_from"]["sha256"] for one in trials} == {base[77]}
    before = stamps(out, "trials")
    assert len(before) == 4
    again = lab(seeds=[0], tune=few)
    assert (stamps(out, "trials"), again.arms["tied"].tuned) == (before, runner.arms["tied"].tuned)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_killed_base_is_named_and_the_same_command_repeats_it(lab: Lab, tmp_path: Path) -> None:
    quiet = read_study(lab(seeds=[0], folder="quiet").path).scores("untied", "tokens")
    during(lambda: kill_one(tmp_path / "out/bases"), lambda: None)
    broken = lab(seeds=[0])
    assert broken.n_failed() == 2
    (error,) = {row.error for row in read_study(broken.path).rows}
    assert error.startswith(f"init_from={tmp_path / 'out/bases/base-seed0-'}")
    mended = lab(seeds=[0])
    assert mended.n_failed() == 0
    assert read_study(mended.path).scores("untied", "tokens") == quiet
