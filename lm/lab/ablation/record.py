"""The folder of an ablation, its lock, and ablation.json: what was asked and planned, and how far it is."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import filelock

from lm.config import build, flat
from lm.errors import UserError, reading, without_secrets
from lm.folder import read_result
from lm.lab.ablation.settings import RECORD, AblateConfig, Question
from lm.system.files import LOCK, json_sha256, read_json, remove_partial, write_json, write_text
from lm.system.terminal import to_override_value

FILE = RECORD
CONTRASTS = "contrasts.csv"  # of a study whose contrasts are frozen as published
# what decides a verdict beside the arms and their runs
DESIGN = (
    *(item.name for item in fields(Question) if item.name not in ("name", "question", "metric")),
    "common",
)
TRIAL, REPORTED, UNUSED = "trial", "reported", "unused"  # purposes of runs; the last: of rows alone
FOLDERS = {TRIAL: "trials", REPORTED: "cells"}


@dataclass(slots=True, kw_only=True)
class Run:
    """A run of an ablation: a row of ablation.json and, with what became of it, of results.csv."""

    purpose: str  # trial: tuning tries settings; reported: verdicts rest on it
    arm: str
    seed: int  # of a reported run that of the pair; an arm with seeds of its own adds its offset
    steps: int
    values: dict[str, float] = field(default_factory=dict)  # of the tuned hyperparameters
    search: int = 0  # of a trial: the last search of its arm that it belongs to; 0 is the first
    run_dir: str  # relative to the ablation's folder: a folder of FOLDERS, and its name


@dataclass(slots=True, kw_only=True)
class ArmRecord:
    """An arm as it was planned."""

    overrides: list[str] = field(default_factory=list)  # of train.py, as typed
    settings: dict[str, Any] = field(default_factory=dict)  # of a run, with dotted keys
    matched: dict[str, int] = field(default_factory=dict)  # chosen to match the baseline's parameters
    tuned: dict[str, float] = field(default_factory=dict)  # chosen hyperparameters; empty until they are
    centre: dict[str, float] = field(default_factory=dict)  # where the search that they come from began
    n_params: int = 0  # as all numbers of an arm of which only its values are known
    flops_per_token: int = 0  # forward and backward
    tokens_per_step: int = 0
    seconds_per_step: float = 0.0  # with its share of validations, as measured when it was planned
    steps: dict[str, int] = field(default_factory=dict)  # by budget; "own" is what its configuration says
    vocab_size: int = 0
    val_tokens: int = 0
    copied: float = 0.0  # share of a validation text of its own that stands in the training text
    identity: dict[str, str] = field(default_factory=dict)  # hashes of text, tokenizer and code, device, precision

    def __post_init__(self) -> None:  # the record is published with the report
        self.overrides, self.settings = without_secrets(self.overrides), without_secrets(self.settings)


@dataclass(slots=True, kw_only=True)
class AblationRecord(Question):
    """All that the report needs beside the runs, and all that a later call needs to go on."""

    overrides: list[str] = field(default_factory=list)  # of the command line
    common: list[str] = field(default_factory=list)  # overrides of all arms in the ablation's own configuration
    pairs: dict[str, str] = field(default_factory=dict)  # arm -> the arm that it is compared with
    arms: dict[str, ArmRecord] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)  # trials, reported runs
    begun: str = ""
    ended: str | None = None
    designs_seen: list[dict[str, Any]] = field(default_factory=list)  # of earlier calls, with which there was a verdict
    command: str = ""
    machine: str = ""
    threads: int = 1
    workers: int = 1
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("overrides", "common", "command"):
            setattr(self, key, without_secrets(getattr(self, key)))

    def of(self, purpose: str) -> list[Run]:
        return [run for run in self.runs if run.purpose == purpose]

    def searches(self, arm: str) -> dict[tuple[tuple[str, float], ...], int]:
        """The settings of the trials of an arm, and the last search that each belongs to."""
        return {tuple(run.values.items()): run.search for run in self.of(TRIAL) if run.arm == arm}

    def asked(self) -> list[str]:
        """The arms whose comparison answers the question: all, where none is primary."""
        return self.primary or [*self.pairs]

    def best_arms(self) -> list[str]:
        """Arms that are scored by their best model, not by their last."""
        return [name for name, arm in self.arms.items() if arm.settings.get("checkpoint.best")]

    def untuned(self) -> list[str]:
        """Arms whose tuning has not finished."""
        return [name for name, arm in self.arms.items() if self.tune.trials and not arm.tuned]


def question_of(config: Question) -> dict[str, Any]:
    """The fields of a Question, of one of its subclasses."""
    return {item.name: getattr(config, item.name) for item in fields(Question)}


def design_of(record: AblationRecord) -> dict[str, Any]:
    """What decides a verdict beside the runs, as JSON has it."""
    arms = {name: arm.overrides for name, arm in record.arms.items()}
    made_of = {name: arm.identity for name, arm in record.arms.items()}
    own = {key: getattr(record, key) for key in DESIGN}
    return {"arms": arms, "made_of": made_of, **own, "tune": asdict(record.tune)}


def read_record(folder: Path) -> AblationRecord:
    """Raises UserError naming the file, and the key whose value is wrong."""
    if (folder / CONTRASTS).exists():
        raise UserError(f"output_dir={folder}: is a study that is frozen as published; name another output_dir")
    try:
        with reading(folder / FILE):
            record: AblationRecord = build(AblationRecord, read_json(folder / FILE))
            return record
    except FileNotFoundError:
        raise UserError(f"output_dir={folder}: holds no {FILE}; expected what ablate.py wrote") from None


def arm_and_seed(run_dir: str) -> tuple[str, int]:
    """They are in the name of a run.

    >>> arm_and_seed("trials/tied-seed1000-1a2b3c4d5e")
    ('tied', 1000)
    """
    arm, _, rest = run_dir.rpartition("/")[2].rpartition("-seed")
    return arm, int(rest.partition("-")[0])


def write_record(record: AblationRecord, folder: Path) -> None:
    write_text(folder / FILE, json.dumps(asdict(record), indent=1) + "\n")


# --- the files of a run: its directory, and beside it its status, its log and where it was made


class Failure(StrEnum):
    """Whether a failure counts against the arm.

    The kernel kills by SIGKILL too when memory runs out, which cannot be told from any other kill.
    """

    ERROR = "error"  # of the run's own: an exception, an exit code, a crash of native code
    KILLED = "killed"  # from outside, by a signal or with its node: at random, whatever the arm


class Outcome(NamedTuple):
    status: str  # done, failed, diverged, or missing: not run yet, or running
    error: str = ""
    result: Mapping[str, Any] = MappingProxyType({})  # result.json, or empty
    row: Mapping[str, str] | None = None  # of results.csv, where the run has no folder
    kind: str = ""  # of a failure whose process has ended: a value of Failure


class RunFiles:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        paths = (run_dir.with_name(run_dir.name + suffix) for suffix in (".json", ".log", ".where"))
        self.status, self.log, self.where = paths

    def write_status(self, status: str, kind: str, error: str) -> None:
        write_json(self.status, {"status": status, "kind": kind, "error": error})

    def read(self) -> Outcome:
        """Raises OSError if what is there cannot be read: it is not missing, and need not be made again."""
        try:
            if (result := read_result(self.run_dir / "result.json")) is not None:
                return Outcome("done", result=result)
            with reading(self.status):
                content = read_json(self.status)
                return Outcome(content["status"], content["error"], kind=content.get("kind", ""))
        except (FileNotFoundError, NotADirectoryError):
            return Outcome("missing")
        except UserError as error:
            return Outcome("failed", str(error))

    def place(self) -> dict[str, str]:
        """The host and the executor that made the run; empty if that is not known."""
        with suppress(FileNotFoundError, NotADirectoryError), reading(self.where):
            return read_json(self.where)
        return {}

    def steps(self) -> int:
        """Optimizer steps that the run has logged so far. Raises OSError if they cannot be read."""
        with (
            suppress(FileNotFoundError, NotADirectoryError, ValueError, IndexError),  # no step yet, or half a line
            open(self.run_dir / "metrics.csv", "rb") as file,
        ):
            file.seek(max(0, os.fstat(file.fileno()).st_size - 400))
            return int(file.read().splitlines()[-1].split(b",")[0])
        return 0


# --- the folder


def default_dir(config: AblateConfig) -> Path:
    """ablations/ and the name; other overrides make another folder, whose name ends in their hash."""
    overrides = normalised(config.overrides)
    return Path("ablations") / f"{config.ablation.name}{f'-{json_sha256(overrides)[:8]}' if overrides else ''}"


def normalised(overrides: Sequence[str]) -> list[str]:
    """Overrides in one order and one spelling, however they were typed; of several for one key the last holds.

    >>> normalised(["optim.lr=0.030", "++model={d_ff: 48}", "head='tied'", "optim.betas=[0.9, 0.95]"])
    ['head=tied', 'model.d_ff=48', 'optim.betas=[0.9,0.95]', 'optim.lr=0.03']
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # which nobody needs to read a record
    from hydra.errors import HydraException

    parser, values = OverridesParser.create(), dict[str, Any]()
    for override in overrides:
        key, _, text = override.partition("=")
        value: Any = text
        with suppress(HydraException):  # of a path that its grammar would have in quotes
            value = parser.parse_override(override).value()
        values |= flat({key.lstrip("+"): int(value) if isinstance(value, float) and value.is_integer() else value})
    return [f"{key}={to_override_value(values[key])}" for key in sorted(values)]


def existing_record(path: Path, config: AblateConfig) -> AblationRecord | None:
    """What an earlier call has left in the folder, if anything. Raises UserError if it is another ablation's."""
    if not (path / FILE).exists():
        is_used = path.exists() and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir()))
        if is_used:  # hidden files are the lock, and what a killed call has begun to write
            raise UserError(f"output_dir={path}: holds no ablation; name a new or an empty folder")
        return None
    record, question = read_record(path), config.ablation
    now = {"name": question.name, "metric": question.metric, "overrides": normalised(without_secrets(config.overrides))}
    before = {"name": record.name, "metric": record.metric, "overrides": normalised(record.overrides)}
    for key, value in now.items():
        if value != before[key]:
            difference = f"{key} is {before[key]} there, {value} now"
            raise UserError(f"output_dir={path}: holds another ablation ({difference}); name another output_dir")
    return record


def is_locked(folder: Path) -> bool:
    """Whether a process works in the folder of an ablation or of a run. Holds the lock for a moment if none does."""
    if not os.access(folder / LOCK, os.W_OK):
        return False
    try:
        with filelock.FileLock(folder / LOCK, blocking=False):
            return False
    except OSError as error:  # on a file system without locks nobody works
        return isinstance(error, filelock.Timeout)


def lock_output_dir(path: Path) -> AbstractContextManager[object]:
    """Hold the folder while working in it. Raises UserError if another process does."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path / LOCK).acquire(blocking=False)
        remove_partial(path)
        return lock
    except filelock.Timeout:
        raise UserError(f"output_dir={path}: another process is at work there") from None
    except OSError as error:
        raise UserError(f"output_dir={path}: cannot be written to ({error.strerror})") from error
