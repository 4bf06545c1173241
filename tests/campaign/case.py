"""Commands of the program in processes of their own, and what they must not do."""

import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

LIMIT = 60.0  # seconds that a command on these tiny files may take on a busy machine before it counts as hanging
CLOCK = {"seconds", "tokens_per_second", "resumed_from", "checksum", "begun", "ended"}  # differ between equal results
SAID = ["broken", "damaged", "cannot be read", "does not match", "is not what", "was changed"]  # of a file
SAID += ["Permission denied", "Input/output error", "No space left"]


class Failed(Exception):
    """The program did what it must not do."""


class Command:
    """A command in a fork of this process, which has imported what it needs. `hook` is called in the fork at first."""

    def __init__(self, words: list[str], hook: Callable[[], object] = int) -> None:
        self.name, self.code, self.files = words[0], 0, [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        if not (pid := os.fork()):
            os._exit(self.live(words, hook))
        self.pid = pid

    def live(self, words: list[str], hook: Callable[[], object]) -> int:
        code: Any = 0
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *(file.fileno() for file in self.files))):
                os.dup2(file, number)
            sys.argv = ["lm-lab", *words]
            hook()
            import_module(f"lm.cli.{words[0]}").main(words[1:])
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
            code = 1
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        return code if isinstance(code, int) else int(code is not None)

    def end(self, seconds: float = LIMIT, signum: int = signal.SIGKILL) -> "Command":
        """After `seconds` it gets the signal; its code is then -9 if that is SIGKILL."""
        file = os.pidfd_open(self.pid)
        for limit, number in (seconds, signum), (LIMIT, signal.SIGKILL):
            if not select.select([file], [], [], limit)[0]:
                os.kill(self.pid, number)
        os.close(file)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.out, self.err = (os.pread(one.fileno(), 1 << 20, 0).decode(errors="replace") for one in self.files)
        return self

    def proper(self, *codes: int) -> "Command":
        """Raise Failed unless this is success, or one line that says what is wrong and the exit code 1 or 2."""
        last, errors = (self.err.strip().splitlines() or [""])[-1], len(re.findall("^error: ", self.err, re.MULTILINE))
        if "Traceback" in self.err or "panicked at" in self.err:
            raise Failed(f"{self.name}: traceback: {last}")
        if self.code not in (codes or (0, 1, 2)) or errors != (self.code > 0):
            what = "hangs, or is killed" if self.code == -signal.SIGKILL else f"exit code {self.code}, {errors} errors"
            raise Failed(f"{self.name}: {what}: {last}")
        return self


def cold(words: list[str]) -> Command:
    """A command as a user starts it."""
    return Command(words, lambda: os.execv(sys.executable, [sys.executable, "-m", "lm", *words]))


def run(words: list[str], hook: Callable[[], object] = int, seconds: float = LIMIT, signum: int = 9) -> Command:
    return Command(words, hook).end(seconds, signum)


def session(leader: int) -> list[int]:
    """The processes of a session, but for its leader and this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, *fields = path.read_text().rpartition(")")[2].split()
            if fields[2] == str(leader) and state != "Z" and int(path.parent.name) not in (leader, os.getpid()):
                found.append(int(path.parent.name))
    return found


def alone(seconds: float = 30) -> None:
    """Raise Failed unless all other processes of this case end."""
    deadline = time.monotonic() + seconds
    while left := session(os.getsid(0)):
        if time.monotonic() > deadline:
            raise Failed(f"{len(left)} processes outlive the one that started them")
        time.sleep(0.05)


def timeless(found: Any) -> Any:
    """The content of a JSON file without what a clock decides."""
    if isinstance(found, dict):
        return {key: timeless(value) for key, value in found.items() if key not in CLOCK}
    return [timeless(one) for one in found] if isinstance(found, list) else found


def content(path: Path) -> Any:
    return timeless(json.loads(path.read_bytes())) if path.suffix == ".json" else path.read_bytes()
