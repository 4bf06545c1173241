"""The files of a run of an ablation, and what became of it."""

import os
import signal
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lm.config import UserError
from lm.config.checks import reading
from lm.system.files import read_json
from lm.training.run_directory import read_result

KILLED, LOST = "killed by signal", "lost:"  # so begins the error of a run that was ended from outside
CRASHES = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")}  # of code


class Outcome(NamedTuple):
    status: str  # done, failed, diverged, or missing: not run yet, or running
    error: str = ""
    result: Mapping[str, Any] = MappingProxyType({})  # result.json, or empty
    row: Mapping[str, str] | None = None  # of results.csv, where the run has no folder


def cause_of_death(exitcode: int) -> str:
    """Of a process that has said nothing. 128 and a signal is how one exits that has handled the signal."""
    signum = exitcode - 128 if exitcode > 128 else -exitcode
    if signum in CRASHES:
        return f"crashed by signal {signum}"
    return f"{KILLED} {signum}" if signum > 0 else f"ended with exit code {exitcode}"


def broke(status: str, error: str) -> bool:
    """Whether a run failed for a reason of its own, such as an exception, an exit code or a crash of native code.

    One that was killed by another signal, or whose node is gone, is lost at random, whatever its arm. The kernel kills
    by SIGKILL too when memory runs out, which cannot be told from any other kill.
    """
    return status == "failed" and not error.startswith((KILLED, LOST))


@lru_cache(maxsize=1 << 14)
def read_once(path: Path, version: tuple[int, ...]) -> dict[str, Any] | None:
    """The content of a result.json, read again only if the file is another: all are asked for many times."""
    return read_result(path)


class RunFiles:
    """Where the files of a run lie: its directory, what became of it if it has no result, its log, where it ran."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        names = (run_dir.name + suffix for suffix in (".json", ".log", ".where"))
        self.outcome, self.log, self.where = map(run_dir.with_name, names)

    def read(self) -> Outcome:
        """Raises OSError if what is there cannot be read: it is not missing, and need not be made again."""
        path = self.run_dir / "result.json"
        try:
            try:
                now = path.stat()
            except OSError:  # nearly always: there is none
                result = read_result(path)
            else:
                result = read_once(path, (now.st_ino, now.st_size, now.st_mtime_ns))
            if result is not None:
                return Outcome("done", result=result)
        except UserError as error:
            return Outcome("failed", str(error))
        try:
            with reading(self.outcome):
                found = read_json(self.outcome)
                return Outcome(found["status"], found["error"])
        except (FileNotFoundError, NotADirectoryError):
            return Outcome("missing")
        except UserError as error:
            return Outcome("failed", str(error))

    def steps(self) -> int:
        """Optimizer steps that the run has logged so far. Raises OSError if they cannot be read."""
        path = self.run_dir / "metrics.csv"
        if not path.is_file():
            return 0
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 400))
                return int(file.read().splitlines()[-1].split(b",")[0])
        except (FileNotFoundError, ValueError, IndexError):
            return 0
