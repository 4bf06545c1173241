"""A process that dies or fails while it writes a file. A new process imports this file alone, which takes a moment."""

import os
from contextlib import suppress
from itertools import count

from lm.system.files import read_json, write_json
from scripts.faults.inject import Injection


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
