"""What the record of an ablation must be: what it names is there, and its numbers can be drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

from lm.config import BadInput, choose
from lm.config.ablation import BUDGETS, METRICS, check_interactions, check_looks, check_size, distinct

if TYPE_CHECKING:
    from lm.ablation.record import AblationRecord

MOST_STEPS = 100  # of a search, from where it began: a surface is computed over all that was tried
HASHES = ("data_hash", "tokenizer_hash", "source_hash")


def drawable(number: float) -> bool:
    """Whether numpy and matplotlib can plot it. The limit is above any float32 loss, so no real score is refused."""
    return abs(number) < 2**63 or (isinstance(number, float) and abs(number) < 1e100)


def checked(record: "AblationRecord") -> "AblationRecord":
    """The record, if what it names is there. Raises BadInput naming the key."""
    trials = [one for search in record.searches.values() for trial in search.trials for one in trial.run_dirs]
    n_trials = max(len(trials), sum(len(search.trials) for search in record.searches.values()))
    n_runs = max(len(record.cells) + n_trials, len(record.seeds), len(record.bases))
    check_size("", record, len(record.arms), n_runs)
    arms = record.arms.keys()
    named = {
        "baseline": [record.baseline],
        "primary": record.primary,
        "contrasts": [*record.contrasts, *record.contrasts.values()],
        "cells": [one.arm for one in record.cells],
        "searches": [*record.searches],
    }
    for key, names in named.items():
        if lost := [name for name in names if name not in arms]:
            raise BadInput(f"{key}: no such arm as {lost[0]}; expected one of {', '.join(arms)}")
    if lost := [name for name, other in record.contrasts.items() if name == other]:
        raise BadInput(f"contrasts: {lost[0]} is compared with itself")
    check_interactions(record.interactions, record.contrasts, "interactions")
    check_looks("looks", record, decided=True)
    choose("metric", record.metric, tuple(METRICS))
    hyperparameters = [key for search in record.searches.values() for key in search.hyperparameters]
    shown = {"arms": [*arms], "searches": hyperparameters, "plot_over": [record.plot_over or ""]}
    for key, names in shown.items():
        if strange := [name for name in names if not name.isprintable()]:
            raise BadInput(f"{key}: {strange[0]!r}; expected a printable name")  # figures show it
    distinct("budgets", record.budgets)
    budgets = [*record.budgets, *(one.budget for one in record.cells)]
    if lost := [budget for budget in budgets if budget not in BUDGETS]:
        raise BadInput(f"budgets: {lost[0]}; choose among {', '.join(BUDGETS)}")
    if not record.equivalence_margin > 0 or not drawable(record.equivalence_margin):
        raise BadInput(f"equivalence_margin: {record.equivalence_margin}; expected more than 0, less than 1e100")
    for name, one in record.arms.items():
        if lost := [budget for budget in record.budgets if budget not in one.steps]:
            raise BadInput(f"arms.{name}.steps.{lost[0]}: is missing")
        if one.matched and name not in record.contrasts:
            raise BadInput(f"contrasts: has no {name}, which is matched to the arm that it is compared with")
        if lost := [key for key in HASHES if key not in one.identity]:
            raise BadInput(f"arms.{name}.identity.{lost[0]}: is missing")
    for run_dir in [one.run_dir for one in record.cells] + [one.run_dir for one in record.bases] + trials:
        if Path(run_dir).is_absolute() or ".." in Path(run_dir).parts:
            raise BadInput(f"run_dir={run_dir}: leads out of the ablation's folder")
    for name in record.searches:
        check_search(record, name)
    return record


def check_search(record: "AblationRecord", name: str) -> None:
    search = record.searches[name]
    if not search.trials:
        raise BadInput(f"searches.{name}.trials: is empty; a search has one or more")
    for trial in search.trials:
        if len(trial.run_dirs) != len(search.seeds) or {*search.hyperparameters} - trial.values.keys():
            raise BadInput(f"searches.{name}.trials: a trial does not fit the seeds and hyperparameters")
        if not drawable(trial.score or 0):
            raise BadInput(f"searches.{name}.trials: score={trial.score}; expected a number below 1e100")
    for values in [*(trial.values for trial in search.trials), record.arms[name].tuned]:
        for key, value in values.items():
            start = search.trials[0].values.get(key, value)
            ends = sorted(start * record.tune.factor**power for power in (-MOST_STEPS, MOST_STEPS))
            if not ends[0] < value < ends[1]:
                raise BadInput(f"searches.{name}.trials: {key}={value}; expected a few factors from {start}")
    if {*search.hyperparameters} - search.inside.keys():
        raise BadInput(f"searches.{name}.inside: expected every hyperparameter")
