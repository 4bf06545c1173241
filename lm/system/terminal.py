"""Text for a terminal: tables, values as a user types them, and nothing that would steer the terminal.

`is_first_process` says which of several processes prints.
"""

import logging
import os
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from tqdm import tqdm

from lm.errors import without_secrets

# Format characters that show a text in another order, or hide it: embeddings, overrides, isolates, tags.
STEERING = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equal length as aligned columns."""
    shown = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)


def printable(text: str) -> str:
    """Return the text with an escape for each character that would steer a terminal. Tabs and line breaks stay.

    Spaces and joiners that are letters of a language, such as the ideographic space, stay too.

    >>> printable("a" + chr(27) + "[31m" + chr(13))
    'a\\\\x1b[31m\\\\r'
    """
    if text.isprintable():  # nearly always, and a table of many runs has many cells
        return text
    return "".join(c if _is_harmless(c) else c.encode("unicode_escape").decode() for c in text)


def _is_harmless(character: str) -> bool:
    if character.isprintable() or character in "\t\n":
        return True
    kind = unicodedata.category(character)
    return kind == "Zs" or (kind == "Cf" and not STEERING.match(character))


class MessageHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler of messages with names and addresses from outside.

    A name must not steer a terminal, and an address may give access. On a terminal, the handler wraps messages between
    words and prints them above a progress bar, if there is a bar.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = without_secrets(printable(super().format(record)))
        return wrapped(text) if self.stream.isatty() else text

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream) if open_bars() else nullcontext():
            super().emit(record)


def wrapped(text: str, first: str = "", rest: str = "", whole: bool = True) -> str:
    """Return each line of a text as lines that fit the terminal, or 80 columns if its width is unknown.

    `first` stands before the first of these lines, `rest` before each further line. With `whole`, longer words stay
    whole, so that a user can copy a path or a command.
    """
    width = shutil.get_terminal_size().columns - 1
    wrapper = textwrap.TextWrapper(width, first, rest, break_long_words=not whole, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.split("\n")))


def open_bars() -> list[Any]:
    return [*getattr(tqdm, "_instances", ())]  # tqdm has no public name for them


def close_bars() -> None:
    """Close the progress bars that an error has left open: the next print would stand on the line of a bar."""
    for bar in open_bars():
        bar.close()


def to_override_value(value: Any) -> str:
    """Return a value as a user types it on a command line.

    >>> to_override_value([0.9, 0.95]), to_override_value(True), to_override_value(None)
    ('[0.9,0.95]', 'true', 'null')
    """
    if isinstance(value, list):
        return f"[{','.join(map(to_override_value, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def duration(seconds: float) -> str:
    """Return a length of time as a person would say it.

    >>> duration(40), duration(400), duration(40000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def is_first_process(world_size: int | None = None) -> bool:
    """Return whether this process has the global rank 0 by torchrun, Lightning or Slurm. Only rank 0 writes files.

    With `world_size` 1 this process is the only process of its run, whatever number a launcher of many runs gave it.
    """
    if world_size == 1:
        return True
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
    return rank == os.environ.get("NODE_RANK", "0") == "0"
