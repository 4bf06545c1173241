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
KINDS = {"ENOSPC": "cws", "EIO": "clrws", "EACCES": "cl", "short": "w", "torn": "w"}  # at which operations each can be
SEEN = mmap.mmap(-1, 1 << 14)  # a letter for each operation: change, look, read, write, sync; shared with forks


def changes(event: str, args: tuple[Any, ...]) -> bool:
    """Whether this event of an audit hook changes what a path names."""
    return event in CHANGING or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) != 0)


class Injection:
    """A hook that counts the file operations below the working directory; at number `at` the fault `kind` happens.

    ENOSPC stays: from there on nothing more can be written. "torn" writes the half, and then the disk is full. From
    "short" on, each write writes the half and says so. Files are opened by io.open as Python's own implementation has
    it, with this File.
    """

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.at, self.seen, self.root = kind, at, 0, os.path.realpath(os.getcwd()) + os.sep

    def __call__(self) -> None:
        SEEN[:] = bytes(len(SEEN))
        sys.addaudithook(self.audit)
        for name in ("BufferedReader", "BufferedWriter", "BufferedRandom", "TextIOWrapper"):
            setattr(_pyio, name, getattr(io, name))
        File.operation, _pyio.FileIO, fsync = self.operation, File, os.fsync
        builtins.open = io.open = _pyio.open
        os.fsync = lambda file: (self.operation("sync", file), fsync(file))[1]

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        change = changes(event, args)
        watched = change or event in ("open", "os.listdir", "os.scandir", "os.remove")
        if watched and isinstance(args[0], str | bytes | os.PathLike):
            self.operation("change" if change else "look", os.path.abspath(os.fsdecode(args[0])))

    def operation(self, what: str, file: str | int) -> bool:
        """Count it, and do what is to be done at this one. Whether only the half is to be written."""
        name = file if isinstance(file, str) else os.readlink(f"/proc/self/fd/{file}")
        if not name.startswith(self.root):
            return False
        self.seen += 1
        SEEN[self.seen - 1 : self.seen] = what[:1].encode()
        here, past = self.seen == self.at, 0 < self.at <= self.seen
        if here and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        full = self.kind == "ENOSPC" or (self.kind == "torn" and not here)
        if (past and full and what in ("change", "write", "sync")) or (here and self.kind in ("EIO", "EACCES")):
            number = getattr(errno, self.kind, errno.ENOSPC)
            raise OSError(number, os.strerror(number), *[file] * isinstance(file, str))  # reads and writes name no file
        return what == "write" and (past if self.kind == "short" else here and self.kind == "torn")


class File(io.FileIO):
    """Reads and writes that are counted."""

    operation: Callable[[str, str | int], bool]

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        half = self.operation("write", self.fileno())
        return super().write(view[: max(1, len(view) // 2)] if half else view)

    def readinto(self, buffer: Any, /) -> int | None:
        self.operation("read", self.fileno())
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self.operation("read", self.fileno())
        return super().readall()
