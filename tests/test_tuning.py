"""The tuning of arms on surfaces that are known: what is tried next, what is chosen, and what it leaves open."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from lm.lab.ablation.settings import TuneConfig
from lm.lab.ablation.tuning import ArmTrials, Settings, TuningState, failed_searches, regrets, search_size, tune

Loss = Callable[[Settings], float]
NAMES = ["optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier"]
START = dict(zip(NAMES, [3e-3, 6.0, 1.0], strict=True))
CONFIG = TuneConfig(trials=30, hyperparameters=NAMES[:2])


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
    return max(search for _, search in state.trials[name]) + 1


def factors(state: TuningState, name: str = "a") -> list[float]:
    return [math.log2(value / START[key]) for key, value in state.arms[name].settings.items()]


def test_a_search_begins_at_the_settings_of_the_arm_and_a_factor_to_both_sides() -> None:
    sides = [(1.5e-3, 6.0), (6e-3, 6.0), (3e-3, 3.0), (3e-3, 12.0)]
    for losses, expected in (({}, [(3e-3, 6.0)]), ({(3e-3, 6.0): 1.0}, sides)):
        state = tune({"a": arm(losses=losses)}, CONFIG)
        assert state.next_trials == {"a": [dict(zip(NAMES[:2], values, strict=True)) for values in expected]}


def test_an_arm_that_stays_makes_one_search() -> None:
    state, arms = finish({"a": arm()}, {"a": bowl(0.2, -0.2)})
    assert (len(arms["a"].losses), n_searches(state, "a")) == (10, 1)
    assert factors(state) == pytest.approx([0.2, -0.2], abs=0.07)
    assert set(state.arms["a"].is_interior().values()) == {True}
    assert (2 * state.arms["a"].x == np.rint(2 * state.arms["a"].x)).all()  # on the grid, though values are rounded


def test_an_arm_that_has_moved_searches_again_and_the_others_do_not() -> None:
    state, arms = finish({"a": arm(), "b": arm()}, {"a": bowl(0.0, 0.0), "b": bowl(1.6, -1.2)})
    assert len(arms["b"].losses) == 20
    assert (n_searches(state, "a"), n_searches(state, "b"), len(arms["a"].losses)) == (1, 2, 10)
    assert factors(state, "b") == pytest.approx([1.6, -1.2], abs=0.07)


@pytest.mark.slow
def test_hyperparameters_that_interact_are_followed_by_further_searches_alone() -> None:
    best, loss = (1.4, -1.3, 1.2), bowl(1.4, -1.3, 1.2, correlation=0.6)
    once, again = (
        finish({"a": arm(3)}, {"a": loss}, TuneConfig(trials=14 * n, hyperparameters=NAMES))[0] for n in (1, 3)
    )
    assert (n_searches(once, "a"), n_searches(again, "a")) == (1, 3)
    assert loss(again.arms["a"].settings) < loss(once.arms["a"].settings) / 3
    assert math.dist(factors(again), best) < math.dist(factors(once), best)


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_planned_trials_are_kept(k: int) -> None:
    arms, config = {"a": arm(k), "b": arm(2)}, TuneConfig(trials=20, hyperparameters=NAMES)
    least = search_size(k, config)
    assert least == 4 * k + 2
    for distance in (0.0, 40.0):
        state, made = finish(arms, {"a": bowl(*[distance] * k), "b": bowl(0, 0)}, config)
        assert least <= len(made["a"].losses) <= 20
    assert set(state.arms["a"].is_interior().values()) == {False}  # an optimum out of reach is at the edge


def test_trials_count_in_any_order_and_after_any_interruption() -> None:
    loss = bowl(1.3, 0.7, correlation=0.5)
    whole, arms = finish({"a": arm()}, {"a": loss})
    made = [*arms["a"].losses.items()]
    for n in (2, len(made) - 1):
        state, rest = finish({"a": arm(losses=dict(reversed(made[:n])))}, {"a": loss})
        assert rest["a"].losses == arms["a"].losses
        assert state.arms["a"].settings == whole.arms["a"].settings


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


@pytest.mark.parametrize("searches", [1, 3])
@pytest.mark.parametrize(
    ("names", "best", "cliff"),
    [
        (["optim.lr"], [-3.0], -2.7),
        (["optim.lr"], [-8.0], -7.9),
        (["optim.lr", "head.head_lr_multiplier"], [-4.0, 0.5], -3.75),
        (["optim.adam_lr", "optim.weight_decay"], [-2.5, 0.0], -2.25),
        (["head.head_lr_multiplier"], [-3.0], -2.75),
    ],
)
def test_a_search_that_begins_where_training_diverges_walks_down_to_where_it_does_not(
    names: list[str], best: list[float], cliff: float, searches: int
) -> None:
    config = TuneConfig(trials=searches * (4 * len(names) + 2), hyperparameters=names)

    def loss(settings: Settings) -> float:
        x = np.log2([*settings.values()])
        return math.inf if x[0] > cliff else float((x - best) @ (x - best))

    state, _ = finish({"a": ArmTrials(dict.fromkeys(names, 1.0))}, {"a": loss}, config)
    x = np.log2([*state.arms["a"].settings.values()])
    assert state.arms["a"].trains()
    assert np.abs(x - best).max() <= (0.55 if searches > 1 else 2)


@pytest.mark.parametrize(("best", "trials", "failed"), [(6, 6, {"a": "flat"}), (6, 24, {}), (99, 24, {"a": "flat"})])
def test_on_a_plateau_the_search_climbs(best: int, trials: int, failed: dict[str, str]) -> None:
    draw, valley, noise = np.random.default_rng(0).standard_normal, bowl(best), 0.004 * (best < 9)
    losses = {"a": lambda x: noise * draw() - 0.3 * math.exp(-valley(x) / 4)}
    state, _ = finish({"a": arm(1)}, losses, replace(CONFIG, trials=trials))
    assert failed_searches(state.arms, 0.01) == failed
    assert failed or factors(state)[0] == pytest.approx(best, abs=1.5)


@pytest.mark.parametrize("names", [["optim.lr"], ["optim.weight_decay", "model.dropout"]])
def test_an_arm_that_trains_nowhere_is_a_failed_search_and_has_no_edge(names: list[str]) -> None:
    state, made = finish(
        {"a": ArmTrials(dict.fromkeys(names, 0.1)), "b": arm()},
        {"a": lambda _: math.inf, "b": bowl(0.1, 0.0)},
        replace(CONFIG, hyperparameters=names),
    )
    assert len(made["a"].losses) == 4 * len(names) + 2
    assert failed_searches(state.arms, 0.01) == {"a": "divergence"}
    assert regrets(state.arms).keys() == {"b"}
    assert (state.arms["a"].at_edge(), state.arms["a"].moved()) == ([], [])


@pytest.mark.parametrize("height", [1.0, 30.0])
def test_a_loss_that_blows_up_counts_as_diverged_and_a_noisy_one_does_not(height: float) -> None:
    def soft(settings: Settings) -> float:
        return bowl(0.1, 0.1)(settings) * 0.03 + height * (settings["optim.lr"] > START["optim.lr"] * 1.4)

    state, _ = finish({"a": arm()}, {"a": soft})
    assert regrets(state.arms)["a"].variance < 0.01**2
    assert np.isinf(state.arms["a"].y).sum() >= 1
    noisy, _ = finish({"a": arm()}, {"a": lambda settings: bowl(0.1, 0.1)(settings) * 0.03 + 0.05 * (settings == LAST)})
    assert np.isfinite(noisy.arms["a"].y).all()


LAST = {"optim.lr": 6e-3, "head.embedding_lr_multiplier": 6.0}


def test_the_best_value_may_lie_between_it_and_the_one_that_diverged() -> None:
    """Right below divergence the loss still falls: the regret counts what the next half factor may hold."""

    def tilted(settings: Settings) -> float:
        x = math.log2(settings["optim.lr"] / START["optim.lr"])
        return math.inf if x > 0.2 else -0.02 * x

    state, _ = finish({"a": arm(1), "b": arm(1)}, {"a": tilted, "b": bowl(0.0)}, replace(CONFIG, trials=6))
    assert regrets(state.arms)["a"].mean > 0.002
    assert failed_searches(state.arms, 1e-3) == {}


@pytest.mark.parametrize(("trials", "df"), [(5, 0), (6, 1), (10, 5)])
def test_the_noise_of_tuning_is_known_from_a_trial_more_than_a_surface_has_unknowns(trials: int, df: int) -> None:
    state, _ = finish({"a": arm()}, {"a": bowl(0.1, 0.2)}, replace(CONFIG, trials=trials))
    assert [regret.df for regret in regrets(state.arms).values()] == [df] * (df > 0)


@pytest.mark.parametrize(("sign", "steepness", "trials"), [(1, 1.0, 10), (-1, 1.0, 10), (-1, 1.0, 2), (1, 0.001, 10)])
def test_a_loss_that_still_falls_where_the_trials_end_is_a_failed_search(
    sign: int, steepness: float, trials: int
) -> None:
    def slope(settings: Settings) -> float:
        return 5 + sign * steepness * math.log2(settings["optim.lr"])

    state, _ = finish({"a": arm(1)}, {"a": slope}, replace(CONFIG, trials=trials))
    assert state.arms["a"].at_edge() == ["optim.lr"] * (state.arms["a"].settings != START)
    at_edge = steepness > 0.01 and state.arms["a"].at_edge()
    assert failed_searches(state.arms, 0.01) == ({"a": "edge"} if at_edge else {})
    assert at_edge or steepness < 0.01
