"""Files that may be compressed or lie on a server, and the cells of a column of JSON, CSV and Parquet files.

No type is guessed, which is why `datasets.load_dataset` does not read them: it re-encodes JSON of mixed types, and
takes digits in CSV for numbers.
"""

import csv
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lm.config import UserError
from lm.data.paths import COMPRESSED, is_url, suffix

BLOCK = 1 << 20  # bytes that are read at a time
RANGE = 1 << 22  # bytes that are asked for at a time where a server sends any part of a file
ROWS = 100  # rows of a table that are decoded at a time: they may be books
TIMEOUT = 30.0  # seconds without an answer or a byte


def open_file(file: Path | str, seekable: bool = False) -> IO[bytes]:
    """A local file or one at an address, decompressed as its name says."""
    if isinstance(file, Path) and not str(file).lower().endswith(COMPRESSED):
        return open(file, "rb")
    from fsspec.utils import infer_compression

    filesystem, path = filesystem_of(file)
    is_http = is_url(str(file)) and str(file).startswith("http")  # not every server sends parts of a file
    compression = infer_compression(str(file).partition("?")[0] if is_http else path)
    stream = filesystem.open(path, "rb", block_size=0 if is_http else RANGE, compression=compression)
    if seekable and is_http:
        copy = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
        shutil.copyfileobj(stream, copy, BLOCK)
        return copy
    return stream if seekable else io.BufferedReader(stream, BLOCK)


def filesystem_of(file: Path | str) -> tuple[Any, str]:
    import aiohttp
    import fsspec
    import pyarrow as pa

    zstd = fsspec.compression.compr.get("zstd") or (lambda raw, **_: pa.CompressedInputStream(raw, "zstd"))
    fsspec.compression.register_compression("zstd", zstd, "zst", force=True)
    if not (is_url(str(file)) and str(file).startswith("http")):
        return fsspec.url_to_fs(str(file))
    timeout = aiohttp.ClientTimeout(None, sock_connect=TIMEOUT, sock_read=TIMEOUT)  # the default ends long downloads
    return fsspec.url_to_fs(file, client_kwargs={"timeout": timeout})


@contextmanager
def reading_from(place: str, kind: str) -> Iterator[None]:
    """Turn what a reader raises into a UserError that names the place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cure = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        reason = getattr(error, "strerror", None) or first_line(error.__cause__ or error)
        raise UserError(f"{place}: cannot be read as {kind} ({reason}){cure}") from error


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def documents_of(cells: Iterable[Any], column: str) -> Iterator[tuple[str, list[bytes]]]:
    """A document from each cell, empty if the cell is null. Raises UserError for any other that is no string."""
    for number, cell in enumerate(cells):
        if cell is not None and not isinstance(cell, str):
            raise UserError(f"data.column={column}: row {number} holds {cell!s:.40}, not a string")
        try:
            yield f"row {number}", [(cell or "").encode()]
        except UnicodeEncodeError as error:
            raise UserError(f"data.column={column}: row {number} holds half a character ({error.reason})") from error


def _check_column(column: str | None, columns: Iterable[str]) -> None:
    if column is not None and (n := [*columns].count(column)) != 1:
        what = "the columns are" if n == 0 else f"{n} columns have this name:"
        raise UserError(f"data.column={column}: {what} {', '.join(columns):.200}")


def _json_rows(file: Path | str, column: str | None) -> Iterator[Any]:
    """From a list of objects, or from an object in each line (JSON Lines)."""
    with open_file(file) as content:
        is_list = content.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")  # type: ignore[attr-defined]
        if is_list:
            yield from json.load(content)
            return
        for number, line in enumerate(content, 1):
            try:
                if line.strip():
                    yield json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{file}: line {number} is not JSON ({error.msg})") from error


def _csv_rows(file: Path | str, column: str | None) -> Iterator[dict[str, str]]:
    """Every cell is text as it stands: `NA`, digits and dates too. Blank lines are no rows.

    A row has as many cells as the header, and empty ones at its end if every row has them. Raises UserError.
    """
    csv.field_size_limit(sys.maxsize)  # a cell may be a book
    columns, number, line, n_cells = list[str](), 0, 1, 0  # the next row, where it begins, how many cells each has
    with open_file(file) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True, delimiter="\t" if suffix(file) == ".tsv" else ",")
        try:
            for cells in reader:
                is_blank = not cells or (len(cells) == 1 != len(columns) and not cells[0].strip())
                if not columns and not is_blank:
                    columns = cells
                    if len(cells) == 1 and ";" in cells[0]:
                        raise UserError(f"{file}: its cells end in semicolons; expected commas, or tabs in a .tsv file")
                    _check_column(column, columns)
                elif not is_blank:
                    if number == 0:
                        n_cells = max(len(columns), len(cells))
                    is_longer = any(cells[len(columns) :])
                    if is_longer or len(cells) != n_cells:
                        what = f"expected {len(columns) if is_longer else n_cells} cells, found {len(cells)}"
                        advice = "quote a text that holds a comma or a line break"
                        raise UserError(f"{file}: row {number} (line {line}): {what}; {advice}")
                    yield dict(zip(columns, cells, strict=False))
                    number += 1
                line = reader.line_num + 1
        except csv.Error as error:
            advice = "a quoted cell ends in a quote, and a quote inside it is doubled"
            raise UserError(f"{file}: row {number} (line {line}): not CSV ({error}); {advice}") from error
    if not columns:
        raise UserError(f"{file}: is empty; expected a line with the names of the columns")


def _parquet_rows(file: Path | str, column: str | None) -> Iterator[dict[str, Any]]:
    """Of columns that are not asked for, nothing is read. Threads of Arrow would keep Ctrl-C from being heard."""
    from pyarrow.parquet import ParquetFile

    with open_file(file, seekable=True) as content, ParquetFile(content, pre_buffer=False, buffer_size=BLOCK) as table:
        _check_column(column, table.schema_arrow.names)
        chosen = None if column is None else [column]
        for batch in table.iter_batches(ROWS, columns=chosen, use_threads=False):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path | str, str | None], Iterator[dict[str, Any]]]] = {
    "json": _json_rows,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
}


def cells_in(file: Path | str, kind: str, column: str) -> Iterator[Any]:
    """The cells of a column of a file. Raises UserError for a file without it."""
    return cells_of(READERS[kind](file, column), column)


def cells_of(rows: Iterable[dict[str, Any]], column: str) -> Iterator[Any]:
    """The cells of a column of objects: the first must have it; in others it may be missing, as if it were null."""
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"data.column={column}: row {number} is no object, which has columns")
        if number == 0:
            _check_column(column, row)
        yield row.get(column)


def columns_of(file: Path, kind: str) -> list[str]:
    """The columns of strings of a local table, that of most letters in the first row first. Raises UserError."""
    with reading_from(str(file), kind):
        if kind == "parquet":
            from pyarrow.parquet import read_schema

            with open_file(file, seekable=True) as content:
                first: Any = {field.name: "" for field in read_schema(content) if "string" in str(field.type)}
        else:
            first = next(READERS[kind](file, None), None)
    cells = first.items() if isinstance(first, dict) else ()
    texts = {key: value or "" for key, value in cells if value is None or isinstance(value, str)}
    if not texts:
        raise UserError(f"{file}: its first row has no text; expected a column of strings, a document in each row")
    return sorted(texts, key=lambda key: -sum(map(str.isalpha, texts[key])))
