"""Processes that die or fail while they write a file. A new process imports this file alone, which takes a moment."""

import os
import signal
from contextlib import suppress
from itertools import count

from lm.system.files import atomic_file, read_json, write_json
from scripts.faults.inject import Injection


def write_and_die(folders):
    """Be killed while a file is written in each of two folders."""
    with atomic_file(folders[0] / "killed") as file, atomic_file(folders[1] / "killed"):
        file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def write_with_faults(folder):
    """Write a file over an old one, with a fault of each kind at each of the operations that this takes."""
    os.chdir(folder)
    for kind in ("kill", "torn", "ENOSPC"):
        for at in count(1):
            write_json(folder / "a.json", {"old": 1})
            if not (pid := os.fork()):
                injection = Injection(kind, at)
                injection()
                with suppress(OSError):
                    write_json(folder / "a.json", {"new": 2})
                    os._exit(3 if injection.seen < at else 0)
                os._exit(1)
            code, content = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), read_json(folder / "a.json")
            assert content == {"new": 2} if code in (0, 3) else content in ({"old": 1}, {"new": 2})
            assert kind == "kill" or os.listdir(folder) == ["a.json"]
            for left in folder.glob(".partial-*"):
                left.unlink()
            if code == 3:  # there are fewer operations
                assert at > 5
                break
