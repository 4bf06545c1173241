"""From a question to runs: arms composed and checked, parameters matched by the program, budgets made equal."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import some
from hydra import initialize_config_dir

from lm.ablation.plan import source
from lm.ablation.plan.arms import Arm, build_arms, common_threads
from lm.ablation.plan.calibrate import computation, machine, measure
from lm.ablation.plan.cells import Cell, cell, cells, set_steps
from lm.ablation.plan.compose import compose_arms
from lm.ablation.plan.match import SAME_SIZE, change, meta_model
from lm.ablation.plan.source import source_files
from lm.ablation.plan.timing import TIMED_STEPS, TimedTraining
from lm.ablation.record import AblationRecord, asked
from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import BadInput, RunConfig
from lm.config.ablation import AblationConfig, TuneConfig
from lm.model.size import n_params
from lm.system.device import cpu_name

SMALL = [
    *("data=text", "data.seq_len=32", "data.batch_size=4", "tokenizer=byte", "trainer=cpu", "trainer.max_steps=30"),
    *("model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.d_ff=64"),
]


def question(**changes: Any) -> AblationConfig:
    settings: dict[str, Any] = {
        "name": "test",
        "question": "?",
        "arms": {"tied": ["head=tied"], "untied": ["head=untied"]},
        "baseline": "tied",
        "seeds": [0, 1],
        "equivalence_margin": 0.01,
        "primary": ["untied"],
    }
    return AblationConfig(**(settings | changes))


Build = Callable[..., dict[str, Arm]]


@pytest.fixture
def build(corpus: Path, tmp_path: Path) -> Build:
    words = [*SMALL, f"data.path={corpus}", f"data.cache_dir={tmp_path / 'cache'}"]

    def arms(config: AblationConfig, *more: str) -> dict[str, Arm]:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = replace(config, overrides=[*words, *config.overrides])
            runs = compose_arms(config, list(more), lambda said: compose("train", said, RunConfig))
            return build_arms(config, runs, 1)

    return arms


def test_arms_are_composed_with_what_is_common_and_their_own(build: Build) -> None:
    arms = build(question(overrides=["model.d_ff=48"]), "optim.lr=0.001")
    assert list(arms) == ["tied", "untied"]
    for arm in arms.values():
        assert (arm.run.model.d_ff, arm.run.optim.lr, arm.run.threads) == (48, 0.001, 1)
    assert arms["untied"].n_params - arms["tied"].n_params == 257 * 32
    assert arms["untied"].flops_per_token == arms["tied"].flops_per_token


@pytest.mark.parametrize(("said", "threads"), [("null", 1), ("2", 2)])
def test_all_arms_have_a_number_of_threads_that_no_load_decides(build: Build, said: str, threads: int) -> None:
    assert [arm.run.threads for arm in build(question(), f"threads={said}").values()] == [threads] * 2


def test_runs_of_later_calls_have_the_threads_of_the_first() -> None:
    silent = RunConfig()
    two, four = (replace(silent, threads=threads) for threads in (2, 4))
    record = AblationRecord(**asked(question()))
    assert [common_threads(record, runs) for runs in ([silent, two], [silent, silent])] == [2, 1]
    for threads in (1, 2):  # of the first call; a later one may add an arm with its own
        record = replace(record, begun="yesterday", threads=threads)
        assert [common_threads(record, runs) for runs in ([silent, two], [silent, four])] == [threads] * 2


@pytest.mark.parametrize("steps", ["1", "99"])
def test_max_tokens_overrules_any_number_of_steps(build: Build, steps: str) -> None:
    arms = build(question(), "max_tokens=2560", f"trainer.max_steps={steps}")
    made = cell(arms["tied"], 0, arms["tied"].steps["own"], {})
    assert (made.run.trainer.max_steps, made.run.max_tokens) == (20, None)


def test_the_command_line_overrules_what_is_common(build: Build) -> None:
    assert build(question(overrides=["model.d_ff=48"]), "model.d_ff=40")["tied"].run.model.d_ff == 40


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    some(
        [
            (
                {"arms": {"a": [], "b": ["model.n_layer=3"]}, "baseline": "a", "primary": []},
                [],
                "arms.b: model.n_layer",
            ),
            ({"arms": {"a": [], "b": ["head=tide"]}, "baseline": "a", "primary": []}, [], "arms.b: head=tide: no such"),
            ({"arms": {"a": [], "b": []}, "baseline": "a", "primary": []}, [], "a and b are the same"),
            ({"arms": {"a": ["head=tied"], "b": []}, "baseline": "a", "primary": []}, [], "a and b are the same"),
            ({}, ["head=untied"], "arms.tied: head=tied"),
            ({}, ["seed=3"], "seed=3: the seeds"),
            ({"arms": {"a": [], "b": ["seed=3"]}, "baseline": "a", "primary": []}, [], "arms.b: seed=3"),
            (
                {"arms": {"a": [], "b": ["trainer.max_steps=9"]}, "baseline": "a", "primary": []},
                [],
                "arms.b: trainer.max",
            ),
            ({}, ["run_dir=x"], "run_dir=x"),
            ({}, ["trainer.devices=2"], "trainer.devices"),
            ({}, ["data.path=/absent"], "/absent"),
            (
                {"arms": {"a": [], "b": ["data.val_fraction=0.4"]}, "baseline": "a", "primary": []},
                [],
                "a would be scored on",
            ),
            ({"arms": {"a": [], "b": ["tokenizer=char"]}, "baseline": "a", "primary": []}, [], "choose val_bpb"),
            (
                {"match_parameters": {"untied": "model.n_layers"}},
                [],
                "arms.untied: ablation.match_parameters: model.n_layers=1",
            ),
            ({"plot_over": "model.d_fff"}, [], "ablation.plot_over=model.d_fff"),
        ],
        3,
    ),
)
def test_what_cannot_be_compared_is_refused_by_name(build: Build, changes: dict, words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        build(question(**changes), *words)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    some(
        [
            ({}, ["optim.lrr=1"], "optim.lrr: no such key"),
            ({}, ["model.n_heads=5"], "model.d_model=32 is not divisible by model.n_heads=5"),
            ({"overrides": ["optim.lrr=1"]}, [], "ablation.overrides: optim.lrr: no such key"),
            ({"arms": {"tied": [], "untied": ["optim.lrr=1"]}}, [], "ablation.arms.untied: optim.lrr: no such key"),
            (
                {"arms": {"tied": [], "untied": ["model.n_heads=5"]}},
                ["model.d_model=32"],
                "ablation.arms.untied: model.d_",
            ),
        ],
        3,
    ),
)
def test_a_mistake_is_looked_for_where_it_was_made(build: Build, changes: dict, words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        build(question(**changes), *words)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"baseline": "tid"}, "ablation.baseline=tid: no such arm; choose one of tied, untied"),
        ({"arms": {"tied": []}}, "expected two or more"),
        ({"arms": {"tied": [], "un/tied": []}}, "ablation.arms.un/tied"),
        ({"seeds": [0, 1, 0]}, "ablation.seeds=[0, 1, 0]"),
        ({"seeds": []}, "ablation.seeds"),
        ({"seeds": [-1]}, "seed=-1"),
        ({"primary": ["tied"]}, "ablation.primary: tied"),
        ({"primary": ["x"]}, "ablation.primary=x: no such arm"),
        ({"baselines": {"untied": "untied"}}, "untied is compared with no other arm"),
        ({"baselines": {"untied": "untied"}, "primary": []}, "untied is compared with itself"),
        ({"baselines": {"untied": "tied", "tied": "untied"}}, "never ends"),
        ({"match_parameters": {"untied": "model.dropout"}}, "ablation.match_parameters.untied=model.dropout"),
        ({"match_parameters": {"tied": "model.d_ff"}}, "ablation.match_parameters: tied"),
        ({"seed_offsets": {"untied": 0}}, "ablation.seed_offsets.untied"),
        ({"seed_offsets": {"untied": 1}}, "leads to other seeds"),
        (
            {"seed_offsets": {"untied": 76}, "tune": TuneConfig(trials=4, seeds=[77])},
            "ablation.tune.seeds: 77 is also reported for untied",
        ),
        ({"name": "../x"}, "ablation.name=../x"),
        ({"name": ".."}, "ablation.name=.."),
        ({"equivalence_margin": 0.0}, "ablation.equivalence_margin"),
        ({"metric": "loss"}, "ablation.metric=loss"),
        ({"budgets": ["tokens", "tokens"]}, "ablation.budgets"),
        ({"budgets": ["steps"]}, "ablation.budgets=steps"),
        ({"tune": TuneConfig(trials=4, seeds=[1])}, "1 is also reported"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(BadInput) as error:
        question(**changes)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"trials": 2, "seeds": []}, {"seeds": [7, 7]}, {"factor": 1.0}, {"extension_trials": -1}],
)
def test_an_unfair_search_is_refused(changes: dict) -> None:
    with pytest.raises(BadInput, match=r"ablation\.tune"):
        TuneConfig(**changes)


@pytest.mark.parametrize("key", ["model.d_ff", "model.d_model"])
def test_the_program_finds_the_parameter_match(build: Build, key: str) -> None:
    arms = build(question(match_parameters={"untied": key}, overrides=["model.d_model=128", "model.d_ff=256"]))
    tied, untied = arms["tied"], arms["untied"]
    assert untied.n_params == pytest.approx(tied.n_params, rel=SAME_SIZE)
    (value,) = untied.matched.values()
    assert getattr(untied.run.model, key.split(".")[1]) == value < getattr(tied.run.model, key.split(".")[1])
    step = 4 if key == "model.d_model" else 1
    for neighbour in (value - step, value + step):  # no other value is nearer
        net = meta_model(change(untied.run, {key: neighbour}), untied.vocab_size)
        assert abs(n_params(net) - tied.n_params) >= abs(untied.n_params - tied.n_params)
    assert untied.flops_per_token < tied.flops_per_token


def test_each_budget_holds_what_it_names_equal(build: Build) -> None:
    config = question(
        arms={"tied": ["head=tied"], "untied": ["head=untied", "data.batch_size=8"]},
        match_parameters={"untied": "model.d_ff"},
        budgets=["tokens", "flops", "time"],
    )
    arms = build(config)
    tied, untied = arms["tied"], arms["untied"]
    tied.seconds_per_step, untied.seconds_per_step = 0.010, 0.015
    set_steps(config, arms)
    assert [tied.steps[budget] for budget in config.budgets] == [30, 30, 30]
    assert untied.steps["tokens"] * untied.tokens_per_step == 30 * tied.tokens_per_step
    flops = [arm.steps["flops"] * arm.tokens_per_step * arm.flops_per_token for arm in (tied, untied)]
    assert flops[1] == pytest.approx(flops[0], rel=0.5 / untied.steps["flops"])
    assert untied.steps["time"] * 0.015 == pytest.approx(30 * 0.010)


def test_a_cost_that_is_nearly_equal_needs_no_runs_of_its_own(build: Build) -> None:
    config = question(budgets=["tokens", "flops", "time"])
    arms = build(config)
    arms["tied"].seconds_per_step, arms["untied"].seconds_per_step = 0.0100, 0.0102
    set_steps(config, arms)
    assert len({one.run_dir for _, one in cells(config, {"untied": arms["untied"]})}) == len(config.seeds)


def test_a_comparison_of_comparisons_spends_the_same_throughout(build: Build) -> None:
    config = question(
        arms={"a": [], "b": ["model.d_ff=32"], "c": ["model.d_ff=16"]},
        baseline="a",
        primary=[],
        baselines={"c": "b"},
        budgets=["flops"],
    )
    arms = build(config)
    for arm in arms.values():
        arm.seconds_per_step = 0.01
    set_steps(config, arms)
    spent = [arm.steps["flops"] * arm.flops_per_token for arm in arms.values()]
    assert max(spent) / min(spent) < 1 + 1 / 30


@pytest.fixture
def arm(build: Build) -> Arm:
    return build(question())["untied"]


def test_a_cell_is_named_by_all_that_decides_it(arm: Arm) -> None:
    first = cell(arm, 0, 30, {})
    assert first.run_dir == cell(arm, 0, 30, {}).run_dir
    others = [
        cell(arm, 1, 30, {}),
        cell(arm, 0, 31, {}),
        cell(arm, 0, 30, {"optim.lr": 0.1}),
        *(cell(replace(arm, identity=arm.identity | {key: "?"}), 0, 30, {}) for key in arm.identity),
    ]
    assert len({first.run_dir, *(one.run_dir for one in others)}) == 1 + len(others)
    assert others[2].run.optim.lr == 0.1
    assert arm.run.optim.lr != 0.1


def test_arms_may_have_seeds_of_their_own(build: Build) -> None:
    config = question(arms={"a": [], "b": []}, baseline="a", primary=[], seed_offsets={"b": 100})
    arms = build(config)
    for one in arms.values():
        one.steps["tokens"] = 30
    found: list[Cell] = [one for _, one in cells(config, {"b": arms["b"]})]
    assert [one.run.seed for one in found] == [100, 101]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of lm/ that is hashed in its place, beside other packages, as a wheel is installed."""
    shutil.copytree(source.HOME / "lm", tmp_path / "lm", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    before = source_files()
    monkeypatch.setattr(source, "HOME", tmp_path)
    assert source_files() == before
    return tmp_path / "lm"


def test_the_sources_are_hashed_without_their_comments(sources: Path) -> None:
    before, optim = source_files(), sources / "training/optim.py"
    text = optim.read_text()
    optim.write_text("# a comment\n" + text.replace('"""Optimizers,', '"""Of optimizers,'))
    assert source_files() == before
    optim.write_text(text.replace("min(1.0, (step + 1)", "min(1.0, (step + 2)"))
    assert source_files() != before


COUNTED = (
    *(
        "training/optim",
        "training/loss",
        "training/checkpoint",
        "training/diagnostics",
        "data/sources",
        "data/text",
    ),
    *("data/batches", "data/tokenizer", "inference/evaluate", "system/device", "model/init", "model/head"),
    *("config/model", "config/optim", "config/run", "config/data", "exchange/adapter", "exchange/weights"),
)


def test_a_change_in_any_module_that_training_imports_counts_unless_a_reason_is_given(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, everything = source_files(), {path: path.read_text() for path in sources.rglob("*.py")}
    assert {f"lm/{name}.py" for name in COUNTED} <= before.keys()
    for path, text in everything.items():
        path.write_text(f"{text}MORE = 1\n")
    after = source_files()
    assert after.keys() == before.keys()
    assert not before.items() & after.items()
    reasons = source.NOT_COUNTED
    monkeypatch.setattr(source, "NOT_COUNTED", {})
    left_out = {name.removesuffix(".py").removesuffix("/__init__") for name in source_files().keys() - before.keys()}
    assert left_out == {name.replace(".", "/") for name in reasons}
    assert all(reasons.values())


@pytest.mark.parametrize("key", ["model.linear", "model.norm", "model.ffn", "model.position"])
def test_a_class_of_the_users_counts_as_source(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "layers_of_mine", raising=False)
    own = tmp_path / "layers_of_mine.py"
    own.write_text("import torch\nclass Own(torch.nn.Module):\n    def __init__(self, *args, **options): ...\n")
    before = source_files({key: "layers_of_mine.Own"})
    assert before != source_files()
    own.write_text(own.read_text() + "SCALE = 2\n")
    assert source_files({key: "layers_of_mine.Own"}) != before


def test_helpers_of_a_layer_of_the_users_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are imported: by name, as a module, from a package, one by another, late, from another folder."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    helpers = {
        "helped.py": "import scale_of_mine, numpy, wheel_of_mine\nimport kit_of_mine.norm as norm\n"
        "from kit_of_mine import bias\nfrom lm.model.linear import Linear\n"
        "class Own(Linear):\n    def forward(self, x):\n        import late_of_mine\n",
        "scale_of_mine.py": "from deeper_of_mine import SCALE\n",
        "deeper_of_mine.py": "SCALE = 1\n",
        "late_of_mine.py": "from importlib import import_module\nONE = import_module('named_of_mine')\n",
        "kit_of_mine/__init__.py": "from . import bias\n",
        "kit_of_mine/bias.py": "from .zero import ZERO\n",
        "kit_of_mine/zero.py": "ZERO = 0\n",
        "kit_of_mine/norm.py": "",
        "elsewhere/named_of_mine.py": "",
    }
    for name, text in [*helpers.items(), ("stranger.py", ""), ("site-packages/wheel_of_mine.py", "")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = source_files({"model.linear": "helped.Own"})
    assert before.keys() - source_files().keys() == {name.removeprefix("elsewhere/") for name in helpers}
    for name, text in helpers.items():
        (tmp_path / name).write_text(f"{text}MORE = 1\n")
        after = source_files({"model.linear": "helped.Own"})
        assert {file for file in after if after[file] != before[file]} == {name.removeprefix("elsewhere/")}
        before = after


def test_a_package_that_is_installed_counts_only_if_the_layer_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have a version, and so has torch."""
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    own = tmp_path / "site-packages/kit_with_layers"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("")
    (own / "layers.py").write_text("import torch, scipy\nfrom .scale import S\nclass Own(torch.nn.Linear):\n    pass\n")
    (own / "scale.py").write_text("S = 1\n")
    files = {f"kit_with_layers/{name}.py" for name in ("__init__", "layers", "scale")}
    assert source_files({"model.linear": "kit_with_layers.layers.Own"}).keys() - source_files().keys() == files
    others = source_files({"model.linear": "torch.nn.Linear"}).keys() - source_files().keys()
    assert others == {"torch/nn/__init__.py", "torch/nn/modules/linear.py"}


def test_a_layer_whose_changes_cannot_be_seen_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("made_by_hand")
    module.Own = type("Own", (torch.nn.Linear,), {"__module__": "made_by_hand"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    with pytest.raises(BadInput, match=r"^model\.linear=made_by_hand\.Own: made_by_hand has no source file"):
        source_files({"model.linear": "made_by_hand.Own"})
    (tmp_path / "torn_of_mine.py").write_text("import torch\nclass Own(torch.nn.Linear):\n    pass\n")
    source_files({"model.linear": "torn_of_mine.Own"})
    (tmp_path / "torn_of_mine.py").write_text("class Own(\n")
    with pytest.raises(BadInput, match=r"torn_of_mine\.py: .*; expected Python"):
        source_files({"model.linear": "torn_of_mine.Own"})


@pytest.mark.slow
def test_what_changes_the_cost_of_a_step_is_measured_apart(build: Build) -> None:
    arms = {"plain": [], "mixed": ["trainer.precision=bf16-mixed"], "often": ["trainer.accumulate_grad_batches=4"]}
    arms |= {"tuned": ["optim.lr=0.1"], "compiled": ["compile=true"], "untied": ["head=untied"]}
    arms |= {"adamw": ["optim=adamw"], "ns_steps": ["optim.ns_steps=3"]}
    arms |= {"validated": ["validation.every=3"]}
    found = {name: computation(arm) for name, arm in build(question(arms=arms, baseline="plain", primary=[])).items()}
    assert found.pop("tuned") == found["plain"]
    assert len(set(found.values())) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("decides", [True, False])
def test_a_step_of_a_larger_arm_takes_longer(build: Build, decides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real Trainer, where the number of steps follows from it, as by a bare step."""
    monkeypatch.setattr("lm.ablation.plan.calibrate.LONG_ENOUGH", 1.0)
    arms = build(question(arms={"small": [], "large": ["model.d_ff=4096"]}, baseline="small", primary=[]))
    known = measure(arms, {}, decides)
    assert 0 < arms["small"].seconds_per_step < arms["large"].seconds_per_step
    assert measure(arms, known, decides) == known


def test_the_cost_of_a_step_is_one_of_threads_of_a_cpu_and_of_how_it_is_measured(arm: Arm) -> None:
    other = replace(arm, run=replace(arm.run, threads=2))
    assert len({computation(arm), computation(other), computation(arm, True)}) == 3
    assert cpu_name() in machine()


def test_validations_take_their_share_of_a_step(build: Build) -> None:
    arms = build(question(arms={"rarely": [], "often": ["validation.every=1"]}, baseline="rarely", primary=[]))
    both = [TimedTraining(arm.run, arm.steps["own"]) for arm in arms.values()]
    assert [one.validations for one in both] == [0, 29 / 30]
    assert [len(one._step_seconds()) for one in both] == [TIMED_STEPS, TIMED_STEPS]
