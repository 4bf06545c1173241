"""Faults at the n-th file operation of a process: it is killed there, or the operation fails or writes a part."""

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
OPEN = io.open


class Injection:
    """Counts the file operations below the working directory; `kind` happens at number `at`, or never if it is 0.

    ENOSPC stays: from there on nothing more can be written. From "short" on, each write writes the half and says so;
    "torn" writes the half and fails.
    """

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.at, self.seen, self.root = kind, at, 0, os.path.realpath(os.getcwd()) + os.sep

    def __call__(self) -> None:
        SEEN[:] = bytes(len(SEEN))
        sys.addaudithook(self.audit)
        builtins.open = io.open = self.opened  # type: ignore[assignment]
        fsync = os.fsync
        os.fsync = lambda file: (self.operation("write", None), fsync(file))[1]  # type: ignore[func-returns-value]

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        changes = event in CHANGING or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) != 0)
        watched = changes or event in ("open", "os.listdir", "os.scandir", "os.remove")
        if watched and isinstance(args[0], str | bytes | os.PathLike) and self.inside(os.fsdecode(args[0])):
            self.operation("change" if changes else "look", os.fsdecode(args[0]))

    def inside(self, name: str) -> bool:
        return os.path.abspath(name).startswith(self.root)

    def operation(self, what: str, name: Any) -> bool:
        """Count it, and do what is to be done at this one. Whether only the half is to be written."""
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

    def opened(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        """As io.open, with reads and writes that are counted."""
        name = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fsdecode(os.fspath(file))
        if not self.inside(name):
            return OPEN(file, mode, buffering, *args, **options)
        text = dict(zip(("encoding", "errors", "newline", "closefd", "opener"), args, strict=False)) | options
        own = {key: text.pop(key) for key in ("closefd", "opener") if key in text}
        raw = Raw(file, mode.replace("b", "").replace("t", ""), **own)
        raw.operation, raw.torn = self.operation, self.kind == "torn"
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        found = raw if buffering == 0 else kind(raw)
        return found if "b" in mode else io.TextIOWrapper(found, **text)  # type: ignore[type-var]


class Raw(io.FileIO):
    operation: Callable[[str, Any], bool]
    torn: bool

    def write(self, data: Any, /) -> int:
        half, view = self.operation("write", self.name), memoryview(data).cast("B")
        written = super().write(view[: max(1, len(view) // 2)] if half else view)
        if half and self.torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
        return written

    def readinto(self, buffer: Any, /) -> int | None:
        self.operation("read", self.name)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self.operation("read", self.name)
        return super().readall()
