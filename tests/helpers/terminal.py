"""A command on a terminal of its own."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
from pathlib import Path


def on_terminal(words: list[str], folder: Path, columns: int = 80, ctrl_c_after: str | None = None) -> list[str]:
    """What stands on each line in the end, of all that was written there; Ctrl-C is typed once a word has appeared."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": slave, "stdout": slave, "stderr": slave, "env": env, "cwd": folder}
    process = subprocess.Popen(words, start_new_session=True, preexec_fn=take_terminal, **streams)  # type: ignore
    os.close(slave)
    written = b""
    while True:
        try:
            block = os.read(master, 1 << 16)
        except OSError:  # the terminal has no user any more
            break
        written += block
        if ctrl_c_after and ctrl_c_after.encode() in written:
            os.write(master, b"\x03")
            ctrl_c_after = None
    process.wait()
    os.close(master)
    return [_in_the_end(line) for line in written.decode().replace("\r\n", "\n").split("\n")]


def _in_the_end(line: str) -> str:
    """A line after each carriage return in it: what is written later covers what stood there."""
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()
