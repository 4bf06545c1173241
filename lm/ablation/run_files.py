"""The files of a run of an ablation: its directory, and beside it its status, its log and where it was made."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lm.config import UserError
from lm.config.checks import reading
from lm.system.files import read_json, write_json
from lm.training.run_directory import read_result

CRASHES = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")}


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


class Ending(NamedTuple):
    """How a process or a job ended. Its kind is None if nothing is known to have failed."""

    kind: Failure | None
    message: str


def describe_exit_code(code: int) -> Ending:
    """
    >>> describe_exit_code(-9), describe_exit_code(139)
    (Ending(kind=<Failure.KILLED: 'killed'>, message='killed by signal 9'),\
 Ending(kind=<Failure.ERROR: 'error'>, message='crashed by signal 11'))
    """
    signum = code - 128 if code > 128 else -code  # 128 + signal: of a process that has handled it, and of a shell
    if signum in CRASHES:
        return Ending(Failure.ERROR, f"crashed by signal {signum}")
    if signum > 0:
        return Ending(Failure.KILLED, f"killed by signal {signum}")
    return Ending(Failure.ERROR if code else None, f"ended with exit code {code}")


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
