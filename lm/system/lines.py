"""JSON Lines in which every line knows its hash. They are added one at a time, and a process may be killed at one."""

import json
from typing import Any, TypeVar

from lm.config.typed import build
from lm.system.files import checksum, unsealed

BROKE_OFF = b" (broken off)"  # stands after the beginning of a line to which others were added later
Kind = TypeVar("Kind")


def sealed_line(content: dict[str, Any]) -> str:
    return json.dumps({**content, "checksum": checksum(content)}) + "\n"


def read_sealed_lines(content: bytes, kind: type[Kind]) -> tuple[list[Kind], list[int]]:
    """The lines of a file, and the numbers of those that are not as they were written.

    A line that broke off because its process was killed is neither. Lines of earlier versions have no checksum, and no
    mark where one broke off.
    """
    found, damaged, lines = list[Kind](), list[int](), content.split(b"\n")
    earlier = b"checksum" not in content
    for number, line in enumerate(lines, 1):
        text = line.removesuffix(BROKE_OFF)
        try:
            read = json.loads(text)
            sealed = isinstance(read, dict) and "checksum" in read
            found.append(build(kind, unsealed(read) if sealed else read))
        except (ValueError, TypeError, RecursionError):
            killed = number == len(lines) or text != line or earlier
            if not (killed and is_beginning(text)):
                damaged.append(number)
    return found, damaged


def is_beginning(text: bytes) -> bool:
    """Whether this may be a line that broke off: printable ASCII, as json writes it, and no object and a rest."""
    if not text.isascii() or not text.decode().isprintable():
        return False
    try:
        json.JSONDecoder().raw_decode(text.decode())
    except ValueError:
        return True
    except RecursionError:
        pass
    return False
