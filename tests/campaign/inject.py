"""Faults at the n-th file operation of a process: it is killed there, or the operation fails or writes a part."""

import _pyio
import builtins
import errno
import io
import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CHANGING = {"os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link", "os.symlink"}
KINDS = {"ENOSPC": "cw", "EIO": "clrw", "EACCES": "cl", "short": "w", "torn": "w"}  # at which operations each can be
SEEN = mmap.mmap(-1, 1 << 14)  # a letter for each operation: change, look, read, write; shared with forked processes


def changes(event: str, args: tuple[Any, ...]) -> bool:
    """Whether this event of an audit hook changes what a path names."""
    return event in CHANGING or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) != 0)


class Injection:
    """Counts the file operations below the working directory; `kind` happens at number `at`, or never if it is 0.

    ENOSPC stays: from there on nothing more can be written. From "short" on, each write writes the half and says so;
    "torn" writes the half and fails. Files are opened by the implementation of `io` in Python, whose FileIO calls
    os.read and os.write, with the buffers of the usual one: torch calls them while an error is being raised.
    """

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.at, self.seen, self.root = kind, at, 0, os.path.realpath(os.getcwd()) + os.sep

    def __call__(self) -> None:
        SEEN[:] = bytes(len(SEEN))
        sys.addaudithook(self.audit)
        for name in ("BufferedReader", "BufferedWriter", "BufferedRandom", "TextIOWrapper"):
            setattr(_pyio, name, getattr(io, name))
        builtins.open = io.open = _pyio.open  # type: ignore[assignment]
        for name in ("read", "write", "fsync"):
            setattr(os, name, self.counted(getattr(os, name), "read" if name == "read" else "write"))

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        change = changes(event, args)
        watched = change or event in ("open", "os.listdir", "os.scandir", "os.remove")
        if watched and isinstance(args[0], str | bytes | os.PathLike):
            self.operation("change" if change else "look", os.path.abspath(os.fsdecode(args[0])))

    def counted(self, real: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(file: int, *args: Any) -> Any:
            name = os.readlink(f"/proc/self/fd/{file}")
            half = self.operation(what, name) and args
            if half:
                data = bytes(args[0])
                args = (data[: max(1, len(data) // 2)],)
            result = real(file, *args)
            if half and self.kind == "torn":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            return result

        return call

    def operation(self, what: str, name: str) -> bool:
        """Count it, and do what is to be done at this one. Whether only the half is to be written."""
        if not name.startswith(self.root):
            return False
        self.seen += 1
        SEEN[self.seen - 1 : self.seen] = what[:1].encode()
        here, past = self.seen == self.at, 0 < self.at <= self.seen
        if here and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if (here and self.kind in ("EIO", "EACCES")) or (
            past and self.kind == "ENOSPC" and what in ("change", "write")
        ):
            number = getattr(errno, self.kind)
            raise OSError(number, os.strerror(number), name)
        return what == "write" and (past if self.kind == "short" else here and self.kind == "torn")
