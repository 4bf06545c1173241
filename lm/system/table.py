"""Tables in a terminal and as CSV, in which text from outside can do no harm."""

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as aligned columns."""
    shown = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)


def csv_text(first: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """With these columns first, then every other that a row has; what a row does not have is empty."""
    buffer, columns = io.StringIO(), dict.fromkeys(map(harmless, [*first, *(key for row in rows for key in row)]))
    writer = csv.DictWriter(buffer, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({harmless(key): harmless_cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def harmless_cell(value: Any) -> Any:
    """A number stays as it is, also one that was read from a CSV file."""
    with suppress(TypeError, ValueError):
        float(value)
        return value
    return harmless(value) if isinstance(value, str) else value


def harmless(text: str) -> str:
    """The cell of a CSV file that no spreadsheet takes for a formula and that does not steer a terminal.

    >>> harmless("=1+1"), harmless("a=b")
    ("'=1+1", 'a=b')
    """
    return visible(f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text)


def visible(text: str) -> str:
    """The text with what would steer a terminal written as an escape.

    >>> visible("a" + chr(27) + "[31m" + chr(13))
    'a\\\\x1b[31m\\\\r'
    """
    if text.isprintable():  # nearly always, and a table of many runs has many cells
        return text
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def lines_visible(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(visible, text.split("\n")))


def spelled(value: Any) -> str:
    """A value as it is typed on a command line.

    >>> spelled([0.9, 0.95]), spelled(True), spelled(None)
    ('[0.9,0.95]', 'true', 'null')
    """
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
