"""Standard output and standard error whose reader may leave, as `head` does, without ending what is under way."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lm.system.terminal import printable

GONE = (errno.EPIPE, errno.EBADF)  # the reader has left; there was none, as in `train >&-`


class ReaderLeft(OSError):
    """Standard output has no reader any more. `delivered`: the bytes that were written before."""

    def __init__(self, delivered: int) -> None:
        super().__init__(errno.EPIPE, "closed before anything was written to it", "standard output")
        self.delivered = delivered


class Descriptor(io.FileIO):
    """A standard stream. After the first error all that is written to it is dropped, also by child processes.

    On standard error no error is raised: a message that nobody reads must not end a run. On standard output ReaderLeft
    is raised once where the output is the result (`strict`), and always the OSError of a full disk.
    """

    def __init__(self, descriptor: int, strict: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.strict, self.delivered = strict, 0

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            silence(self.fileno(), os.O_WRONLY)
            if self.strict and error.errno in GONE:
                raise ReaderLeft(self.delivered) from error
            if self.fileno() == 1 and error.errno not in GONE:
                raise OSError(error.errno, error.strerror, "standard output") from error
            return len(data)
        self.delivered += written
        return written


class Terminal(io.TextIOWrapper):
    """Standard output on a terminal, which nothing that is printed can steer: texts of models, names of files."""

    def write(self, text: str, /) -> int:
        return super().write(printable(text))


def protect(output_is_the_result: bool) -> None:
    """Replace sys.stdout and sys.stderr by streams whose reader may leave, unless somebody else has replaced them."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = stream(1, sys.stdout, output_is_the_result)
    if sys.stderr is sys.__stderr__:
        sys.stderr = stream(2, sys.stderr, False)


def stream(descriptor: int, before: TextIO | None, strict: bool) -> TextIO:
    try:
        os.fstat(descriptor)
    except OSError:  # it was closed: no other file may get its number, for libraries write to it
        silence(descriptor, os.O_RDONLY)  # where writing fails
    encoding, errors = (before.encoding, before.errors) if before else ("utf-8", "backslashreplace")
    unbuffered = bool(getattr(before, "write_through", False))  # by PYTHONUNBUFFERED; then by_line alone would be false
    by_line = unbuffered or bool(before and before.line_buffering)
    kind = Terminal if descriptor == 1 and os.isatty(1) else io.TextIOWrapper
    return kind(io.BufferedWriter(Descriptor(descriptor, strict)), encoding, errors, line_buffering=by_line)


@contextmanager
def muted() -> Iterator[None]:
    """A context in which nothing reaches standard error, also what a library writes there by itself."""
    kept = os.dup(2)
    silence(2, os.O_WRONLY)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def silence(descriptor: int, mode: int) -> None:
    null = os.open(os.devnull, mode)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
