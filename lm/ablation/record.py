"""The record of an ablation, ablation.json: what was asked, planned and tuned. One reader, one writer.

What a person typed stays as it was typed.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from lm.config import UserError
from lm.config.ablation import Look, Question
from lm.config.checks import reading
from lm.config.typed import build
from lm.system.files import read_json, write_text

FILE = "ablation.json"


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
    config_hash: str  # that its result must have


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
    """Raises UserError naming the file, and the key whose value is wrong."""
    try:
        with reading(folder / FILE):
            record: AblationRecord = build(AblationRecord, read_json(folder / FILE))
            return record
    except FileNotFoundError:
        raise UserError(f"output_dir={folder}: holds no {FILE}; expected what ablate.py wrote") from None


def write_record(record: AblationRecord, folder: Path) -> None:
    write_text(folder / FILE, json.dumps(asdict(record), indent=1) + "\n")
