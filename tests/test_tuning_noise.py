"""Verdicts on tuned arms keep their promises: two equal arms, tuned apart by the search, are seldom called different.

Simulated: each arm has a smooth loss over its hyperparameters, lowest somewhere within a factor of two of where its
search begins, and the noise of a trial and of a seed as in the studies under docs/studies. The search, the choice, the
regret and the verdict are the program's own. The truth is the difference of the arms at their own best.

`python tests/test_tuning_noise.py` prints the table of docs/ablations.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from lm.ablation.judge import statistics
from lm.ablation.judge.advice import Advice
from lm.ablation.judge.power import Tuning
from lm.ablation.judge.regret import Regret, regrets, together
from lm.ablation.judge.statistics import judge
from lm.ablation.judge.surface import Array, Trials
from lm.ablation.run import search

CURVATURES = (0.035, 0.012, 0.01)  # nats per squared factor of two: lr, embedding matrix, LM head
TRIAL, SEED = 0.006, 0.0075  # standard deviations in nats: of a trial, of a paired difference
MARGINS, SEEDS = (0.005, 0.02), (5, 8)
Shape = Callable[[Array, Array], float]  # of the distance from the lowest point and the curvatures there


def quadratic(x: Array, curvatures: Array) -> float:
    return float(curvatures @ x**2)


def lopsided(x: Array, curvatures: Array) -> float:
    """Twice as steep above the lowest point, where training diverges, as below."""
    a = 1.5 * math.log(2)
    return float(curvatures @ (2 / a**2 * (np.exp(a * x) - 1 - a * x)))


def interacting(x: Array, curvatures: Array) -> float:
    """The best value of one hyperparameter depends on the others: each pair has a correlation of 0.5."""
    z = np.sqrt(curvatures) * x
    return float(0.5 * z @ z + 0.5 * z.sum() ** 2)


@dataclass
class Found:
    """Rates: false (or, of a true difference, right) verdicts by margin and seeds, coverage of the 95 % interval."""

    decided: dict[tuple[float, int], float]
    coverage: dict[int, float]
    trials: float


def tune(shape: Shape, centre: Array, n_trials: int, noise: float, draw: np.random.Generator) -> search.Done:
    done: search.Done = {}
    while batch := search.propose(done, len(centre), n_trials):
        done |= {point: excess(shape, centre, np.array(point) / 2) + noise * draw.standard_normal() for point in batch}
    return done


def excess(shape: Shape, centre: Array, at: Array) -> float:
    """How far the loss there is above the lowest one."""
    return shape(at - centre, np.array(CURVATURES[: len(centre)]))


def simulate(
    shape: Shape,
    n_hyperparameters: int,
    repeats: int,
    tuning_seeds: int = 1,
    difference: float = 0.0,
    n_trials: int | None = None,
    choose: Callable[[search.Done], Sequence[float]] = search.best,
    count: Callable[[Tuning], Tuning | None] = lambda tuning: tuning,
    margins: Sequence[float] = MARGINS,
) -> Found:
    draw = np.random.default_rng([n_hyperparameters, tuning_seeds])
    decided = dict.fromkeys([(margin, n) for margin in margins for n in SEEDS], 0)
    covered, made = dict.fromkeys(SEEDS, 0), 0
    for _ in range(repeats):
        centres = draw.uniform(-1, 1, (2, n_hyperparameters))
        arms = [tune(shape, c, n_trials or 4 * n_hyperparameters + 2, TRIAL / tuning_seeds**0.5, draw) for c in centres]
        at = [np.array(choose(done)) / 2 for done in arms]
        known = regrets({str(i): search.trials(done) for i, done in enumerate(arms)}, {"0": at[0], "1": at[1]})
        tuning = together({"0": 1, "1": -1}, known)
        tuning = count(tuning) if tuning else None
        apart = excess(shape, centres[0], at[0]) - excess(shape, centres[1], at[1]) + difference
        values = (apart + SEED * draw.standard_normal(max(SEEDS))).tolist()
        made += sum(map(len, arms))
        for n in SEEDS:
            for margin in margins:
                found = judge({"arm": values[:n]}, margin, tunings={"arm": tuning} if tuning else None)["arm"]
                decided[margin, n] += found.verdict in ("better", "worse")
            covered[n] += (found.ci_low or 0) <= difference <= (found.ci_high or 0)
    return Found(
        {key: number / repeats for key, number in decided.items()},
        {key: number / repeats for key, number in covered.items()},
        made / repeats / 2,
    )


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict does not depend on how many seeds would give another; to know that takes most of the time."""
    hurry(monkeypatch)


def hurry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(statistics, "advise", lambda *_: Advice(None, None))
    patch.setattr(statistics, "minimum_detectable_effect", lambda *_, **__: None)


CASES = [
    (quadratic, 1, 1),
    (quadratic, 2, 2),
    (quadratic, 3, 1),
    (lopsided, 1, 2),
    (lopsided, 2, 1),
    (interacting, 2, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "n_hyperparameters", "tuning_seeds"), CASES)
def test_equal_arms_are_seldom_called_different(shape: Shape, n_hyperparameters: int, tuning_seeds: int) -> None:
    found = simulate(shape, n_hyperparameters, 2000, tuning_seeds)
    assert max(found.decided.values()) <= 0.06  # one standard error: 0.005
    assert min(found.coverage.values()) >= 0.93
    assert shape is lopsided or max(found.coverage.values()) <= 0.975


def test_equal_arms_are_seldom_called_different_in_short() -> None:
    """Bounds beyond what chance does to a right rate; without the noise of tuning, .35 and .65 are found."""
    found = simulate(lopsided, 2, 120)
    assert max(found.decided.values()) <= 0.12
    assert min(found.coverage.values()) >= 0.88


def test_without_the_noise_of_tuning_the_best_trials_of_equal_arms_are_called_different() -> None:
    found = simulate(lopsided, 2, 120, choose=search.best_trial, count=lambda _: None)
    assert found.decided[0.005, 8] >= 0.2
    assert found.coverage[8] <= 0.8


def test_a_difference_of_twice_the_margin_is_found() -> None:
    assert simulate(quadratic, 1, 120, difference=0.01).decided[0.005, 8] >= 0.75


def table(repeats: int) -> None:
    """Level and coverage, the worst over all shapes and numbers of seeds, and power at 8 seeds, by trials."""
    print("| hyperparameters | trials | false verdicts | coverage | power | with interactions |")
    for k in (1, 2, 3):
        for n_trials in (2 * k + 3, 4 * k + 2, 6 * k + 2):
            shapes = (quadratic, lopsided, interacting)[: 2 + (k > 1)]
            equal = [simulate(shape, k, repeats, n_trials=n_trials) for shape in shapes]
            false = max(rate for one in equal for rate in one.decided.values())
            covered = [rate for one in equal for rate in one.coverage.values()]
            apart = [
                simulate(shape, k, repeats, n_trials=n_trials, difference=0.01) for shape in (shapes[0], *shapes[2:])
            ]
            power = " | ".join([*(f"{one.decided[0.005, 8]:.2f}" for one in apart), *["-"] * (k == 1)])
            print(
                f"| {k} | {n_trials} | {false:.3f} | {min(covered):.3f} to {max(covered):.3f} | {power} |", flush=True
            )


if __name__ == "__main__":
    hurry(pytest.MonkeyPatch())
    table(2000)


def test_an_arm_with_nothing_to_tune_has_no_regret() -> None:
    assert regrets({"a": Trials(np.zeros((1, 0)), np.ones(1))}, {"a": np.zeros(0)}) == {"a": Regret(0.0, 0.0, 0)}
