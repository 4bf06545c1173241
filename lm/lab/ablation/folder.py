"""The folder of an ablation: its lock, ablation.json (what was asked), and its runs as one frame.

A run that has a folder is what its result.json says. A study under version control keeps its rows and not its models: a
run without a folder is read from results.csv, and its curve from curves.csv.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import filelock
import pandas as pd

from lm.cli.arguments import GROUPS, PATHS, key_of
from lm.config import RunConfig, build, deciding_settings
from lm.errors import UserError, reading, without_secrets
from lm.folder import read_result
from lm.lab.ablation.question import SEED, AblateConfig, Question
from lm.lab.runs.find import described_settings
from lm.system.files import LOCK, json_sha256, read_csv, read_json, remove_partial, write_json, write_text
from lm.system.terminal import to_override_value
from lm.training.run_directory import METRICS as METRICS_FILE
from lm.training.run_directory import read_rows

FILE = "ablation.json"
CONTRASTS = "contrasts.csv"  # of a study whose contrasts are frozen as published
RUNS = "runs"  # folder of the runs
REPORTED, PILOT, UNUSED = "reported", "pilot", "unused"  # purposes of runs; the last: of no part of the question
ENDED = ("done", "diverged")


@dataclass(slots=True, kw_only=True)
class Run:
    """A run of an ablation: a row of ablation.json and, with its outcome, of results.csv."""

    arm: str
    seed: int  # of the pair; an arm with seeds of its own adds its offset
    factor: float = 1.0  # of the tuned setting
    purpose: str = REPORTED  # reported: verdicts rest on it; pilot: it found the middle of a ladder
    run_dir: str  # relative to the folder of the ablation


@dataclass(slots=True, kw_only=True)
class ArmRecord:
    """An arm as it was planned."""

    overrides: list[str] = field(default_factory=list)  # of train, as typed
    settings: dict[str, Any] = field(default_factory=dict)  # of a run, with dotted keys
    matched: dict[str, int] = field(default_factory=dict)  # chosen to match the baseline's parameters
    is_tuned: bool = False  # whether the arm is scored at its own best value of the tuned setting
    n_params: int = 0  # as all numbers of an arm of which only its values are known
    flops_per_token: int = 0  # forward and backward
    tokens_per_step: int = 0
    seconds_per_step: float = 0.0  # with its share of validations, as measured when it was planned
    steps: int = 0
    vocab_size: int = 0
    scored_tokens: list[int] = field(default_factory=list)  # of the validation text of each pair; one text: one number
    copied: float = 0.0  # share of a validation text that stands in the training text, of all pairs the largest
    identity: dict[str, str] = field(default_factory=dict)  # hashes of text, tokenizer and code, device, precision
    bases: dict[str, str] = field(default_factory=dict)  # hash of each model that its runs start from, by its path

    def __post_init__(self) -> None:  # the record is published with the report
        self.overrides, self.settings = without_secrets(self.overrides), without_secrets(self.settings)


@dataclass(slots=True, kw_only=True)
class AblationRecord:
    """All that the report needs beside the runs, and all that a later call needs to go on."""

    question: Question
    overrides: list[str] = field(default_factory=list)  # of the command line
    arms: dict[str, ArmRecord] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # that were ever asked: the place of a seed is its part of the text
    begun: str = ""
    changed: list[int] = field(default_factory=list)  # after how many results the design changed, at each change
    command: str = ""
    started_in: str = ""  # the folder in which it was typed, from the folder of the ablation on
    machine: str = ""
    threads: int = 1
    workers: int = 1

    def __post_init__(self) -> None:
        self.overrides, self.command = without_secrets(self.overrides), without_secrets(self.command)
        for key in ("question", "arms", "overrides"):
            setattr(self.question, key, without_secrets(getattr(self.question, key)))
        self.seeds = self.seeds or [*self.question.seeds]

    def changed_after(self) -> str:
        """Return after how many results the design changed, as `6, 9`; empty if it did not change after any."""
        return ", ".join(map(str, self.changed))

    def common(self) -> list[str]:
        """Return the overrides of all arms. What was typed replaces what the question says."""
        return [*by_key([*self.question.overrides, *self.overrides]).values()]


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return overrides by their keys; of several for one key the last holds."""
    return {key_of(override): override for override in overrides}


def settings_of_run(record: AblationRecord, name: str, arm: ArmRecord, seed: int, factor: float) -> dict[str, Any]:
    """Return the settings in which a run differs from its arm: seed, length, part of the text, base and tuned value.

    `seed` is the seed of the pair, and `factor` multiplies the tuned setting.
    """
    question = record.question
    values: dict[str, Any] = {
        "seed": question.seed_of(name, seed),
        "trainer.max_steps": arm.steps,
        "trainer.max_epochs": None,
        "max_tokens": None,
    }
    if question.folds:
        values["data.fold"] = question.first_fold + record.seeds.index(seed)
    if SEED in (base := arm.settings.get("init_from") or ""):
        values["init_from"] = base.replace(SEED, str(values["seed"]))
    if factor != 1 and (setting := question.tuned_setting):
        values[setting] = float(f"{arm.settings[setting] * factor:.6g}")
    return values


def design_of(question: Question, arms: Mapping[str, ArmRecord]) -> dict[str, Any]:
    """Return all that a person chooses and that decides a verdict: the question, settings and texts."""
    design = asdict(question) | {"name": "", "question": "", "overrides": []}
    design["primary"] = sorted(question.primary_arms())
    hashes = ("data_hash", "tokenizer_hash")  # of the text, wherever it lies
    design["arms"] = {
        name: deciding_settings(
            arm.settings | {key: arm.identity[key] for key in hashes} | {"init_sha256": sorted(arm.bases.values())}
        )
        for name, arm in arms.items()
    }
    return design


def read_record(folder: Path, key: str = "output_dir") -> AblationRecord:
    """Return what was asked in a folder. Raises UserError naming the file, and the key whose value is wrong."""
    if (folder / CONTRASTS).exists():
        raise UserError(f"{key}={folder}: is a study that is frozen as published; name another folder")
    try:
        with reading(folder / FILE):
            return build(AblationRecord, read_json(folder / FILE))
    except (FileNotFoundError, NotADirectoryError):
        what = f"holds no {FILE}" if folder.exists() else "no such folder"
        raise UserError(f"{key}={folder}: {what}; expected what ablate.py wrote") from None


def write_record(record: AblationRecord, folder: Path) -> None:
    write_text(folder / FILE, json.dumps(asdict(record), indent=1) + "\n")


# --- which folder


def folder_of(config: AblateConfig, runs: Mapping[str, RunConfig]) -> Path:
    """Return output_dir, or ablations/NAME; settings that were typed add the hash of what they decide."""
    if config.output_dir:
        return Path(config.output_dir)
    settings = identifying(asdict(runs[config.ablation.baseline]))
    typed = f"-{json_sha256(settings)[:8]}" if any(map(_decides, config.overrides)) else ""
    return Path("ablations") / f"{config.ablation.name}{typed}"


def _decides(override: str) -> bool:
    """Return whether a typed setting may decide a score: a text, a whole group, or a setting that a run is known by."""
    key = key_of(override).partition("@")[0]
    is_group = key in GROUPS and key != "logger"
    return is_group or key in ("init_from", "max_tokens") or bool(described_settings({key: None}))


def identifying(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that say what an arm is, as dotted keys.

    A path is relative to the current folder, because a path has several spellings, and a project may move.
    """
    described, base = described_settings(settings), settings.get("init_from") or ""
    described["max_tokens"] = settings.get("max_tokens")  # a length, which decides as trainer.max_steps
    if SEED in base:  # the model and its tokenizer are those of the first seed that is asked
        described |= {"init_from": base, "init_sha256": None, "tokenizer.path": None}
    return {key: os.path.relpath(value) if key in PATHS and value else value for key, value in described.items()}


def sibling(folder: Path, ending: str) -> Path:
    """Return FOLDER-ENDING, also for the folder `.`, whose path has no name at its end."""
    return Path(os.path.relpath(f"{folder.resolve()}-{ending}"))


def existing_record(folder: Path) -> AblationRecord | None:
    """Return what an earlier call has left in the folder, if anything.

    Raises UserError if the folder holds something else.
    """
    if not (folder / FILE).exists():
        is_used = folder.exists() and (not folder.is_dir() or any(entry.name[0] != "." for entry in folder.iterdir()))
        if is_used:  # hidden files are the lock, and what a killed call has begun to write
            raise UserError(f"output_dir={folder}: holds no ablation; name a new or an empty folder")
        return None
    return read_record(folder)


def lock_output_dir(folder: Path) -> AbstractContextManager[object]:
    """Hold the folder while working in it. Raises UserError if another process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK).acquire(timeout=1)  # a reader may look for a moment
        remove_partial(folder)
        return lock
    except filelock.Timeout:
        raise UserError(f"output_dir={folder}: another process is at work there") from None
    except OSError as error:
        raise UserError(f"output_dir={folder}: cannot be written to ({error.strerror})") from error


# --- the files of a run: its directory, and beside it its status and its log


class Outcome(NamedTuple):
    status: str  # done, diverged, failed, killed, or missing: not run yet, or running
    error: str = ""
    result: Mapping[str, Any] = MappingProxyType({})  # with the keys of RESULT, or empty


class RunFiles:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.status, self.log = (run_dir.with_name(run_dir.name + suffix) for suffix in (".json", ".log"))

    def write_status(self, status: str, error: str) -> None:
        write_json(self.status, {"status": status, "error": without_secrets(error)})

    def read(self) -> Outcome:
        """Return the outcome. Raises UserError or OSError if a file cannot be read: such a run is not missing."""
        path = self.run_dir / "result.json"
        try:
            if (result := read_result(path)) is not None:
                with reading(path):
                    resumed_from, torch = " ".join(map(str, result["resumed_from"])), result["versions"]["torch"]
                return Outcome("done", result=result | {"resumed_from": resumed_from, "torch": torch})
            with reading(self.status):
                content = read_json(self.status)
                return Outcome(content["status"], content["error"])
        except (FileNotFoundError, NotADirectoryError):
            return Outcome("missing")
        except UserError as error:
            advice = "without the folder of the run and its row in results.csv, the same command makes the run again"
            raise UserError(f"{error}; {advice}") from error

    def steps(self) -> int:
        """Return the optimizer steps that the run has logged so far. Raises OSError if they cannot be read."""
        with (
            suppress(FileNotFoundError, NotADirectoryError, ValueError, IndexError),  # no step yet, or half a line
            open(self.run_dir / METRICS_FILE, "rb") as file,
        ):
            file.seek(max(0, os.fstat(file.fileno()).st_size - 400))
            return int(file.read().splitlines()[-1].split(b",")[0])
        return 0


# --- the runs as one frame

RESULT: dict[str, type] = {  # of a run's result.json, as columns of results.csv
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1"), float),
    **dict.fromkeys(("n_params", "flops_per_token", "steps", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_second"), float),
    **dict.fromkeys(("config_hash", "data_hash", "tokenizer_hash"), str),
    "threads": int,
    **dict.fromkeys(("device", "cpu", "precision", "python", "torch", "resumed_from"), str),
}
WHICH = ("arm", "seed", "factor", "run_dir", "source_hash")
COLUMNS: dict[str, type] = {
    **dict.fromkeys(("arm", "purpose"), str),
    "seed": int,
    "factor": float,
    **dict.fromkeys(("status", "error"), str),
    **RESULT,
    **dict.fromkeys(("source_hash", "run_dir"), str),
}
DTYPES: dict[type | None, str] = {int: "Int64", float: "float64", bool: "boolean"}


class RunReader:
    """The outcomes of the runs of an ablation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def rows(self) -> dict[str, dict[str, str]]:
        """The rows of results.csv by run. Raises UserError if the file is not what a report has written."""
        path = self.folder / "results.csv"
        try:
            with reading(path):
                return {row["run_dir"]: row for row in (read_csv(path) if path.exists() else ())}
        except UserError as error:
            raise UserError(f"{error}; without this file, the runs that have a folder are read from there") from error

    def outcome(self, run_dir: str) -> Outcome:
        """Return what became of a run, by its folder. The row of results.csv stands for a folder that is gone."""
        outcome = RunFiles(self.folder / run_dir).read()
        if run_dir not in self.rows or outcome.status != "missing" or (self.folder / run_dir).exists():
            return outcome
        row = self.rows[run_dir]
        with reading(self.folder / "results.csv"):
            done = row["status"] == "done"
            result = {key: kind(row[key]) for key, kind in RESULT.items()} if done else {}
            return Outcome(row["status"], row["error"], result)

    def ended(self, runs: Sequence[Run]) -> list[Run]:
        """Return those of the runs that have ended."""
        return [run for run in runs if self.outcome(run.run_dir).status in ENDED]

    def frame(self, record: AblationRecord) -> pd.DataFrame:
        """Return a row for each run, with the columns of COLUMNS. Last come finished runs that are not asked for."""
        runs = [asdict(run) | {"source_hash": record.arms[run.arm].identity.get("source_hash")} for run in record.runs]
        asked = {run.run_dir for run in record.runs}
        runs += [
            {key: row.get(key) or None for key in WHICH} | {"purpose": UNUSED}
            for run_dir, row in self.rows.items()
            if run_dir not in asked and row["status"] in ENDED
        ]
        outcomes = [self.outcome(run["run_dir"]) for run in runs]
        # The seed of a run in the question stands above the seed in its result.
        rows = [{**outcome.result, **run, **outcome._asdict()} for run, outcome in zip(runs, outcomes, strict=True)]
        return frame_of(rows, COLUMNS)

    @cached_property
    def curves(self) -> dict[str, list[dict[str, str]]]:
        """The rows of curves.csv by run."""
        path = self.folder / "curves.csv"
        with reading(path):
            curves: dict[str, list[dict[str, str]]] = {}
            for row in read_csv(path) if path.exists() else ():
                curves.setdefault(row["run_dir"], []).append(row)
            return curves

    def lines(self, run_dir: str) -> list[dict[str, str]]:
        """Return the whole rows of the metrics.csv of a run, those of curves.csv if it is absent."""
        path = self.folder / run_dir / METRICS_FILE
        return read_rows(path) if path.exists() else self.curves.get(run_dir, [])


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, type | None]) -> pd.DataFrame:
    """Return rows as a frame: integers Int64, other numbers float64, what is not known missing; None: as values are."""
    return pd.DataFrame({key: _column([row.get(key) for row in rows], kind) for key, kind in columns.items()})


def finite(cells: pd.DataFrame) -> pd.DataFrame:
    """Return cells of a metrics.csv as numbers. What is no finite number is missing."""
    return cells.apply(pd.to_numeric, errors="coerce").replace([math.inf, -math.inf], math.nan)


def _column(values: list[Any], kind: type | None) -> Any:
    kinds = {type(value) for value in values if value is not None}
    kind = kind or (kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else str)
    if kind not in DTYPES:
        values = [value if isinstance(value, str | None) else to_override_value(value) for value in values]
    return pd.Series(values, dtype=DTYPES.get(kind, "string"))


def plain(value: Any) -> Any:
    """Return values as JSON has them: no NaN, no types of numpy and pandas."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if value is pd.NA or value is None or value != value or value in (math.inf, -math.inf) else value
