"""The record of an ablation, ablation.json: what was asked, planned and tuned. One reader, one writer.

Version 3 is the present one; lm/ablation/versions.py reads the earlier ones. What a person typed stays as it was typed.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from lm.ablation.versions import VERSION, current_version
from lm.config import BadInput, choose
from lm.config.ablation import BUDGETS, METRICS, Look, Question, check_looks, distinct
from lm.config.interactions import check_interactions
from lm.config.typed import build
from lm.system.files import checksum, read_object, unsealed, write_text

FILE = "ablation.json"
MOST = 1e6  # of a metric: no figure can be drawn of what is far beyond
MOST_STEPS = 100  # of a search, from where it began: a surface is computed over all that was tried
HASHES = ("data_hash", "tokenizer_hash", "source_hash")


class Caution(NamedTuple):
    """What weakens an answer: a few words, and what they mean."""

    head: str
    meaning: str


@dataclass(slots=True, kw_only=True)
class ArmRecord:
    """An arm as it was planned."""

    words: list[str]  # its overrides, as typed
    settings: dict[str, Any]  # of a run, with dotted keys
    matched: dict[str, int] = field(default_factory=dict)  # chosen to match the baseline's parameters
    tuned: dict[str, float] = field(default_factory=dict)
    n_params: int
    flops_per_token: int  # forward and backward
    tokens_per_step: int
    seconds_per_step: float = 0.0  # with its share of validations, as measured when it was planned
    steps: dict[str, int]  # by budget; "own" is what its configuration says
    vocab_size: int
    train_tokens: int
    val_tokens: int
    identity: dict[str, str]  # hashes of what decides a run beside its configuration, its device and precision


@dataclass(slots=True)
class CellRecord:
    """One run that serves one budget."""

    arm: str
    seed: int  # of the pair; an arm with seeds of its own adds its offset
    budget: str
    run_dir: str  # relative to the ablation's folder
    steps: int
    config_hash: str | None = None  # that its result must have; version 1 does not say it


@dataclass(slots=True)
class BaseRecord:
    """The run that the arms start from at one seed."""

    seed: int
    run_dir: str  # relative to the ablation's folder
    sha256: str | None  # of its weights; None: not trained yet
    val_loss: float | None


@dataclass(slots=True)
class TrialRecord:
    values: dict[str, float]
    score: float | None  # the mean of the metric over the tuning seeds; None where training diverged
    run_dirs: list[str]  # one for each tuning seed


@dataclass(slots=True, kw_only=True)
class SearchRecord:
    """The tuning of one arm."""

    hyperparameters: list[str]
    seeds: list[int]
    inside: dict[str, bool | None]  # whether values on both sides of the best were tried; None: only one value was
    trials: list[TrialRecord]


@dataclass(slots=True, kw_only=True)
class AblationRecord(Question):
    """All that the report needs beside the runs, and all that a later call needs to go on."""

    # the plan
    overrides: list[str] = field(default_factory=list)  # of the command line
    common: list[str] = field(default_factory=list)  # overrides of all arms in the ablation's own configuration
    contrasts: dict[str, str] = field(default_factory=dict)  # arm -> the arm that it is compared with
    arms: dict[str, ArmRecord] = field(default_factory=dict)
    cells: list[CellRecord] = field(default_factory=list)
    base: list[str] | None = None  # overrides of the runs that the arms start from; None: there are none
    bases: list[BaseRecord] = field(default_factory=list)
    cautions: list[Caution] = field(default_factory=list)
    # how far it is
    begun: str = ""
    ended: str | None = None
    report: str | None = None  # the fingerprint of the report that shows this record; None: none does
    tuning_done: bool = False
    untuned: dict[str, list[str]] = field(default_factory=dict)  # arm -> trials that have come to no end
    searches: dict[str, SearchRecord] = field(default_factory=dict)
    trials_made: int | None = None  # by every arm, once it is decided
    verdicts_seen: list[Look] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)  # every seed that was ever asked for
    # where
    command: str = ""
    machine: str = ""
    threads: int = 1
    workers: int = 1
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds_per_step: dict[str, float] = field(default_factory=dict)  # by computation, code and machine
    startup_seconds: dict[str, float] = field(default_factory=dict)  # of a run, beyond its steps; by machine
    # what the runs were made with, to say why one no longer counts
    sources: dict[str, str] = field(default_factory=dict)  # file of the training code -> hash
    set_aside: dict[str, str] = field(default_factory=dict)  # finished run that no longer counts -> why


def look(asked: Question, seeds: list[int]) -> Look:
    return Look(**{one.name: getattr(asked, one.name) for one in fields(Look)} | {"seeds": seeds})


def first_seeds(record: AblationRecord, n: int | None) -> AblationRecord:
    """The record as if only the first n seeds were asked for; None: all."""
    seeds = record.seeds[:n]
    return replace(record, seeds=seeds, cells=[one for one in record.cells if one.seed in seeds])


def asked(question: Question) -> dict[str, Any]:
    return {one.name: getattr(question, one.name) for one in fields(Question)}


def read_record(folder: Path) -> AblationRecord:
    """Raises BadInput naming the file, and the key whose value is wrong. Earlier versions wrote no checksum."""
    path = folder / FILE
    try:
        found = read_object(path)
        found = unsealed(found) if "checksum" in found else found
        return checked(build(AblationRecord, current_version(found)))
    except FileNotFoundError:
        raise BadInput(f"output_dir={folder}: holds no {FILE}; expected what ablate.py wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = error if isinstance(error, BadInput) else f"not what ablate.py wrote ({error!r})"
        raise BadInput(f"{path}: {why}") from error


def checked(record: AblationRecord) -> AblationRecord:
    """The record, if what it names is there. Raises BadInput naming the key."""
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
    check_looks("looks", record)
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
    if not 0 < record.equivalence_margin < MOST:
        raise BadInput(f"equivalence_margin: {record.equivalence_margin}; expected more than 0, less than {MOST:g}")
    for name, one in record.arms.items():
        if lost := [budget for budget in record.budgets if budget not in one.steps]:
            raise BadInput(f"arms.{name}.steps.{lost[0]}: is missing")
        if one.matched and name not in record.contrasts:
            raise BadInput(f"contrasts: has no {name}, which is matched to the arm that it is compared with")
        if lost := [key for key in HASHES if key not in one.identity]:
            raise BadInput(f"arms.{name}.identity.{lost[0]}: is missing")
    trials = [one for search in record.searches.values() for trial in search.trials for one in trial.run_dirs]
    for run_dir in [one.run_dir for one in record.cells] + [one.run_dir for one in record.bases] + trials:
        if Path(run_dir).is_absolute() or ".." in Path(run_dir).parts:
            raise BadInput(f"run_dir={run_dir}: leads out of the ablation's folder")
    for name, search in record.searches.items():
        if not search.trials:
            raise BadInput(f"searches.{name}.trials: is empty; a search has one or more")
        for trial in search.trials:
            if len(trial.run_dirs) != len(search.seeds) or {*search.hyperparameters} - trial.values.keys():
                raise BadInput(f"searches.{name}.trials: a trial does not fit the seeds and hyperparameters")
            if not abs(trial.score or 0) < MOST:
                raise BadInput(f"searches.{name}.trials: score={trial.score}; expected a number below {MOST:g}")
        for values in [*(trial.values for trial in search.trials), record.arms[name].tuned]:
            for key, value in values.items():
                start = search.trials[0].values.get(key, value)
                ends = sorted(start * record.tune.factor**power for power in (-MOST_STEPS, MOST_STEPS))
                if not ends[0] < value < ends[1]:
                    raise BadInput(f"searches.{name}.trials: {key}={value}; expected a few factors from {start}")
        if {*search.hyperparameters} - search.inside.keys():
            raise BadInput(f"searches.{name}.inside: expected every hyperparameter")
    return record


def write_record(record: AblationRecord, folder: Path) -> None:
    content = {"version": VERSION} | asdict(record)
    write_text(folder / FILE, json.dumps(content | {"checksum": checksum(content)}, indent=1) + "\n")
