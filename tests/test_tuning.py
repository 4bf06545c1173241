"""The tuning of arms on surfaces that are known: what is tried next, what is chosen, and what it leaves open."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from lm.ablation.tuning import ArmTrials, Settings, TuningState, factors_moved, planned_trials, profiles, regrets, tune
from lm.config import UserError
from lm.config.ablation import TuneConfig

Loss = Callable[[Settings], float]
NAMES = ["optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier"]
START = dict(zip(NAMES, [3e-3, 6.0, 1.0], strict=True))
CONFIG = TuneConfig(trials=10, hyperparameters=NAMES[:2])


def arm(k: int = 2, **fields: object) -> ArmTrials:
    return ArmTrials(dict(list(START.items())[:k]), **fields)  # type: ignore[arg-type]


def bowl(*best: float, correlation: float = 0.0) -> Loss:
    """Lowest so many factors of two from START."""

    def loss(settings: Settings) -> float:
        x = np.array([math.log2(settings[name] / START[name]) for name in settings]) - best
        return float((1 - correlation) * x @ x + correlation * x.sum() ** 2)

    return loss


def finish(
    arms: dict[str, ArmTrials], losses: Mapping[str, Loss], config: TuneConfig = CONFIG, **options: Callable[..., bool]
) -> tuple[TuningState, dict[str, ArmTrials]]:
    """Make trials until there are none to make."""
    while (state := tune(arms, config, **options)).next_trials:
        for name, trials in state.next_trials.items():
            new = {arms[name].key(settings): losses[name](settings) for settings in trials}
            assert not new.keys() & arms[name].losses.keys()
            arms = arms | {name: replace(arms[name], losses={**arms[name].losses, **new})}
    return state, arms


def n_searches(state: TuningState, name: str) -> int:
    return max(search for _, searches in state.trials[name] for search in searches) + 1


def factors(state: TuningState, name: str = "a") -> list[float]:
    return [*factors_moved(START, state.arms[name].settings, CONFIG.factor).values()]


def test_a_search_begins_at_the_settings_of_the_arm_and_a_factor_to_both_sides() -> None:
    sides = [(1.5e-3, 6.0), (6e-3, 6.0), (3e-3, 3.0), (3e-3, 12.0)]
    for losses, expected in (({}, [(3e-3, 6.0)]), ({(3e-3, 6.0): 1.0}, sides)):
        state = tune({"a": arm(losses=losses)}, CONFIG)
        assert state.next_trials == {"a": [dict(zip(NAMES[:2], values, strict=True)) for values in expected]}


def test_an_arm_that_stays_makes_one_search_with_the_trials_of_the_config() -> None:
    state, arms = finish({"a": arm()}, {"a": bowl(0.2, -0.2)})
    assert len(arms["a"].losses) == 10
    assert n_searches(state, "a") == 1
    assert factors(state) == pytest.approx([0.2, -0.2], abs=0.07)
    assert set(state.arms["a"].is_interior().values()) == {True}
    assert (2 * state.arms["a"].x == np.rint(2 * state.arms["a"].x)).all()  # on the grid, though values are rounded


def test_all_arms_search_again_where_one_has_moved() -> None:
    state, arms = finish({"a": arm(), "b": arm()}, {"a": bowl(0.0, 0.0), "b": bowl(1.6, -1.2)})
    assert len(arms["b"].losses) == 20
    assert n_searches(state, "b") == n_searches(state, "a") == 2
    assert len(arms["a"].losses) == 10  # again from the same centre: all was tried
    assert factors(state, "b") == pytest.approx([1.6, -1.2], abs=0.07)


def test_hyperparameters_that_interact_are_followed_by_restarts_alone() -> None:
    best, loss = (1.4, -1.3, 1.2), bowl(1.4, -1.3, 1.2, correlation=0.6)
    config = TuneConfig(trials=14, hyperparameters=NAMES)
    once, again = (finish({"a": arm(3)}, {"a": loss}, replace(config, restarts=n))[0] for n in (0, 2))
    assert n_searches(again, "a") == 3
    assert loss(again.arms["a"].settings) < loss(once.arms["a"].settings) / 3
    assert math.dist(factors(again), best) < math.dist(factors(once), best)


@pytest.mark.parametrize("k", [1, 3])
def test_planned_trials_are_kept_and_in_proportion(k: int) -> None:
    arms, config = {"a": arm(k), "b": arm(3)}, TuneConfig(trials=14, hyperparameters=NAMES)
    assert planned_trials(arms, config)["a"] == ({1: 6, 2: 10, 3: 14}[k], {1: 19, 2: 33, 3: 46}[k])
    for distance in (0.0, 40.0):
        state, made = finish(arms, {"a": bowl(*[distance] * k), "b": bowl(0, 0, 0)}, config)
        for name, (least, most) in planned_trials(arms, config).items():
            assert least <= len(made[name].losses) <= most
    assert set(state.arms["a"].is_interior().values()) == {False}  # an optimum out of reach is at the edge
    assert planned_trials({"a": replace(arms["a"], is_open=False)}, config) == {"a": (0, 0)}


def test_trials_count_in_any_order_and_after_any_interruption() -> None:
    loss = bowl(1.3, 0.7, correlation=0.5)
    whole, arms = finish({"a": arm()}, {"a": loss})
    made = [*arms["a"].losses.items()]
    for n in (2, 7, len(made) - 1):
        state, rest = finish({"a": arm(losses=dict(reversed(made[:n])))}, {"a": loss})
        assert rest["a"].losses == arms["a"].losses
        assert state.arms["a"].settings == whole.arms["a"].settings


def test_an_arm_that_is_not_open_gets_no_trials() -> None:
    state, made = finish({"a": arm(is_open=False), "b": arm(3)}, {"b": bowl(2.5, 2.5, 2.5)})
    assert ([*state.arms], [*state.trials], made["a"].losses) == (["b"], ["b"], {})
    assert n_searches(state, "b") >= 2


def test_where_training_diverges_or_may_not_go_is_not_chosen() -> None:
    state, _ = finish({"a": arm()}, {"a": lambda settings: math.inf if settings["optim.lr"] > 4e-3 else 1.0})
    assert state.arms["a"].settings["optim.lr"] <= 3e-3
    state, made = finish(
        {"a": arm()}, {"a": bowl(5.0, 0.0)}, is_allowed=lambda _, settings: settings["optim.lr"] <= 5e-3
    )
    assert max(lr for lr, _ in made["a"].losses) <= 5e-3
    assert state.arms["a"].is_interior()["optim.lr"] is False


def test_the_surface_averages_noise_and_says_what_it_leaves_open() -> None:
    noise = np.random.default_rng(0)
    state, _ = finish({"a": arm()}, {"a": lambda settings: bowl(0.2, 0.1)(settings) + 0.05 * noise.standard_normal()})
    assert factors(state) == pytest.approx([0.2, 0.1], abs=0.15)
    regret = regrets(state.arms)["a"]
    assert 0 < regret.mean < 0.02
    values, mean, sd = profiles(state.arms, CONFIG.factor)["a"]["optim.lr"]
    assert values[mean.argmin()] == pytest.approx(state.arms["a"].settings["optim.lr"], rel=1e-3)
    assert (sd[[0, -1]] > sd.min()).all()


def test_an_unfair_search_is_refused() -> None:
    for changes in ({"trials": 2, "seeds": []}, {"seeds": [7, 7]}, {"factor": 1.0}, {"restarts": -1}):
        with pytest.raises(UserError, match=r"^ablation\.tune\."):
            TuneConfig(**changes)  # type: ignore[arg-type]
