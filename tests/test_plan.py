"""From a question to runs: arms composed and checked, sizes matched, budgets equal, runs named, models continued."""

import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lm.config import DataConfig, RunConfig
from lm.lab.ablation.ablate import plan_json
from lm.lab.ablation.arms import SIZE_TOLERANCE, code_hash
from lm.lab.ablation.ask import with_folds
from lm.lab.ablation.execute import EXECUTORS
from lm.lab.ablation.plan import seconds_to_go
from lm.lab.ablation.warnings import plan_warnings
from lm.lab.init_from.base import read_base
from lm.system.code import COMPUTING, files_hash
from lm.training.train import train
from tests.helpers import ROOT
from tests.helpers.ablation_folder import question
from tests.helpers.ablations import Lab, draw_nothing, instant, plan_in_a_moment
from tests.helpers.refusals import refused
from tests.helpers.runs import composed


@pytest.fixture(scope="module")
def plans(tmp_path_factory, text_file):
    """Nothing is written here but the tokens of the text, once."""
    return Lab(tmp_path_factory.mktemp("plans"), text_file)


@pytest.fixture
def planner(plans, monkeypatch):
    plan_in_a_moment(monkeypatch)
    return plans


# --- arms


def test_arms_are_composed_of_what_is_common_and_their_own(planner):
    typed = ["optim.lr=0.001", "model.d_model=40", "max_tokens=2560", "trainer.max_steps=99"]
    plan = planner.plan(*typed, overrides=["model.d_ff=48", "model.d_model=48"])
    tied, untied = plan.arms.values()
    for arm in (tied, untied):
        model = arm.run.model
        assert (model.d_ff, model.d_model, arm.run.optim.lr, arm.run.threads) == (48, 40, 0.001, 1)
    assert untied.n_params - tied.n_params == 257 * 40
    assert untied.flops_per_token == tied.flops_per_token
    for spec in planner.asked():  # max_tokens overrules any number of steps
        assert (spec.run.trainer.max_steps, spec.run.max_tokens) == (20, None)


AB = {"arms": {"a": [], "b": []}, "baseline": "a", "primary": []}


PATIENT = ["checkpoint={patience:2}", "validation.every=9"]
REFUSED = [  # what is changed of a question, and the setting that is named; more: tests/test_cli.py
    ({"arms": {"tied": [], "un/tied": []}}, "arms.un/tied"),
    ({"match_parameters": {"untied": "model.n_layers"}}, "arms.untied: ablation.match_parameters"),
    ({"tune": "trainer.max_epochs", "overrides": ["trainer.max_epochs=1"]}, "tune=trainer.max_epochs"),
    ({"arms": {"tied": [], "untied": PATIENT}}, "arms.untied: checkpoint.patience=2"),
    (
        AB | {"tune": "learning_rate", "arms": {"a": [], "b": ["optim.lr_scale=2"]}},
        "arms: a and b are the same configuration; optim.lr_scale is tuned for each of them",
    ),
]
ARMS = {  # what an arm says beside the configuration of its baseline
    "head=tied": "arms: a and b are the same configuration; what they change decides no score",  # as by default
    "data.val_fraction=0.4": "arms: b and a would be scored on different validation texts",
    "tokenizer=char": "metric=val_loss: b and a have different tokenizers",
}
REFUSED += [(AB | {"arms": {"a": [], "b": [override]}}, named) for override, named in ARMS.items()]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_gives_no_answer_is_refused_by_its_key(changes, named, planner):
    with refused(f"^{re.escape(f'ablation.{named}')}"):
        planner.run(**changes)
    assert not planner.out.exists()


@pytest.mark.parametrize("key", ["model.d_ff", "model.d_model"])
def test_parameters_are_matched_to_those_of_the_baseline(planner, key):
    plan = planner.plan(match_parameters={"untied": key}, overrides=["model.d_model=128", "model.d_ff=256"])
    tied, untied = plan.arms["tied"], plan.arms["untied"]
    assert untied.n_params == pytest.approx(tied.n_params, rel=SIZE_TOLERANCE)
    (value,) = untied.matched.values()
    assert getattr(untied.run.model, key.split(".")[1]) == value < getattr(tied.run.model, key.split(".")[1])


def test_training_texts_are_compared_where_one_text_scores_both(planner):
    """What one of them has of the scored text is told."""
    paths = {name: planner.root / f"{name}.txt" for name in ("first", "second", "scored")}
    for name, path in paths.items():
        path.write_text(f"{name} " * 300)
    arms = {name: [f"data.path={paths[name]}"] for name in ("first", "second")}
    for leaked, told in (("", []), (paths["scored"].read_text(), [" % of it in second and 0 % of it in first."])):
        paths["second"].write_text("second " * 200 + leaked)
        plan = planner.plan(f"data.val_path={paths['scored']}", arms=arms, baseline="first", primary=[])
        assert len({arm.identity["data_hash"] for arm in plan.arms.values()}) == 2
        warnings = plan_warnings(planner.stages[-1].record)
        assert all(part in warning.summary for part, warning in zip(told, warnings, strict=True))


def test_each_budget_holds_equal_what_it_names(planner):
    both = {"tied": ["head=tied"], "untied": ["head=untied", "data.batch_size=8"]}
    for budget in ("tokens", "flops"):
        plan = planner.plan(arms=both, match_parameters={"untied": "model.d_ff"}, budget=budget)
        tied, untied = plan.arms["tied"], plan.arms["untied"]
        assert tied.steps == 30
        spent = [
            arm.steps * arm.tokens_per_step * (1 if budget == "tokens" else arm.flops_per_token)
            for arm in (tied, untied)
        ]
        assert spent[1] == pytest.approx(spent[0], rel=0.5 / untied.steps)


def test_a_plan_says_what_it_costs_and_detects_and_leaves_nothing(planner):
    """The time to go is that of the busiest worker, for a run cannot be divided."""
    plan = planner.plan(seeds=[*range(5)])
    tied, untied = plan.arms.values()
    numbers = (tied.n_params, untied.n_params, tied.flops_per_token, 30 * 4 * 32)
    words = [*(f"{number:,}" for number in numbers), "10 runs, 0 done", "about ", str(planner.out)]
    assert [part for part in words if part not in planner.tables[-1]] == []
    pairs = SimpleNamespace(contrasts=[SimpleNamespace(sd=0.01, family="primary")], question=plan.question)
    planned = plan_json(plan, planner.stages[-1], pairs)
    assert planned["runs"]["missing"] == 10
    assert planned["minimum_detectable"] == pytest.approx(0.0167, abs=1e-4)
    tied.seconds_per_step = untied.seconds_per_step = 2.0
    for workers, rounds in ((1, 10), (4, 3), (16, 1)):
        own = replace(plan, record=replace(plan.record, workers=workers))
        assert seconds_to_go(own, planner.stages[-1]) == pytest.approx(rounds * tied.seconds())
    untied.seconds_per_step = 200.0
    assert seconds_to_go(own, planner.stages[-1]) == pytest.approx(untied.seconds())
    assert not planner.out.exists()


# --- parts of the text, and tuned arms


def test_each_pair_holds_out_a_part_of_its_own_and_an_arm_may_have_seeds_of_its_own(planner):
    plan = planner.plan(**AB, folds=True, seeds=[5, 6, 7], first_fold=0.5, seed_offsets={"b": 100})
    assert [(spec.arm, spec.seed, spec.run.seed, spec.run.data.fold) for spec in planner.asked()] == [
        (arm, seed, seed + offset, seed - 4.5) for arm, offset in (("a", 0), ("b", 100)) for seed in (5, 6, 7)
    ], "by the index of the pair"
    assert len({spec.identity["data_hash"] for spec in planner.asked()}) == 3
    assert len(plan.arms["a"].scored_tokens) == 3


@pytest.mark.parametrize("data", [DataConfig(fold=3), DataConfig(source="text", path="a.txt", val_path="b.txt")])
def test_a_part_or_a_text_that_is_typed_holds_for_all_pairs(data):
    asked = question(folds=True)
    assert with_folds(asked, {"tied": RunConfig()}).folds
    assert not with_folds(asked, {"tied": RunConfig(data=data)}).folds


def test_a_text_of_few_documents_whose_parts_are_empty_is_refused_with_the_way_on(planner):
    folder = planner.root / "two"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{name} word " * 200)
    with refused(r"data\.fold=.* too few documents; .* folds=false$"):
        planner.plan(f"data.path={folder}", folds=True, seeds=[*range(10)])


def test_a_margin_of_one_percent_is_converted_to_bits_per_byte(planner):
    assert planner.plan(equivalence_margin=None).question.equivalence_margin == 0.01
    plan = planner.plan(equivalence_margin=None, metric="val_bpb")
    assert plan.question.equivalence_margin == pytest.approx(0.01 / math.log(2), abs=5e-4), "a token is a byte here"


def test_a_tuned_question_begins_with_its_pilot(planner):
    planner.plan(tune="true", seeds=[0, 1, 2])
    stage = planner.stages[-1]
    assert {(spec.arm, spec.seed, spec.factor) for spec in stage.todo} == {
        (arm, seed, by) for arm in ("tied", "untied") for seed in (0, 1) for by in (0.5, 1.0, 2.0)
    }
    assert all(spec.run.optim.lr_scale == spec.factor for spec in stage.todo)
    assert stage.n_open == 2 * (5 * 3 - 3 * 2)
    assert "30 or more runs, 0 done" in planner.tables[-1]
    planner.plan("model.dropout=0.6", tune="model.dropout")
    assert {spec.run.model.dropout for spec in planner.stages[-1].todo} == {0.3, 0.6}, "1.2 is no fraction"


# --- the names of runs


def test_all_code_that_decides_a_score_is_hashed(tmp_path, monkeypatch):
    home = shutil.copytree(ROOT / "lm", tmp_path / "lm", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("lm.system.code.HOME", home)
    hash_of_code = files_hash.__wrapped__  # without its cache
    hashes = [hash_of_code(COMPUTING)]
    for name in ("model/linear.py", "scoring.py", "folder.py"):
        with open(home / name, "a") as file:
            file.write("MORE = 1\n")
        hashes.append(hash_of_code(COMPUTING))
    (home / "lab/ablation/report.py").unlink()
    assert (len({*hashes}), hash_of_code(COMPUTING)) == (4, hashes[-1])


def test_a_class_of_the_users_and_its_local_helpers_are_hashed(tmp_path, monkeypatch):
    """However they are imported: by name, as a module, from a package, one by another, late."""
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "helped.py": "import scale_of_mine, numpy\nimport kit_of_mine.norm as norm\n"
        "from lm.model.linear import Linear\n"
        'class Own(Linear):\n    """Mine."""\n    def forward(self, x):\n        import late_of_mine\n',
        "scale_of_mine.py": "from deeper_of_mine import SCALE\n",
        "deeper_of_mine.py": "SCALE = 1\n",
        "late_of_mine.py": "",
        "kit_of_mine/__init__.py": "from . import bias\n",
        "kit_of_mine/bias.py": "",
        "kit_of_mine/norm.py": "",
    }
    for name, text in {**files, "stranger_of_mine.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    hashes = [code_hash(), code_hash({"model.linear": "helped.Own"})]
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}MORE = 1\n")
        hashes.append(code_hash({"model.linear": "helped.Own"}))
    assert len({*hashes}) == 2 + len(files), "each of these files counts"
    text = (tmp_path / "helped.py").read_text()
    (tmp_path / "helped.py").write_text("# a comment\n" + text.replace("Mine.", "My own.").replace(", ", ",  "))
    (tmp_path / "stranger_of_mine.py").write_text("MORE = 1\n")
    assert code_hash({"model.linear": "helped.Own"}) == hashes[-1]
    assert code_hash() == hashes[0] != code_hash({"model.linear": "torch.nn.Linear"}), "also one that is installed"


# --- arms that continue trained models: one for each seed, or one that is given

TWO_HEADS = {"tied": ["head=tied"], "untied": ["head=untied_from_embedding"]}


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
    words = {"overrides": [f"init_from={lab.root}/bases/seed{{seed}}"], "arms": TWO_HEADS}
    starts = {}

    def noted(spec):
        starts[spec.arm, spec.run.seed] = spec.run.init_sha256
        return 1 + 0.1 * spec.run.seed

    draw_nothing(monkeypatch)
    monkeypatch.setitem(EXECUTORS, "local", instant(noted))
    lab.run(**words)
    assert starts == {(arm, seed): sha256[seed] for arm in TWO_HEADS for seed in (0, 1)}
    assert "continue the trained model of their seed" in (lab.out / "report.md").read_text()
    assert lab.run(**words, seeds=[1, 0]).record.changed == [], "the order of the seeds is no change"
    shutil.rmtree(lab.root / "bases/seed1")
    train_base(lab, 1, "optim.lr=0.02")
    assert lab.run(**words).record.changed == [4], "another model of any seed is one"
    with refused(r"init_from=.*bases/seed2: no such folder"):
        lab.run(**words, seeds=[0, 1, 2])
    for differs in ("tokenizer=char", "model.n_layers=1"):
        train_base(lab, 2, differs)
        with refused(r"init_from=.*bases/seed2: expected .* other models of this arm"):
            lab.run(**words, seeds=[0, 1, 2])
        shutil.rmtree(lab.root / "bases/seed2")


@pytest.mark.slow
def test_a_base_that_has_read_the_validation_text_is_refused_or_told(lab, caplog):
    train_base(lab, 0, "data.fold=0")
    start = f"init_from={lab.root}/bases/seed0"
    with refused(r"bases/seed0: expected a model that has not read the validation text"):
        lab.plan(start, arms=TWO_HEADS)
    train_base(lab, 1)
    with refused(r"bases/seed0: expected a model that has not read the validation text"):
        lab.plan(arms=TWO_HEADS, seeds=[1, 0], overrides=[f"init_from={lab.root}/bases/seed{{seed}}"])
    whole = f"init_from={lab.root}/bases/seed1"  # which has read nine tenths of the text
    lab.plan(whole, "data.val_fraction=0.05", arms=TWO_HEADS)
    with refused("expected a model that has not read the validation text"):
        lab.plan(whole, "data.val_fraction=0.9", arms=TWO_HEADS)
    train(composed(*lab.overrides(), start, f"run_dir={lab.root}/run"))
    assert "the score may be too good" in caplog.text
    caplog.clear()
    train(composed(*lab.overrides(), start, "data.fold=0", f"run_dir={lab.root}/same"))
    assert "the score may be too good" not in caplog.text
    train(composed(*lab.overrides(), f"init_from={lab.root}/same", f"run_dir={lab.root}/second"))
    assert "the score may be too good" in caplog.text, "by the model before it"
    piece = lab.root / "piece.txt"
    piece.write_text(lab.text.read_text()[-4000:])
    train(composed(*lab.overrides(), start, f"data.path={piece}", f"run_dir={lab.root}/piece"))
    assert f"init_from={lab.root}/bases/seed0 was trained on a text that holds 98% of this text" in caplog.text


def test_a_file_of_a_folder_that_a_base_was_trained_on_has_been_read(lab):
    texts = lab.root / "texts"
    texts.mkdir()
    for name in "ab":
        (texts / name).write_text(f"{name} has its own text. " * 200)
    train_base(lab, 0, f"data.path={texts}")
    start = f"init_from={lab.root}/bases/seed0"
    with refused("expected a model that has not read the validation text"):
        lab.plan(start, f"data.val_path={texts / 'b'}", arms=TWO_HEADS)
    lab.plan(start, f"data.path={texts}", arms=TWO_HEADS)  # on the part that the base has not read


def test_a_seed_stands_in_init_from_alone(lab):
    train_base(lab, 0)
    quoted = lab.plan(overrides=[f"init_from='{lab.root}/bases/seed{{seed}}'"], arms=TWO_HEADS, seeds=[0])
    assert quoted.spec("tied", 0, 0).run.init_from == f"{lab.root}/bases/seed0"
    with refused(r"^ablation.arms.tied: prompts=\[{seed}\]: expected {seed} in init_from alone"):
        lab.plan(overrides=["prompts=[{seed}]"], arms=TWO_HEADS)
