"""The record of an ablation, ablation.json: what was asked, planned and tuned. One reader, one writer.

Version 2 is the present one. Version 1 says no version; some of its settings have earlier names, which are read as
today's (lm/config/renamed.py). Words that a person typed stay as they were typed.
"""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from lm.config import BadInput
from lm.config.ablation import Question
from lm.config.renamed import KEYS, current
from lm.system.files import write_text

VERSION = 2
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
    seconds_per_step: float = 0.0  # as measured when it was planned
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


@dataclass(slots=True, kw_only=True)
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
class Look:
    """What was asked when a verdict was seen."""

    seeds: list[int]
    baseline: str
    primary: list[str]
    baselines: dict[str, str]
    equivalence_margin: float
    budgets: list[str]


FIXED = tuple(one.name for one in fields(Look) if one.name != "seeds")  # that decide the verdict, not the runs


def look(asked: Question, seeds: list[int]) -> Look:
    return Look(seeds=seeds, **{key: getattr(asked, key) for key in FIXED})


@dataclass(slots=True, kw_only=True)
class AblationRecord(Question):
    """All that the report needs beside the runs, and all that a later call needs to go on."""

    # the plan
    overrides: list[str]  # of the command line
    common: list[str]  # overrides of all arms in the ablation's own configuration
    contrasts: dict[str, str]  # arm -> the arm that it is compared with
    arms: dict[str, ArmRecord]
    cells: list[CellRecord]
    cautions: list[Caution]
    # how far it is
    begun: str
    ended: str | None = None
    tuning_done: bool
    untuned: dict[str, list[str]]  # arm -> trials that have come to no end
    searches: dict[str, SearchRecord] = field(default_factory=dict)
    trials_made: int | None = None  # by every arm, once it is decided
    looks: list[Look] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)  # every seed that was ever asked for
    # where
    command: str
    machine: str
    threads: int
    workers: int
    python: str
    versions: dict[str, str]
    seconds_per_step: dict[str, float] = field(default_factory=dict)  # by computation, code and machine
    startup_seconds: dict[str, float] = field(default_factory=dict)  # of a run, beyond its steps; by machine
    # what the runs were made with, to say why one no longer counts
    sources: dict[str, str] = field(default_factory=dict)  # file of the training code -> hash
    set_aside: dict[str, str] = field(default_factory=dict)  # finished run that no longer counts -> why


def read_record(folder: Path) -> AblationRecord:
    """Raises BadInput naming the file, and the key where one is wrong; FileNotFoundError if there is no file."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        if isinstance(found, dict) and (version := build(int, found.get("version", 1), "version")) != VERSION:
            if version > VERSION:
                raise BadInput(f"version={version}: was written by a newer version of this program; expected {VERSION}")
            found = from_version_1(found)
        return build(AblationRecord, found, "")
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:  # on the way from version 1
        raise BadInput(f"{path}: not what ablate.py wrote ({error!r})") from error


def write_record(record: AblationRecord, folder: Path) -> None:
    write_text(folder / FILE, json.dumps({"version": VERSION} | asdict(record), indent=1) + "\n")


def from_version_1(old: dict[str, Any]) -> dict[str, Any]:
    found = current(old, "ablation.")
    if "hyperparameters" in found["tune"]:
        found["tune"]["hyperparameters"] = [*current(dict.fromkeys(found["tune"]["hyperparameters"]))]
    found["plot_over"] = KEYS.get(found["plot_over"], found["plot_over"])
    found["looks"] = [current(look, "ablation.") for look in old.get("looks", [])]
    for arm in found["arms"].values():
        arm |= {key: current(arm[key]) for key in ("settings", "matched", "tuned")}
    for search in found.get("searches", {}).values():
        search["hyperparameters"] = [*current(dict.fromkeys(search.pop("knobs", None) or search["hyperparameters"]))]
        search["inside"] = current(search["inside"])
        for trial in search["trials"]:
            trial |= {"values": current(trial["values"]), "score": trial[found["metric"]]}
    return found


def build(kind: Any, value: Any, key: str) -> Any:
    """A value from JSON as a dataclass, a list, a dict or a plain type. Raises BadInput naming the key."""
    origin, of = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        known = {one.name: one for one in fields(kind)}
        hints, prefix = get_type_hints(kind), f"{key}." if key else ""
        for name, one in known.items():
            if name not in value and one.default is MISSING and one.default_factory is MISSING:
                raise BadInput(f"{prefix}{name}: is missing; expected what ablate.py wrote")
        made: Any = kind
        return made(**{name: build(hints[name], value[name], f"{prefix}{name}") for name in known if name in value})
    if origin is UnionType:
        (plain,) = (one for one in of if one is not NoneType)
        return None if value is None else build(plain, value, key)
    if origin is list and isinstance(value, list):
        return [build(of[0], one, f"{key}[{i}]") for i, one in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: build(of[1], one, f"{key}.{name}") for name, one in value.items()}
    if kind is Caution and isinstance(value, list) and len(value) == 2:
        return Caution(*value)
    if kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    expected = getattr(kind, "__name__", kind)
    raise BadInput(f"{key or 'the file'}: expected {expected}, found {value!r:.60}; not what ablate.py wrote")
