"""A run is a directory: its name, its lock, its configuration and its result.

`config.yaml` holds the settings as they were decided when the run began. Beside them stand
`requested` (the request for each setting that the machine and the text decided), the hashes of
settings, text and tokenizer, and `code` (the version and the hash of the code).
"""

import glob
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import yaml

from lm.config import (
    HASHES,
    REQUESTED,
    DataConfig,
    ModelConfig,
    RunConfig,
    TokenizerConfig,
    build,
    change,
    differing_keys,
    flat,
    length_of,
    requested_settings,
    user_classes,
)
from lm.data.paths import as_started, is_url, literal_part
from lm.data.sources import COMMIT, local_states
from lm.errors import RESUMABLE, UserError, reading, without_secrets
from lm.folder import TOKENIZER, read_result
from lm.registry import from_lab
from lm.system.code import code_identity
from lm.system.files import LOCK, PARTIAL, is_run, json_sha256, read_csv, read_yaml, remove_partial, write_text

if TYPE_CHECKING:
    from lm.data.tokens import TextData

METRICS = "metrics.csv"
GIVE = "give a text: data=text data.path=FILE"
SAMPLE_TEMPERATURE = 0.8  # of drawn samples; the seed of a sample is the number of its prompt
log = logging.getLogger(__name__)


class RunLocked(UserError):
    """A run directory that another process is writing to."""


def default_directory(run: RunConfig, config_hash: str) -> Path:
    """Return runs/NAME. The name describes the run and ends in its hash: the same command finds the run.

    Return a directory with that hash under any name if there is one, because its text may have been
    renamed.
    """
    place = without_secrets(run.data.path) if run.data.path else run.data.source
    if run.data.path and not is_url(place):  # . and *.txt have the name of their folder
        is_glob = glob.has_magic(place) and not os.path.exists(place)
        place = os.path.abspath(literal_part(Path(place)) if is_glob else place)
    tokens = f"{run.tokenizer.kind}{run.tokenizer.vocab_size or ''}"
    shape = f"{run.model.n_layers}x{run.model.d_model}"
    suffix = config_hash[:8]
    name = f"{Path(place.rstrip('/')).stem.lstrip('-_')[:40]}-{tokens}-{shape}-{run.head.name}-seed{run.seed}-{suffix}"
    directory = Path("runs") / "".join(c if c.isalnum() or c == "-" else "_" for c in name)
    if directory.exists():
        return directory
    return next(Path("runs").glob(f"*-{suffix}"), directory)


class RunDirectory:
    """The files of one run; docs/runs.md describes each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.model, self.adapter = path / "checkpoints", path / "model", path / "adapter"
        self.tokenizer = self.model / TOKENIZER
        self.metrics, self.result, self.config = path / METRICS, path / "result.json", path / "config.yaml"
        self.samples, self.diagnostics = path / "samples.jsonl", path / "diagnostics.csv"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory during this context. The kernel releases the lock of a killed process.

        Raises RunLocked if another process holds the lock, and UserError if the folder holds something
        else. Remove a directory that this call has made, if no run began in the directory.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        lock = filelock.FileLock(self.path / LOCK)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.check_is_run()
            lock.acquire(blocking=False)
        except filelock.Timeout:
            raise RunLocked(f"run_dir={self.path}: is being written by another process") from None
        except OSError as error:  # ENOLCK and EOPNOTSUPP too, of file systems without locks
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
            if made and not self.config.exists():
                with suppress(OSError):
                    Path(lock.lock_file).unlink()
                    for folder in made:
                        folder.rmdir()
            lock.release()

    def check_is_run(self) -> None:
        """Raise UserError if the folder holds something else than a run, or lies in a run, where no list finds it."""
        if outer := next((folder for folder in self.path.absolute().parents if is_run(folder)), None):
            raise UserError(f"run_dir={self.path}: lies in the run {outer}; choose another directory")
        names = os.listdir(self.path) if self.path.is_dir() else []
        names = [name for name in names if name != LOCK and not name.startswith(PARTIAL)]
        if names and not is_run(self.path):
            raise UserError(f"run_dir={self.path}: holds other files; choose a new or an empty directory")

    # --- configuration

    def read_config(self) -> dict[str, Any]:
        """Return the content of config.yaml, or {} if the directory holds no run. Raises UserError."""
        if not self.path.is_dir() or not is_run(self.path):
            return {}
        with reading(self.config):
            content = read_yaml(self.config)
            if "code" not in content or "requested" not in content:
                raise UserError("was begun by an earlier version, which alone can continue it; choose another run_dir")
            return content

    def write_config(self, settings: dict[str, Any]) -> None:
        write_text(self.config, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run as they were decided, nested, as they open the text that was read.

        Paths lead from the folder in which training was started, and a data set of the Hub has the commit that was
        read. Raises UserError without a config.yaml.
        """
        if not (content := self.read_config()):
            raise UserError(f"{self.config}: no such file; expected a finished run, or {GIVE}")
        with reading(self.config):
            settings = {item.name: content[item.name] for item in fields(RunConfig) if item.name in content}
            data = settings["data"]
            data["revision"] = content.get("data_revision") or data["revision"]  # the branch may have moved on
            for key in ("path", "val_path") if data["source"] != "hub" else ():
                data[key] = data[key] and as_started(self.path, content["started_in"], data[key])
        if settings["tokenizer"]["kind"] == "file" and self.tokenizer.exists():
            settings["tokenizer"]["path"] = str(self.tokenizer)  # the original may be gone, or lie in another folder
        return settings

    # --- text

    def data_config(self) -> DataConfig:
        """Return the settings of the text of the run, with paths that lead to it. Raises UserError."""
        settings = self.settings()
        with reading(self.config):
            config: DataConfig = build(DataConfig, settings["data"])
            return config

    def read_text(self) -> "TextData":
        """Return the text of the run. Download nothing, because only the files of a run name the text.

        Raises UserError.
        """
        from lm.data.tokens import prepare  # imports numpy and tokenizers

        config, settings, saved = self.data_config(), self.settings(), self.read_config()
        with reading(self.config):
            tokenizer: TokenizerConfig = build(TokenizerConfig, settings["tokenizer"])
            hashes = saved["data_hash"], saved["tokenizer_hash"]
        if config.source == "hub" and not COMMIT.fullmatch(str(config.revision)):
            raise UserError(f"its text comes from {config.path}, of no commit; {GIVE}")
        if not os.access(config.cache / "tokens", os.R_OK):  # the run was made elsewhere
            config = replace(config, cache_dir=DataConfig().cache_dir)
        data = prepare(config, tokenizer, self.tokenizer, downloads=False)
        if (data.hash, data.tokenizer.hash) != hashes:
            changed = "its text has" if data.hash != hashes[0] else "its tokenizer has"
            raise UserError(f"{changed} changed since training; {GIVE}")
        return data

    def has_begun(self) -> bool:
        """Return whether there are checkpoints. Raises UserError if their config.yaml is not there."""
        has_checkpoints = any(self.checkpoints.glob("step-*.ckpt"))
        if has_checkpoints and not self.read_config():
            raise UserError(f"{self.config}: holds no settings of a run, which the checkpoints beside this file need")
        return has_checkpoints

    def as_decided(self, run: RunConfig) -> RunConfig:
        """Return the run with what the machine and the text decided when the run began here."""
        saved = flat(self.read_config())
        return change(run, {"max_tokens": None} | {key: saved[key] for key in REQUESTED})

    def check_same_run(self, run: RunConfig, hashes: dict[str, str], ignored: str = "") -> None:
        """Raise UserError with what differs, if `run` is not the run of this directory."""
        saved, now = self.read_config(), requested_settings(run) | hashes
        keys = [key for key in differing_keys(saved, now) if key != ignored]
        if not keys:
            return
        before = flat(saved)
        before["length"], now["length"] = length_of(before | saved["requested"]), length_of(now)
        if {*keys} <= {*HASHES}:
            keys = _differing_in_text(before, now) or keys
        keys = [key for key in keys if before.get(key) != now.get(key)] or keys  # without settings that go with another
        lines = [f"{key} is {before.get(key)!s:.40} there, {now.get(key)!s:.40} now" for key in keys]
        if keys == ["length"]:
            has_model = (self.model / "model.safetensors").exists()
            new = f"init_from={self.path} starts a new run" if has_model else "choose another run_dir for a new run"
            advice = f"its learning rate decays to the end of its own length; {new}"
        elif keys in (["threads"], ["trainer.accelerator"]):
            advice = f"continue it with {keys[0]}={before[keys[0]]}, or choose another run_dir"
        elif {*keys} <= {*HASHES}:  # the same paths hold something else
            advice = "give what it had as data.path and tokenizer.path, or choose another run_dir"
        else:
            advice = f"choose another run_dir or none, or give only run_dir={self.path} to continue it"
        raise UserError(f"run_dir={self.path} holds another run ({'; '.join(lines)}): {advice}")

    def check_code(self, run: RunConfig) -> None:
        """Raise UserError if other code began the run, unless other_code=true is typed."""
        began, now = self.read_config()["code"], code_of_run(run.model)
        if began != now and not run.other_code:
            before, this = (f"version {code['version']}, {code['hash'][:8]}" for code in (began, now))
            other = f"other code ({before}; this is {this})"
            if began["hash"] == now["hash"]:
                other = f"another version of {', '.join(user_classes(run.model).values())}"
            advice = "checkpoint.resume=false starts again, other_code=true goes on with this code"
            raise UserError(f"run_dir={self.path}: was begun by {other}: {advice}")

    # --- result

    def finished_result(self, run: RunConfig, hashes: dict[str, str] | None = None) -> dict[str, Any] | None:
        """Return the result of this run, or None if the run is not finished. Raises UserError for another run.

        The hashes of text and tokenizer need the text, and the text may be gone. Without `hashes`,
        return None if the settings of the text differ.
        """
        if (result := read_result(self.result)) is None:
            return None
        saved = self.read_config()
        if not saved:
            raise UserError(f"{self.config}: no such file; the directory of a run needs one")
        self.check_same_run(run, hashes or {}, ignored="threads")
        if hashes is None:
            if _differing_in_text(flat(self.settings()), requested_settings(run)):
                return None  # the text has to be read
            if not local_states(run.data).items() <= saved["states"].items():
                log.warning("%s: its text has changed since; this result is of what it was", self.path)
        log.info("%s is finished: nothing to train", self.path)
        is_same = False
        with suppress(UserError):  # a class of the user may be gone
            is_same = saved["code"] == code_of_run(run.model)
        if not is_same:
            log.warning("%s: was made by other code (version %s)", self.path, saved["code"]["version"])
        loggers = {name for name, options in asdict(run.logger).items() if options is not None}
        asked = {"prompts": run.prompts, "diagnostics": run.diagnostics.every, "logger": loggers}
        if too_late := [key for key, value in asked.items() if value and asdict(run)[key] != saved.get(key)]:
            what = ", ".join(too_late)
            log.warning("settings without effect on a finished run: %s; another run_dir=DIR trains anew", what)
        return result


def _differing_in_text(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the settings of text and tokenizer that differ, as dotted keys."""
    keys = [key for key in now if key.startswith(("data.", "tokenizer.")) and key != "data.cache_dir"]
    return [key for key in keys if before.get(key) != now[key]]


def code_of_run(model: ModelConfig) -> dict[str, str]:
    """Return the version of lm, the hash of the code that computes, and the hash of the code of the user's classes."""
    if not (classes := user_classes(model)):
        return code_identity()
    sources = from_lab("lm.lab.user_class.sources_of")(classes)  # imports torch
    return code_identity() | {"classes": json_sha256(sources)}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a samples.jsonl, or [] if there is no file."""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file of a run, without a row that broke off, or [] if there is no file."""
    try:
        with reading(path):
            return read_csv(path, whole=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
