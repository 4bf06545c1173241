"""Documents from a column of JSON, CSV and Parquet files, read in small parts by the `datasets` library."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.config import BadInput
from lm.data.documents import Document, Files, first_line

ROWS = 1000  # that are taken out of the library at a time


class Rows(Files):
    """A document from each row of a column. Raises BadInput for files and rows that hold no such text."""

    def __init__(self, kind: str, path: str, files: dict[str, Path], column: str) -> None:
        super().__init__(files)
        self.kind, self.path, self.column = kind, path, column

    def documents(self) -> Iterator[Document]:
        names = [glob.escape(str(file)) for file in self.files.values()]
        try:
            options = self.only_the_column() if self.kind == "parquet" else {}
            rows = quiet_datasets().load_dataset(self.kind, data_files=names, split="train", streaming=True, **options)
            yield from column_documents(rows, self.column)
        except BadInput:
            raise
        except Exception as error:
            reason = first_line(error.__cause__ or error)
            raise BadInput(f"data.path={self.path}: cannot be read as {self.kind} ({reason})") from error

    def only_the_column(self) -> dict[str, Any]:
        import pyarrow.parquet

        known = pyarrow.parquet.read_schema(next(iter(self.files.values()))).names
        check_column(self.column, known)
        return {"columns": [self.column], "batch_size": ROWS}


def check_column(column: str, known: list[str]) -> None:
    if column not in known:
        raise BadInput(f"data.column={column}: the columns are {', '.join(known)}")


def column_documents(rows: Any, column: str) -> Iterator[Document]:
    """A document from each row of a streamed data set (datasets.IterableDataset)."""
    import pyarrow as pa

    number = 0
    for batch in rows.with_format("arrow").iter(ROWS):
        check_column(column, batch.column_names)
        texts = batch.column(column)
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)) or texts.null_count:
            one = next(one for one in enumerate(texts.to_pylist(), number) if not isinstance(one[1], str))
            raise BadInput(f"data.column={column}: row {one[0]} holds {one[1]!r}, not a string")
        for text in texts.cast(pa.large_binary()).to_pylist():
            yield Document(f"row {number}", len(text), (text,))
            number += 1


def quiet_datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets
