"""Commands of the program, and what they must not do."""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

LIMIT = 60  # seconds that a command on these tiny files may take on a busy machine before it counts as hanging
FORK = multiprocessing.get_context("fork")


class Failed(Exception):
    """The program did what it must not do."""


class Command(FORK.Process):
    """`lm-lab WORDS` in a fork of this process, which has imported what it needs. `hook` is called there first."""

    def __init__(self, words: list[str], hook: Callable[[], object] = int, limit: int = LIMIT) -> None:
        super().__init__()
        self.words, self.hook, self.limit = words, hook, limit
        self.files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self.start()

    def run(self) -> None:
        from lm.cli.main import main

        signal.alarm(self.limit)  # ends it
        for number, file in enumerate(self.files, 1):
            os.dup2(file.fileno(), number)
        sys.argv = ["lm-lab", *self.words]
        self.hook()
        main()

    def end(self, signum: int = 0, after: float = 0.0) -> "Command":
        """Wait until it has ended; after so many seconds it gets the signal, if there is one."""
        if signum:
            time.sleep(after)  # join would return when another program is executed
            os.kill(self.pid, signum)
        self.join()
        self.code = self.exitcode
        self.out, self.err = (os.pread(one.fileno(), 1 << 20, 0).decode(errors="replace") for one in self.files)
        return self

    def proper(self, *codes: int) -> "Command":
        """Raise Failed unless this is success, or ends in one line that says what is wrong and the exit code 1 or 2."""
        lines = self.err.strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        what = "traceback" * ("Traceback" in self.err or "panicked at" in self.err)
        if self.code not in (codes or (0, 1, 2)) or errors != (lines[-1:] or ["none"]) * (self.code > 0):
            what = what or ("hangs" if self.code == -signal.SIGALRM else f"exit code {self.code}, {len(errors)} errors")
        if what:
            raise Failed(f"{self.words[0]}: {what}: {self.err.strip()[-200:]}")
        return self


def run(words: list[str], hook: Callable[[], object] = int, limit: int = LIMIT) -> Command:
    return Command(words, hook, limit).end()


def start_cold(words: list[str], limit: int = LIMIT) -> Command:
    """A command as a user starts it."""
    return Command(words, lambda: os.execv(sys.executable, [sys.executable, "-m", "lm", *words]), limit)


def lead(first: Callable[[], object]) -> None:
    """Let this process begin a session, end with its parent, and adopt those that its children leave."""
    os.setsid()
    for option, argument in ((1, signal.SIGKILL), (36, 1)):  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
        ctypes.CDLL(None).prctl(option, argument)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    first()


def end_all(seconds: float) -> int:
    """How many processes that were started here have not ended by themselves after so many seconds; they are killed."""
    left = psutil.wait_procs(psutil.Process().children(recursive=True), seconds)[1]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, 5)
    return len(left)
