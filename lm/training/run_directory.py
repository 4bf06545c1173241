"""A run is a directory: its name, lock, configuration and result."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import filelock
import yaml

from lm.config import RunConfig, UserError, identity
from lm.config.checks import RESUMABLE, build, reading, without_secrets
from lm.config.model import refuse_foreign_classes
from lm.config.run import TrainerConfig
from lm.data.paths import from_above
from lm.system.files import read_csv, read_json, read_yaml, remove_partial, write_text

METRICS = "metrics.csv"
LENGTH = ("trainer.max_steps", "max_tokens", "max_minutes")  # of a run, which its learning-rate schedule follows
log = logging.getLogger(__name__)


class RunLocked(UserError):
    """Another process is writing to the run's directory."""


def default_directory(run: RunConfig, config_hash: str) -> Path:
    """runs/NAME, where the name describes the run and ends in its hash, so that the same command finds it again.

    A run of that hash is found under any name: its text may have had another one.
    """
    text = Path(without_secrets(run.data.path).rstrip("/")).stem if run.data.path else run.data.source
    tokens = f"{run.tokenizer.kind}{run.tokenizer.vocab_size or ''}"
    shape = f"{run.model.n_layers}x{run.model.d_model}"
    name = f"{text[:40]}-{tokens}-{shape}-{run.head.name}-seed{run.seed}-{config_hash[:8]}"
    path = Path("runs") / "".join(c if c.isalnum() or c == "-" else "_" for c in name)
    return path if path.exists() else next(Path("runs").glob(f"*-{config_hash[:8]}"), path)


class RunDirectory:
    """The files of one run; docs/runs.md describes each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.model, self.adapter = path / "checkpoints", path / "model", path / "adapter"
        self.metrics, self.result, self.config = path / METRICS, path / "result.json", path / "config.yaml"
        self.samples, self.diagnostics = path / "samples.jsonl", path / "diagnostics.csv"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory while writing to it. The kernel keeps the lock, so it ends with the process.

        Raises RunLocked if another process holds it. A directory that this call has made is removed again if nothing
        was written to it.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        lock = filelock.FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if (names := os.listdir(self.path)) and not {".lock", self.config.name} & {*names}:
                raise UserError(f"run_dir={self.path}: holds other files; choose a new or an empty directory")
            lock.acquire(blocking=False)
        except filelock.Timeout:
            raise RunLocked(f"run_dir={self.path}: is being written by another process") from None
        except OSError as error:  # also ENOLCK and EOPNOTSUPP, of file systems without locks
            expected = "expected a directory to write to, where files can be locked"
            raise UserError(f"run_dir={self.path}: {error.strerror}; {expected}") from error
        try:
            remove_partial(self.path)
            yield
        except BaseException as error:
            if self.config.exists():
                error.add_note(RESUMABLE)
            raise
        finally:
            if made and not self.config.exists():  # while it is locked: afterwards it may be that of another process
                with suppress(OSError):  # it holds other files
                    Path(lock.lock_file).unlink()
                    for folder in made:
                        folder.rmdir()
            lock.release()

    def continued(self, typed: Any, keys: Sequence[str]) -> RunConfig | None:
        """The run of this directory by its config.yaml, with those of the settings `typed` that `keys` name.

        If that is another run, training refuses it. None if there is none, if no run has such a key, and in a directory
        without a checkpoint if that would be another.
        """
        applied = [key for key in keys if identity.is_runtime(key) or key in (*LENGTH, *identity.PLACES)]
        others = ["data.source" if key == "data" else key for key in keys if key not in applied]
        if not (content := self.read_config()):
            return None
        with reading(self.config):
            saved = {field.name: content[field.name] for field in fields(RunConfig) if field.name in content}
            if any(key.partition(".")[0] not in typed for key in others):  # such as an experiment
                return None
            length = typed.get("trainer", {}).get("max_steps")
            if "trainer" in keys and "trainer.max_steps" not in keys and length == TrainerConfig().max_steps:
                typed["trainer"]["max_steps"] = saved["trainer"]["max_steps"]  # a device is chosen, and no length
            is_other = any(_at(saved, key) != _at(typed, key) for key in others)
            if is_other and not (self.begun_with() or self.result.exists()):
                return None
            refuse_foreign_classes(saved["model"], others)
            if saved["data"]["source"] != "hub":  # whose paths are no files
                paths = {key: from_above(self.path, saved["data"][key]) for key in ("path", "val_path")}
                saved["data"] = saved["data"] | paths
            for key in sorted([*applied, *others], key=len):  # a group before what it holds
                group, _, name = key.rpartition(".")
                _at(saved, group)[name] = _at(typed, key)
            if any(_at(typed, key) is not None for key in applied if key in LENGTH):
                saved |= {key: None for key in ("max_tokens", "max_minutes") if key not in applied}  # one length holds
            run: RunConfig = build(RunConfig, saved)
        tokenizer = self.model / "tokenizer.json"
        if run.init_from and run.tokenizer.kind == "file" and tokenizer.exists():  # the loaded run may be gone
            run.tokenizer = replace(run.tokenizer, path=str(tokenizer))
        return run

    def read_config(self) -> dict[str, Any]:
        """The content of config.yaml, {} if there is none. A person may edit it.

        Raises UserError if it is no YAML, or is gone and the run has begun: nothing says then which run that is.
        """
        if not self.config.exists():
            if self.result.exists() or any(self.checkpoints.glob("step-*.ckpt")):
                raise UserError(f"{self.config}: no such file; a run that has begun needs it")
            return {}
        with reading(self.config):
            return read_yaml(self.config)

    def begun_with(self) -> dict[str, Any]:
        """The settings of the run that has checkpoints here; {} if there are none."""
        return self.read_config() if any(self.checkpoints.glob("step-*.ckpt")) else {}

    def as_begun(self, run: RunConfig) -> tuple[RunConfig, int | None]:
        """The run with what was decided when it began here, and its steps; None if it has no checkpoints here."""
        if not (begun := self.begun_with()):
            return run, None
        with reading(self.config):
            return run, int(begun["trainer"]["max_steps"])

    def write_config(self, settings: dict[str, Any]) -> None:
        write_text(self.config, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def read_result(self) -> dict[str, Any] | None:
        return read_result(self.result)

    def finished_result(self, run: RunConfig, hashes: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The result of this run, None if it is not finished. Raises UserError if another one is.

        Without `hashes` of the text and the tokenizer, the run is shown if it is asked for with the settings of both
        that it had: its text may be gone. With others the result is None, for only the hashes tell whether the text is
        the same.
        """
        if (result := self.read_result()) is None:
            return None
        saved, settings = self.read_config(), asdict(run)
        before = identity.flat(saved)
        settings["trainer"]["max_steps"] = before.get("trainer.max_steps") if run.max_minutes else run.steps
        now = identity.flat(settings)
        is_other_text, is_asked = False, hashes is None
        if hashes is None:
            rest = identity.described_settings(settings).keys() - identity.deciding_settings(settings)
            of_text = (key for key in rest if key.startswith(("data.", "tokenizer.")))
            is_other_text = any(before.get(key) != now[key] for key in of_text)
            hashes = {key: saved.get(key) for key in ("data_hash", "tokenizer_hash")}
        by_machine = [key for key in identity.RESOLVED if now[key] in (None, "auto", "gpu")]
        self.check_same_run(settings | hashes, ignored=("threads", *by_machine))
        if is_other_text:
            return None
        log.info("%s is finished: nothing to train", self.path)
        text = Path(run.data.path or os.devnull)
        if is_asked and text.is_file() and text.stat().st_mtime > self.result.stat().st_mtime:
            log.warning("%s: is newer than this result, which is of the text as it was", text)
        if run.prompts and run.prompts != saved.get("prompts"):
            log.warning("prompts: are not continued by a finished run; generate run_dir=%s does that", self.path)
        return result

    def check_same_run(self, settings: dict[str, Any], ignored: tuple[str, ...] = ()) -> None:
        """Raise UserError naming what differs if `settings` are not those of the run in this directory."""
        if not (differing := identity.differences(self.read_config(), settings, ignored)):
            return
        if {*differing} <= {*LENGTH}:
            has_model = (self.model / "model.safetensors").exists()
            new = f"init_from={self.path} starts a new run" if has_model else "choose another run_dir for a new run"
            advice = f"its learning rate decays to the end of its own length; {new}"
        elif len(differing) == 1 and (key := min(differing)) in ("trainer.accelerator", "threads"):
            advice = f"continue it with {key}={identity.flat(self.read_config())[key]}, or choose another run_dir"
        elif {*differing} <= {"data_hash", "tokenizer_hash"}:
            advice = "give what it had as data.path and tokenizer.path, or choose another run_dir"
        else:
            advice = f"choose another run_dir or none, or give only run_dir={self.path} to continue it"
        raise UserError(f"run_dir={self.path} holds another run ({'; '.join(differing.values())}): {advice}")


def read_result(path: Path) -> dict[str, Any] | None:
    """The content of a result.json, None if there is none. Raises UserError if it is no JSON object."""
    if not path.exists():
        return None
    with reading(path):
        return read_json(path)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The lines of a samples.jsonl, without one that is cut off; none if there is no such file."""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of a run, without one that broke off; none if there is no such file. Raises UserError."""
    try:
        with reading(path):
            return read_csv(path, whole=False)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _at(tree: Any, key: str) -> Any:
    """The value of a dotted key, or the tree itself."""
    return reduce(getitem, filter(None, key.split(".")), tree)
