"""What tuning leaves open: how much worse than its own best an arm may be at the settings that its search has chosen.

It is computed from the record alone, so also for what was tuned long ago by another search.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lm.ablation.judge.power import Tuning
from lm.ablation.judge.surface import Array, Trials, fit, quadratic
from lm.ablation.record import AblationRecord, SearchRecord
from lm.config.ablation import METRICS


@dataclass(slots=True, frozen=True)
class Regret:
    mean: float  # in the unit of the metric, not below zero
    variance: float
    df: int  # of the noise of a trial


def together(weights: Mapping[str, int], known: Mapping[str, Regret]) -> Tuning | None:
    """What the tuning of arms adds to the uncertainty of the sum of their metrics with these weights.

    A difference of an arm from its baseline has the weights 1 and -1. None if the regret of one of them is not known.
    Of the expected regrets' sum, only the size is used: a mean is not corrected by what it may be biased.
    """
    if not weights.keys() <= known.keys():
        return None
    parts = [(weight, known[arm]) for arm, weight in weights.items()]
    variance = sum(weight**2 * one.variance for weight, one in parts)
    shift = sum(weight * one.mean for weight, one in parts)
    return Tuning(variance + shift**2, max(parts[0][1].df, 1))


def regrets(trials: Mapping[str, Trials], at: Mapping[str, Array]) -> dict[str, Regret]:
    """By arm, the regret at the settings `at`. The noise of a trial is pooled over the arms: one alone has few."""
    known = {arm: one for arm, one in trials.items() if one.enough()}
    residuals = [quadratic(one.near())[1:] for one in known.values()]
    squares, df = (sum(column) for column in zip(*residuals, strict=True)) if residuals else (0.0, 0)
    found = {}
    for arm, one in known.items():
        noise = math.sqrt(squares / df) if df else None
        draws = fit(one, noise).regrets(at[arm]).sum(1) if one.x.shape[1] else np.zeros(1)  # nothing to tune
        found[arm] = Regret(float(draws.mean()), float(draws.var()), int(df))
    return found


def read(record: AblationRecord) -> tuple[dict[str, Trials], dict[str, Array]]:
    """The trials of the arms whose tuning is decided, and where it ended."""
    searches = record.searches if record.tune.trials else {}
    tuned = {arm: one for arm, one in searches.items() if {*one.hyperparameters} <= record.arms[arm].tuned.keys()}
    sign, step = 1 if METRICS[record.metric][0] else -1, math.log(record.tune.factor)
    trials, at = {}, {}
    for arm, one in tuned.items():
        x = [place(trial.values, one, step) for trial in one.trials]
        y = [math.inf if trial.score is None else sign * trial.score for trial in one.trials]
        trials[arm], at[arm] = Trials(np.array(x), np.array(y)), np.array(place(record.arms[arm].tuned, one, step))
    return trials, at


def place(values: Mapping[str, float], search: SearchRecord, step: float) -> list[float]:
    """Coordinates of settings: whole factors from where the search began."""
    start = search.trials[0].values
    return [math.log(values[key] / start[key]) / step for key in search.hyperparameters]
