"""A run is a directory: its name, lock, configuration and result."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import yaml

from lm.config import BadInput, RunConfig
from lm.config.checks import reading
from lm.config.identity import config_hash, identifying
from lm.system.files import read_yaml, remove_partial, write_json, write_text
from lm.training.finished import read_result


def default_dir(run: RunConfig) -> Path:
    """runs/ and a name that describes the run and ends in its hash, so that the same command finds it again."""
    corpus = Path(run.data.path.rstrip("/")).stem if run.data.path else run.data.source
    tokens = f"{run.tokenizer.kind}{run.tokenizer.vocab_size or ''}"
    shape = f"{run.model.n_layers}x{run.model.d_model}"
    name = f"{corpus[:40]}-{tokens}-{shape}-{run.head.name}-seed{run.seed}-{config_hash(run)[:8]}"
    return Path("runs") / "".join(c if c.isalnum() or c == "-" else "_" for c in name)


LENGTH = ("trainer.max_steps", "max_tokens")  # of a run, which its learning-rate schedule follows


class Held(BadInput):
    """Another process is writing to the run's directory."""


class RunDirectory:
    """The files of one run; the README describes each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.model, self.adapter = path / "checkpoints", path / "model", path / "adapter"
        self.tokenizer = self.model / "tokenizer.json"
        self.metrics, self.result, self.config = path / "metrics.csv", path / "result.json", path / "config.yaml"

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Lock the directory while writing to it. The kernel keeps the lock, so it ends with the process.

        Raises Held naming the process that holds it. A directory that this call has created is removed again if
        no configuration was written to it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"run_dir={self.path}: is a file; expected a directory")
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        lock, holder = filelock.FileLock(self.path / ".lock"), self.path / ".holder"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()) and not Path(lock.lock_file).exists():
                raise BadInput(f"run_dir={self.path}: holds other files; choose a new or an empty directory")
            lock.acquire(blocking=False)
        except filelock.Timeout:
            with suppress(OSError):
                raise Held(f"run_dir={self.path}: is being written by {holder.read_text()}") from None
            raise Held(f"run_dir={self.path}: is being written by another process") from None
        except OSError as error:
            raise BadInput(f"run_dir={self.path}: {error.strerror}; expected a directory to write to") from error
        try:
            write_text(holder, f"process {os.getpid()} on {socket.gethostname()}")
            remove_partial(self.path)
            yield
        finally:
            holder.unlink(missing_ok=True)
            if not self.config.exists():
                (self.path / ".lock").unlink(missing_ok=True)
                with suppress(OSError):  # it holds other files
                    for folder in missing:
                        folder.rmdir()
            lock.release()

    def write_config(self, settings: dict[str, Any]) -> None:
        write_text(self.config, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def write_tokenizer(self, content: str) -> None:
        self.model.mkdir(exist_ok=True)
        write_text(self.tokenizer, content)

    def read_config(self) -> dict[str, Any]:
        """The settings of the run in this directory. Raises BadInput if they cannot be read."""
        with reading(self.config):
            return read_yaml(self.config)

    def refuse_changes(self, settings: dict[str, Any], but: tuple[str, ...] = ()) -> None:
        """Raise BadInput naming what differs if `settings` are not those of the run in this directory.

        Keys in `but` are not compared.
        """
        there, here, absent = identifying(self.read_config()), identifying(settings), "absent"
        differing = {
            key: f"{key} is {str(there.get(key, absent))[:40]} there, {str(here.get(key, absent))[:40]} now"
            for key in sorted(here.keys() | there.keys())
            if key not in but and here.get(key, absent) != there.get(key, absent)
        }
        if differing:
            found = "; ".join(differing.values())
            if set(differing) <= set(LENGTH):
                finish = "" if self.result.exists() else f"give only run_dir={self.path} to finish it; "
                schedule = f"{found}: the learning rate of run_dir={self.path} decays to the end of its own length"
                raise BadInput(
                    f"{schedule}; {finish}init_from={self.path} starts a new run, with a schedule of its own"
                )
            other = f"run_dir={self.path} holds another run ({found})"
            raise BadInput(f"{other}: choose another run_dir or none, or give only run_dir={self.path} to continue it")

    def read_result(self) -> dict[str, Any] | None:
        """The content of result.json, None if the run is not finished."""
        return read_result(self.result)

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.result, result)
