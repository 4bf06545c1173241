"""Text to token ids: this project's streaming beside the tokenizer alone and beside `datasets.map`.

All encode the same rows of the standard library with the same BPE tokenizer on all cores. The tokenizer alone has the
rows in memory and drops what it finds; `datasets.map` starts as many processes as there are cores, and writes a file.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.benchmark.measure import Measurement, alternate, paired
from lm.config import DataConfig
from lm.data.encoding import chunks, decoded, encode
from lm.data.sources import open_source
from lm.data.text import read
from lm.data.vocabulary import train_bpe

TEXT, ROW = 4_000_000, 1_000  # bytes of the text; characters of a row, as in a corpus of short texts


def data(device: str, seconds: float) -> Iterator[Measurement]:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        whole = read(open_source(DataConfig(cache_dir=folder)), Path(folder, "whole"), max_bytes=TEXT).whole()
        text = "".join(chunk for chunk, _ in chunks(decoded(whole)))
        rows, path = [text[i : i + ROW] for i in range(0, len(text), ROW)], Path(folder, "rows.txt")
        tokenizer = train_bpe([text[: len(text) // 4]], 2048)
        datasets.Dataset.from_dict({"text": rows}).to_json(path)
        config = DataConfig(source="json", path=str(path.rename(path.with_suffix(".jsonl"))), cache_dir=folder)
        part, table = (
            read(open_source(config), Path(folder, "text")).whole(),
            datasets.Dataset.from_dict({"text": rows}),
        )

        def ours() -> None:
            with open(Path(folder, "ids.bin"), "wb") as file:
                for ids in encode(tokenizer, part):
                    file.write(ids.data)

        def mapped(batch: dict[str, list[str]]) -> dict[str, Any]:
            return {"ids": tokenizer.encode_all(batch["text"])}

        def theirs() -> None:
            cache = str(Path(folder, "mapped.arrow"))
            table.map(
                mapped,
                batched=True,
                num_proc=os.cpu_count(),
                remove_columns="text",
                cache_file_name=cache,
                load_from_cache_file=False,
                new_fingerprint="x",
            )

        calls = {
            "ours": ours,
            "encode_batch_fast": lambda: tokenizer.backend.encode_batch_fast(rows, add_special_tokens=False),
            "datasets.map": theirs,
        }
        times, n_bytes = alternate(calls, seconds, at_least=3), part.n_bytes
    for reference in list(calls)[1:]:
        one, other = (n_bytes / 1e6 / found for found in paired(times["ours"], times[reference]))
        yield Measurement("data", "encoding of text", one, "MB/s", reference, other)
