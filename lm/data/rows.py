"""Documents from a column of JSON, CSV and Parquet files, read in small parts by the `datasets` library."""

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from lm.config import UserError
from lm.data.documents import Document, Files, first_line

ROWS = 1000  # that are taken out of the library at a time
FEW = 100  # rows of a Parquet file that are decoded at a time: they may be books
BUFFER = 1 << 20  # bytes of a Parquet file that are read at a time


class Rows(Files):
    """A document from each row of a column. Raises UserError for files and rows that hold no such text."""

    def __init__(self, kind: str, path: str, files: dict[str, Path], column: str) -> None:
        super().__init__(files)
        self.kind, self.path, self.column = kind, path, column

    def documents(self) -> Iterator[Document]:
        try:
            if self.kind == "parquet":
                batches = parquet_batches((file.open("rb") for file in self.files.values()), self.column)
            else:
                names = [glob.escape(str(file)) for file in self.files.values()]
                rows = quiet_datasets().load_dataset(self.kind, data_files=names, split="train", streaming=True)
                batches = rows.with_format("arrow").iter(ROWS)
            yield from column_documents(batches, self.column)
        except UserError:
            raise
        except Exception as error:
            reason = first_line(error.__cause__ or error)
            raise UserError(f"data.path={self.path}: cannot be read as {self.kind} ({reason})") from error


def check_column(column: str, known: list[str]) -> None:
    if column not in known:
        raise UserError(f"data.column={column}: the columns are {', '.join(known)}")


def parquet_batches(files: Iterable[IO[bytes]], column: str) -> Iterator[Any]:
    """A column of open Parquet files, which are closed; of the other columns nothing is read.

    `datasets` reads in threads of Arrow, where Ctrl-C does not reach a download that is slow or has stalled.
    """
    import pyarrow.parquet

    for file in files:
        with file, pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER) as table:
            check_column(column, table.schema_arrow.names)
            yield from table.iter_batches(FEW, columns=[column], use_threads=False)


def column_documents(batches: Iterable[Any], column: str) -> Iterator[Document]:
    """A document from each row of Arrow tables or record batches."""
    import pyarrow as pa

    number = 0
    for batch in batches:
        check_column(column, batch.column_names)
        texts = batch.column(column)
        kind = texts.type.value_type if pa.types.is_dictionary(texts.type) else texts.type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid as error:  # bytes of a file that was written by something else, or is damaged
            rows = f"rows {number} to {number + len(texts) - 1}"
            raise UserError(f"data.column={column}: not UTF-8 in {rows} ({first_line(error)})") from error
        if not is_text or texts.null_count:
            one = next(one for one in enumerate(texts.to_pylist(), number) if not isinstance(one[1], str))
            raise UserError(f"data.column={column}: row {one[0]} holds {one[1]!r}, not a string")
        for text in texts.cast(pa.large_binary()).to_pylist():
            yield Document(f"row {number}", len(text), (text,))
            number += 1


def quiet_datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each call, also for local files, is reported to its makers
    return datasets
