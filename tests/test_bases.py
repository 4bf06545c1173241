"""Arms that continue trained models: one for each seed, or one that is given."""

import shutil

import pytest

from lm.errors import UserError
from lm.folder import read_base
from lm.lab.ablation.execute import ENGINES
from lm.lab.ablation.report import describe
from lm.lab.ablation.results import results_of
from lm.training.train import train
from tests.helpers.ablations import Lab, draw_nothing, instant, plan_in_a_moment
from tests.helpers.runs import composed

ARMS = {"tied": ["head=tied"], "untied": ["head=untied_from_embedding"]}


@pytest.fixture
def lab(tmp_path, corpus, monkeypatch):
    plan_in_a_moment(monkeypatch)
    common = ["trainer.max_steps=4", "validation.every=0", "validation.batches=null", "prompts=[]"]
    return Lab(tmp_path, corpus, common)


def train_base(lab, seed, *words):
    """Train the model that the runs of a seed start from, and return the hash of its weights."""
    run_dir = lab.root / f"bases/seed{seed}"
    settings = [*lab.overrides(), "head=tied", "trainer.max_steps=8", f"seed={seed}", f"run_dir={run_dir}"]
    train(composed(*settings, *words))
    return read_base(str(run_dir)).sha256


@pytest.mark.slow
def test_each_seed_continues_the_model_of_its_seed(lab, monkeypatch):
    sha256 = {seed: train_base(lab, seed) for seed in (0, 1)}
    words = {"overrides": [f"init_from={lab.root}/bases/seed{{seed}}"], "arms": ARMS}
    starts = {}

    def noted(spec):
        starts[spec.arm, spec.run.seed] = spec.run.init_sha256
        return 1 + 0.1 * spec.run.seed

    draw_nothing(monkeypatch)
    monkeypatch.setitem(ENGINES, "local", instant(noted))
    lab.run(**words)
    assert starts == {(arm, seed): sha256[seed] for arm in ARMS for seed in (0, 1)}
    assert "continue a trained model, that of their seed" in (lab.out / "report.md").read_text()
    assert lab.run(**words, seeds=[1, 0]).record.changed == [], "the order of the seeds is no change"
    shutil.rmtree(lab.root / "bases/seed1")
    train_base(lab, 1, "optim.lr=0.02")
    assert lab.run(**words).record.changed == [4], "another model of any seed is one"
    with pytest.raises(UserError, match=r"init_from=.*bases/seed2: no such folder"):
        lab.run(**words, seeds=[0, 1, 2])
    for differs in ("tokenizer=char", "model.n_layers=1"):
        train_base(lab, 2, differs)
        with pytest.raises(UserError, match=r"init_from=.*bases/seed2: expected .* other models of this arm"):
            lab.run(**words, seeds=[0, 1, 2])
        shutil.rmtree(lab.root / "bases/seed2")


def test_a_base_that_has_read_the_validation_text_is_refused_or_told(lab, caplog):
    train_base(lab, 0, "data.fold=0")
    start = f"init_from={lab.root}/bases/seed0"
    with pytest.raises(UserError, match=r"bases/seed0: expected a model that has not read the validation text"):
        lab.plan(start, arms=ARMS)
    train_base(lab, 1)
    with pytest.raises(UserError, match=r"bases/seed0: expected a model that has not read the validation text"):
        lab.plan(arms=ARMS, seeds=[1, 0], overrides=[f"init_from={lab.root}/bases/seed{{seed}}"])
    train(composed(*lab.overrides(), start, f"run_dir={lab.root}/run"))
    assert "has read this validation text" in caplog.text
    caplog.clear()
    train(composed(*lab.overrides(), start, "data.fold=0", f"run_dir={lab.root}/same"))
    assert "has read this validation text" not in caplog.text
    train(composed(*lab.overrides(), f"init_from={lab.root}/same", f"run_dir={lab.root}/second"))
    assert "has read this validation text" in caplog.text, "by the model before it"


def test_a_larger_part_of_a_text_that_is_held_out_has_been_read(lab):
    train_base(lab, 0)
    start = f"init_from={lab.root}/bases/seed0"
    with pytest.raises(UserError, match="expected a model that has not read the validation text"):
        lab.plan(start, "data.val_fraction=0.9", arms=ARMS)
    lab.plan(start, "data.val_fraction=0.05", arms=ARMS)


def test_a_file_of_a_folder_that_a_base_was_trained_on_has_been_read(lab):
    texts = lab.root / "texts"
    texts.mkdir()
    for name in "ab":
        (texts / name).write_text(f"{name} has its own text. " * 200)
    train_base(lab, 0, f"data.path={texts}")
    start = f"init_from={lab.root}/bases/seed0"
    with pytest.raises(UserError, match="expected a model that has not read the validation text"):
        lab.plan(start, f"data.val_path={texts / 'b'}", arms=ARMS)
    lab.plan(start, f"data.path={texts}", arms=ARMS)  # on the part that the base has not read


@pytest.mark.slow
def test_the_model_that_is_typed_replaces_those_of_the_question(lab):
    for seed in (0, 1):
        train_base(lab, seed)
    words = {"overrides": [f"init_from={lab.root}/bases/seed{{seed}}"]}
    arms = {"fresh": ["init_from=null"], "tied": [], "untied": ["head=untied_from_embedding"]}
    lab.plan(f"init_from={lab.root}/bases/seed0", **words, arms=ARMS)
    typed = results_of(lab.steps[-1].record, lab.plans[-1].reader)
    assert "verdicts hold for that model alone" in describe(typed, [])["basis"]["seeds"]
    assert {settings["init_from"] for settings in map(typed.settings_of, typed.runs.to_dict("records"))} == {
        f"{lab.root}/bases/seed0"
    }
    lab.plan(**words, arms=arms, baseline="tied", primary=[])
    mixed = results_of(lab.steps[-1].record, lab.plans[-1].reader)
    assert "the runs of tied, untied continue a trained model" in describe(mixed, [])["basis"]["seeds"]


def test_a_seed_stands_in_init_from_alone(lab):
    train_base(lab, 0)
    quoted = lab.plan(overrides=[f"init_from='{lab.root}/bases/seed{{seed}}'"], arms=ARMS, seeds=[0])
    assert quoted.spec("tied", 0, 0).run.init_from == f"{lab.root}/bases/seed0"
    with pytest.raises(UserError, match=r"^ablation.arms.tied: prompts=\[{seed}\]: expected {seed} in init_from alone"):
        lab.plan(overrides=["prompts=[{seed}]"], arms=ARMS)
