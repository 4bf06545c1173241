"""The tuning of arms, from outcomes laid where runs would leave them."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import test_record
from conftest import WHOLE_RESULT
from test_plan import Build, build, question

from lm.ablation.outcomes import Outcomes
from lm.ablation.plan.arms import Arm
from lm.ablation.plan.cells import Cell
from lm.ablation.record import AblationRecord
from lm.ablation.run import search
from lm.ablation.run.tuning import Tuning
from lm.config import BadInput
from lm.config.ablation import AblationConfig, TuneConfig

__all__ = ["build"]  # the fixture
TUNE = TuneConfig(
    trials=5, extension_trials=4, seeds=[77], hyperparameters=["optim.lr", "head.embedding_lr_multiplier"]
)
TABLE_LR, HEAD_LR = 6.0, "head.head_lr_multiplier"
ADAMW = ("optim=adamw", "optim.lr=0.003", f"head.embedding_lr_multiplier={TABLE_LR}")
Loss = Callable[[Cell], float | None]  # None: killed


@pytest.fixture
def arms(build: Build) -> dict[str, Arm]:
    return ready(build(question(), *ADAMW))


def ready(arms: dict[str, Arm]) -> dict[str, Arm]:
    for arm in arms.values():
        arm.steps["tokens"] = 30
    return arms


def near(lr: float) -> Loss:
    """A trough over the rate; the table's own is best where it begins."""
    return lambda one: (
        (one.tuned["optim.lr"] / lr - 1) ** 2 + math.log(one.tuned["head.embedding_lr_multiplier"] / TABLE_LR) ** 2
    )


def make(tuning: Tuning, folder: Path, loss: Loss) -> list[str]:
    """Make the trials that the tuning asks for and that have no result yet; returns their names."""
    made = []
    for batch in tuning.rounds():
        for one in batch:
            place = folder / one.run_dir / "result.json"
            if not place.exists() and (value := loss(one)) is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(json.dumps(WHOLE_RESULT | one.identity | {"val_loss": value, "seed": one.seed}))
                made.append(Path(one.run_dir).name)
    return made


def record(tuning: Tuning, config: AblationConfig, arms: dict[str, Arm]) -> AblationRecord:
    searches = {name: search.record() for name, search in tuning.searches.items()}
    planned = {name: arm.record() for name, arm in arms.items()}
    return test_record.record(tune=config.tune, trials_made=tuning.decided, arms=planned, searches=searches)


def test_trials_are_in_proportion_to_the_hyperparameters(build: Build, tmp_path: Path) -> None:
    """Two for where it is and how noisy, the rest by hyperparameter; all of them are made."""
    tune = replace(TUNE, trials=14, extension_trials=0, hyperparameters=[*TUNE.hyperparameters, HEAD_LR])
    config = question(tune=tune)
    tuning = Tuning(config, ready(build(config, *ADAMW)), Outcomes(tmp_path), test_record.record())
    assert tuning.to_make() == {"tied": 10, "untied": 14}
    longer = question(tune=replace(tune, extension_trials=6))
    assert Tuning(longer, ready(build(longer, *ADAMW)), Outcomes(tmp_path), test_record.record()).extension() == 10
    make(tuning, tmp_path, near(3e-3))
    assert {name: len(search.done) for name, search in tuning.searches.items()} == {"tied": 10, "untied": 14}
    assert [tuning.share("tied", trials) for trials in (1, 2, 5)] == [1, 2, 4]


def test_what_was_decided_by_another_search_stays(
    arms: dict[str, Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials that today's would not make, and settings that it would not choose."""
    config = question(tune=TUNE)
    with monkeypatch.context() as patch:
        rows = {(): [(0, 0)], ((0, 0),): [(1, 0), (-1, 0), (0, 1), (0, -1)]}
        patch.setattr(search, "propose", lambda done, *_: rows.get(tuple(done), []))
        patch.setattr(search, "best", lambda done: (1, 0))
        first = Tuning(config, arms, Outcomes(tmp_path), test_record.record())
        make(first, tmp_path, near(3e-3))
        before, tuned = record(first, config, arms), arms["tied"].tuned
    assert tuned["optim.lr"] == pytest.approx(3e-3 * 2**0.5, rel=1e-3)
    for arm in arms.values():
        arm.tuned = {}
    again = Tuning(config, arms, Outcomes(tmp_path), before)
    assert (again.open(), again.to_make(), make(again, tmp_path, near(3e-3))) == ([], {}, [])
    assert [arm.tuned for arm in arms.values()] == [tuned, tuned]
    assert record(again, config, arms) == before


@pytest.mark.parametrize(("lr", "trials"), [(3e-3, 5), (1.0, 9)])
def test_the_same_again_asks_for_nothing_more(arms: dict[str, Arm], tmp_path: Path, lr: float, trials: int) -> None:
    config = question(tune=TUNE)
    first = Tuning(config, arms, Outcomes(tmp_path), test_record.record())
    assert len(make(first, tmp_path, near(lr))) == 2 * trials  # widened where the best lies far away
    tuned, before = {name: arm.tuned for name, arm in arms.items()}, record(first, config, arms)
    again = Tuning(config, arms, Outcomes(tmp_path), before)
    assert again.open() == []
    assert make(again, tmp_path, near(lr)) == []
    assert {name: arm.tuned for name, arm in arms.items()} == tuned


def test_an_arm_that_comes_later_gets_as_many_and_moves_nobody(arms: dict[str, Arm], tmp_path: Path) -> None:
    config, one = question(tune=TUNE), {"tied": arms["tied"]}
    first = Tuning(config, one, Outcomes(tmp_path), test_record.record())
    make(first, tmp_path, near(3e-3))
    before, tuned = record(first, config, one), arms["tied"].tuned
    both = Tuning(config, arms, Outcomes(tmp_path), before)
    assert both.to_make() == {"untied": 5}
    made = make(both, tmp_path, near(1.0))  # far from its best, which widens nothing for those that were done
    assert {name.partition("-")[0] for name in made} == {"untied"}
    assert len(made) == 5
    assert arms["tied"].tuned == tuned


@pytest.mark.slow
def test_what_was_decided_for_other_runs_decides_nothing(build: Build, arms: dict[str, Arm], tmp_path: Path) -> None:
    config = question(tune=TUNE)
    first = Tuning(config, arms, Outcomes(tmp_path), test_record.record())
    assert len(make(first, tmp_path, near(3e-3))) == 2 * 5
    other = ready(build(config, *ADAMW, "model.d_ff=24"))
    anew = Tuning(config, other, Outcomes(tmp_path), record(first, config, arms))
    assert [arm.name for arm in anew.open()] == ["tied", "untied"]
    assert len(make(anew, tmp_path, near(1.0))) == 2 * 9  # widened, for its own best lies far away


@pytest.mark.slow
def test_another_number_of_trials_is_decided_anew(arms: dict[str, Arm], tmp_path: Path) -> None:
    first = Tuning(question(tune=TUNE), arms, Outcomes(tmp_path), test_record.record())
    make(first, tmp_path, near(3e-3))
    before = record(first, question(tune=TUNE), arms)
    for arm in arms.values():
        arm.tuned = {}
    again = Tuning(question(tune=replace(TUNE, trials=6)), arms, Outcomes(tmp_path), before)
    assert [arm.name for arm in again.open()] == ["tied", "untied"]
    assert again.decided is None


def test_what_was_killed_says_nothing_about_a_value(arms: dict[str, Arm], tmp_path: Path) -> None:
    config = question(tune=TUNE)

    def loss(one: Cell) -> float | None:
        return None if one.arm == "untied" and one.tuned["optim.lr"] > 3e-3 else near(3e-3)(one)

    tuning = Tuning(config, arms, Outcomes(tmp_path), test_record.record())
    make(tuning, tmp_path, loss)
    search = tuning.searches["untied"]
    assert tuning.broken() == {"untied": search.run_dirs((2, 0))}
    assert search.values((2, 0))["optim.lr"] == 6e-3
    assert arms["untied"].tuned == {}  # it is not run, rather than run with a wrong value
    assert arms["tied"].tuned
    assert tuning.decided is None
    again = Tuning(config, arms, Outcomes(tmp_path), record(tuning, config, arms))
    make(again, tmp_path, near(3e-3))
    assert not again.broken()
    assert arms["untied"].tuned["optim.lr"] == pytest.approx(arms["tied"].tuned["optim.lr"], rel=0.1)


def test_what_diverged_is_the_worst(arms: dict[str, Arm], tmp_path: Path) -> None:
    def loss(one: Cell) -> float | None:
        if one.tuned["optim.lr"] < 5e-3:
            return near(3e-3)(one)
        (tmp_path / f"{one.run_dir}.json").write_text(json.dumps({"status": "diverged", "error": "nan"}))
        return None

    tuning = Tuning(question(tune=TUNE), arms, Outcomes(tmp_path), test_record.record())
    make(tuning, tmp_path, loss)
    assert not tuning.broken()
    assert arms["tied"].tuned["optim.lr"] == 3e-3


@pytest.mark.parametrize(
    ("hyperparameters", "said"),
    [
        (["trainer.gradient_clip_val"], "trainer.gradient_clip_val is none"),
        (["data.val_fraction"], "data.val_fraction is none"),
        (["model.n_layers"], "model.n_layers is none"),
        (["model.droput"], "model.droput is none"),
        (["model.dropout"], "tied has none of model.dropout"),
        (["head.head_lr_multiplier"], "tied has none of head.head_lr_multiplier"),
    ],
)
def test_what_cannot_be_tuned_is_refused_at_the_start(build: Build, hyperparameters: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        build(question(tune=TuneConfig(trials=3, seeds=[77], hyperparameters=hyperparameters)))


def test_a_setting_stays_where_it_may_be(build: Build, tmp_path: Path) -> None:
    both = {
        "a": ["head=untied_midtraining", "head.untie_at=0.9"],
        "b": ["head=untied_midtraining", "head.untie_at=0.8"],
    }
    tune = TuneConfig(trials=5, seeds=[77], hyperparameters=["head.untie_at"])
    config = question(arms=both, baseline="a", primary=[], tune=tune)
    arms = ready(build(config))
    tuning = Tuning(config, arms, Outcomes(tmp_path), test_record.record())
    make(tuning, tmp_path, lambda one: 2 - one.tuned["head.untie_at"])
    assert 0.8 <= arms["b"].tuned["head.untie_at"] <= 1
