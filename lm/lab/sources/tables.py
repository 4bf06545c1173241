"""The cells of a column of JSON, CSV and Parquet files.

No type is guessed, which is why `datasets.load_dataset` does not read them: it re-encodes JSON of mixed types, and
takes digits in CSV for numbers.
"""

import csv
import io
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm.config import DataConfig
from lm.data.paths import BLOCK, extension, is_url, reading_from
from lm.data.sources import Documents, Files, state_of
from lm.errors import UserError, error_prefix
from lm.lab.sources.addresses import open_anywhere

log = logging.getLogger(__name__)
ROWS = 100  # rows of a table that are decoded at a time: they may be books
Rows = Iterator[dict[str, Any]]


class Table:
    """A document from each row of a column of files, one after the other. Names of files are no part of the text."""

    def __init__(self, config: DataConfig, place: str, files: Files) -> None:
        self.config, self.place, self.files = config, place, files

    def state(self) -> str:
        # The extension decides how a file is read; its name is no part of the text.
        return state_of({f"{number}{extension(file)}": file for number, file in enumerate(self.files.values())})

    def documents(self) -> Documents:
        kind, number = self.config.source, itertools.count()
        for file in self.files.values():
            place = self.place if is_url(self.place) else str(file)
            with reading_from(place, kind), error_prefix(place):
                for _, document in documents_of(cells_in(file, kind, self.config.column), self.config):
                    yield f"row {next(number)}", document


def documents_of(cells: Iterable[Any], config: DataConfig) -> Documents:
    """Yield a document for each cell, empty if the cell is null. With data.rows=lines a row ends in a line break.

    Bytes are read as UTF-8, because some writers of Parquet store strings as bytes. Raises UserError for a cell that is
    no text.
    """
    for number, cell in enumerate(cells):
        place = f"data.column={config.column}: row {number} holds"
        if not isinstance(cell, str | bytes | None):
            raise UserError(f"{place} {cell!s:.40}, not a string")
        try:
            text = cell.decode() if isinstance(cell, bytes) else cell or ""
            if "\0" in text:  # it would stand between two documents for the n-gram model
                raise UserError(f"{place} a character of zero")
            line_end = "\n" if config.rows == "lines" and text and not text.endswith("\n") else ""
            yield f"row {number}", [(text + line_end).encode()]
        except UnicodeDecodeError as error:
            raise UserError(f"{place} bytes that are not UTF-8 ({error.reason})") from error
        except UnicodeEncodeError as error:
            raise UserError(f"{place} half a character ({error.reason})") from error


def cells_in(file: Path | str, kind: str, column: str) -> Iterator[Any]:
    """Yield the cells of a column of a file. Raises UserError for a file without the column."""
    return cells_of(READERS[kind](file, column), column)


def cells_of(rows: Iterable[dict[str, Any]], column: str) -> Iterator[Any]:
    """Yield the cells of a column of objects. The first must have the column; in others a cell may be missing."""
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"data.column={column}: row {number} is no object, which has columns")
        if number == 0:
            _check_column(column, row)
        yield row.get(column)


def _check_column(column: str, columns: Iterable[str]) -> None:
    if (n := [*columns].count(column)) != 1:
        what = "no such column; choose one of" if n == 0 else f"{n} columns have this name:"
        raise UserError(f"data.column={column}: {what} {', '.join(columns):.200}")


def _json_rows(file: Path | str, column: str) -> Rows:
    """Yield the objects of a list, or the object in each line (JSON Lines)."""
    with open_anywhere(file) as content:
        is_list = content.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")  # type: ignore[attr-defined]
        lines = io.TextIOWrapper(content, "utf-8-sig", newline="\n")
        if is_list:
            yield from json.load(lines, object_pairs_hook=_object)
            return
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield json.loads(line, object_pairs_hook=_object)
            except json.JSONDecodeError as error:
                expected = "expected an object in each line, or a list of objects"
                raise UserError(f"line {number} is not JSON ({error.msg}); {expected}") from error
            except ValueError as error:
                raise UserError(f"line {number}: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a key that is there twice: nothing says which value counts."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key in content if sum(key == name for name, _ in pairs) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return content


def _csv_rows(file: Path | str, column: str) -> Rows:
    """Yield rows in which every cell is text as it stands: `NA`, digits and dates too. Blank lines are no rows.

    In a .tsv file a quote is a character as any other, as text/tab-separated-values has it. A row has as many cells as
    the header, and maybe empty ones at its end. Raises UserError.
    """
    csv.field_size_limit(sys.maxsize)  # a cell may be a book
    n_long, n_like_rows = 0, 0  # cells of several lines, and those whose lines have as many cells as a row
    n_quoted = 0  # cells of a .tsv file that another program has quoted
    is_tsv, line = extension(file) == ".tsv", 1  # at which the next row begins
    dialect: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    with open_anywhere(file) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True, **dialect)
        try:
            if not (columns := rows.fieldnames):
                raise UserError("is empty; expected a line with the names of the columns")
            if len(columns) == 1 and ";" in columns[0]:
                raise UserError("its cells end in semicolons; expected commas, or tabs in a .tsv file")
            _check_column(column, columns)
            line = rows.line_num + 1
            for row in rows:
                if None in row.values() or any(row.get(None) or ()):  # fewer cells, or more
                    advice = "quote a text that holds a comma or a line break"
                    advice = "a cell holds no tab and no line break" if is_tsv else advice
                    raise UserError(f"line {line}: expected {len(columns)} cells; {advice}")
                _, *further = row[column].split("\n")
                n_long += bool(further)
                n_like_rows += bool(further) and _are_rows(further, columns, column)
                n_quoted += is_tsv and _is_quoted(row[column])
                yield row
                line = rows.line_num + 1
        except csv.Error as error:
            advice = "a quoted cell ends in a quote, and a quote inside it is doubled"
            raise UserError(f"line {line}: not CSV ({error}); {advice}") from error
    if n_like_rows and n_like_rows == n_long:
        advice = "if a quotation has joined rows, double each quote inside a cell"
        log.warning("%s: all %d cells of several lines in column %s look like rows; %s", file, n_long, column, advice)
    if n_quoted:
        advice = "their quotes are read as text: write a .tsv file with quoting=csv.QUOTE_NONE"
        log.warning("%s: %d cells in column %s are quoted; %s", file, n_quoted, column, advice)


def _is_quoted(cell: str) -> bool:
    """Return whether a cell stands in quotes, and each quote inside of the cell is doubled."""
    inside = cell[1:-1]
    return cell[:1] == cell[-1:] == '"' and '""' in inside and '"' not in inside.replace('""', "")


def _are_rows(lines: list[str], columns: Sequence[str], column: str) -> bool:
    """Return whether the lines of a cell after the first look like rows that a quote has joined to one cell."""
    commas = len(columns) - 1
    n_before = columns.index(column)  # commas of the last line, which ends where the cell ends
    return commas > 0 and [line.count(",") for line in lines] == [commas] * (len(lines) - 1) + [n_before]


def _parquet_rows(file: Path | str, column: str) -> Rows:
    """Yield rows of one column, and read no other column. Threads of Arrow would keep Ctrl-C from being heard."""
    from pyarrow.parquet import ParquetFile

    with open_anywhere(file) as content, ParquetFile(content, pre_buffer=False, buffer_size=BLOCK) as table:
        _check_column(column, table.schema_arrow.names)
        for batch in table.iter_batches(ROWS, columns=[column], use_threads=False):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path | str, str], Rows]] = {"json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
