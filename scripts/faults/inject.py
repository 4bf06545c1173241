"""Fault injection: at its n-th file operation a process is killed, or the operation fails or writes only half."""

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
LOOKING = {"open", "os.listdir", "os.scandir", "os.remove"}
# the operations at which each kind of error can happen: change, look, read, write, sync
KINDS = {"ENOSPC": "cws", "EIO": "clrws", "EACCES": "cl", "torn": "w"}
OPERATIONS = mmap.mmap(-1, 1 << 14)  # the first letter of each operation so far; shared with forked processes


class Injection:
    """Counts the file operations below the working directory; the fault `kind` happens at number `at`.

    "kill" is SIGKILL before the operation. "EIO" and "EACCES" happen once. After "ENOSPC" nothing more can be written.
    "torn" writes half of the data, and then the disk is full. Calling the object installs it: an audit hook sees what
    Python does with paths, and `io.open` becomes Python's own implementation with `CountedFile` below it. Libraries in
    C++ are not seen.
    """

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.at, self.seen, self.root = kind, at, 0, os.path.realpath(os.getcwd()) + os.sep

    def __call__(self) -> None:
        OPERATIONS[:] = bytes(len(OPERATIONS))
        sys.addaudithook(self.audit)
        for name in ("BufferedReader", "BufferedWriter", "BufferedRandom", "TextIOWrapper"):
            setattr(_pyio, name, getattr(io, name))
        CountedFile.operation, _pyio.FileIO, fsync = self.operation, CountedFile, os.fsync
        builtins.open = io.open = _pyio.open
        os.fsync = lambda file: (self.operation("sync", file), fsync(file))[1]

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        change = event in CHANGING or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) != 0)
        if (change or event in LOOKING) and isinstance(args[0], str | bytes | os.PathLike):
            self.operation("change" if change else "look", os.path.abspath(os.fsdecode(args[0])))

    def operation(self, what: str, file: str | int) -> bool:
        """Count an operation and let its fault happen. Returns whether only half of the data is to be written."""
        name = file if isinstance(file, str) else os.readlink(f"/proc/self/fd/{file}")
        if not name.startswith(self.root):
            return False
        self.seen += 1
        OPERATIONS[self.seen - 1 : self.seen] = what[:1].encode()
        now, since = self.seen == self.at, 0 < self.at <= self.seen
        if now and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        full = since and (self.kind == "ENOSPC" or (self.kind == "torn" and not now))
        if (full and what in ("change", "write", "sync")) or (now and self.kind in ("EIO", "EACCES")):
            number = getattr(errno, self.kind, errno.ENOSPC)
            raise OSError(number, os.strerror(number), *[file] * isinstance(file, str))  # reads and writes name no file
        return now and self.kind == "torn"


class CountedFile(io.FileIO):
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


def inject(kind: str = "", at: int = 0) -> None:
    Injection(kind, at)()
