"""The runs below a folder: the settings of each, its result, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.config import deciding_settings, flat
from lm.errors import UserError, without_secrets
from lm.folder import RUN_MARKS, folders_with, read_result
from lm.training.run_directory import RunDirectory, read_rows

FINITE = ("train/loss", "train/grad_norm", "val/loss")  # columns of metrics.csv that are numbers unless a run diverged
NOT_FINITE = ("nan", "inf", "-inf")
HASHES = ("data_hash", "tokenizer_hash")  # they say something where the settings of the text are equal


@dataclass(slots=True)
class FoundRun:
    name: str  # its directory below the folder
    path: Path
    status: str  # finished, unfinished, diverged, failed, killed or broken
    note: str = ""  # why, or how far it is
    settings: dict[str, Any] = field(default_factory=dict)  # by dotted keys
    result: dict[str, Any] = field(default_factory=dict)  # by dotted keys; empty unless finished

    def __getitem__(self, key: str) -> Any:
        """Return a result, else a setting, else None."""
        own = {"run": self.name, "status": self.status}
        return next((place[key] for place in (own, self.result, self.settings) if key in place), None)

    def names(self) -> list[str]:
        return ["run", "status", *self.result, *self.settings]


def find_runs(folder: Path) -> list[FoundRun]:
    """Return the runs below a folder. Raises UserError if there is no such folder, or no run below it."""
    places = places_with(RUN_MARKS, folder, "runs")
    bar = tqdm(places.items(), desc="reading runs", disable=None, leave=False, delay=1)  # on a terminal
    return [read_run(place, name) for name, place in bar]


def places_with(marks: Sequence[str], folder: Path, what: str) -> dict[str, Path]:
    """Return the folders that `folders_with` finds. Raises UserError that names `what` if there are none."""
    if places := folders_with(marks, folder):
        return places
    reason = f"holds no {what}" if folder.is_dir() else "is a file" if folder.exists() else "no such folder"
    raise UserError(f"folder={folder}: {reason}; expected a folder that holds {what}")


def described_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that say what a run is, as dotted keys, with its text and its tokenizer."""
    groups, deciding = ("data.", "tokenizer.", "head."), deciding_settings(settings).keys()
    return {
        key: value
        for key, value in flat(settings).items()
        if key in deciding or (key.startswith(groups) and key != "data.cache_dir")
    }


def read_run(path: Path, name: str) -> FoundRun:
    from lm.lab.ablation.folder import RunFiles  # a train run, which asks for the newest run alone, does without

    place, files = RunDirectory(path), RunFiles(path.absolute())
    try:
        settings, result = without_secrets(flat(place.read_config())), read_result(place.result)
        if "data_hash" not in settings:
            what = "not what train wrote (data_hash is missing)" if place.config.exists() else "no such file"
            raise UserError(f"{place.config}: {what}")
        if result is not None:
            return FoundRun(name, path, "finished", settings=settings, result=flat(result))
        saved = (int(path.stem.partition("-")[2]) for path in place.checkpoints.glob("step-*.ckpt"))
        outcome, made = files.read(), max(files.steps(), *saved, 0)
        last_row = next(reversed(read_rows(place.metrics)), {})
    except (UserError, OSError) as error:
        return FoundRun(name, path, "broken", str(error))
    planned = settings.get("trainer.max_steps")
    steps = f"step {made:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")
    has_diverged = any(last_row.get(key) in NOT_FINITE for key in FINITE)
    status = outcome.status if outcome.error else "diverged" if has_diverged else "unfinished"
    return FoundRun(name, path, status, outcome.error or steps, settings)


def differing(runs: Sequence[FoundRun]) -> list[str]:
    """Return the settings that decide what a run computes and are not equal in all runs, as dotted keys."""
    readable = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in readable for key in described_settings(run.settings))
    varied = [key for key in keys if len({str(run.settings.get(key)) for run in readable}) > 1]
    of_text = any(key.startswith(("data.", "tokenizer.")) for key in varied)
    return [key for key in varied if not (of_text and key in HASHES)]


def without_parts_of_the_head(keys: list[str], runs: Sequence[FoundRun]) -> list[str]:
    """Leave out what head.name says already: every head brings its own initialisation and learning rates."""

    def follows_from_name(key: str) -> bool:
        pairs = {(str(run["head.name"]), str(run[key])) for run in runs if run.settings}
        return len(pairs) == len({name for name, _ in pairs})

    return [key for key in keys if key == "head.name" or not (key.startswith("head.") and follows_from_name(key))]
