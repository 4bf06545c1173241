"""Text to tokens on disk, beside the tokenizer alone and beside `datasets.map`, on all cores.

All encode the same rows of the standard library with the same BPE tokenizer. The tokenizer alone has the rows in
memory and drops what it finds; `datasets.map` starts as many processes as there are cores, and writes a file.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from lm.config import DataConfig, TokenizerConfig
from lm.data.tokens import prepare

from .measure import Measurement, compare

TEXT, ROW = 4_000_000, 1_000  # bytes of the text; characters of a row, as in a corpus of short texts


def data(device: str, seconds: float) -> Iterator[Measurement]:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        path, tokenizer_path, number = Path(name, "rows.jsonl"), Path(name, "tokenizer.json"), count()
        sample = prepare(DataConfig(max_bytes=TEXT, cache_dir=name), TokenizerConfig(vocab_size=2048))
        text = sample.tokenizer.decode(sample.train.tolist())
        rows = [text[start : start + ROW] for start in range(0, len(text), ROW)]
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        tokenizer_path.write_text(sample.tokenizer.to_json())
        tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=str(tokenizer_path))
        backend, table = sample.tokenizer.backend, datasets.Dataset.from_dict({"text": rows})

        def prepared() -> None:
            prepare(DataConfig(source="json", path=str(path), cache_dir=f"{name}/{next(number)}"), tokenizer)

        def mapped() -> None:
            options = {"cache_file_name": f"{name}/mapped.arrow", "load_from_cache_file": False, "new_fingerprint": "x"}
            table.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns="text", **options)

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            return {"ids": [row.ids for row in backend.encode_batch_fast(batch["text"])]}

        alone = {"the tokenizer alone": lambda: backend.encode_batch_fast(rows, add_special_tokens=False)}
        for reference, *times in compare({"lm": prepared, **alone, "datasets.map": mapped}, seconds, at_least=3):
            mine, other = (len(text.encode()) / 1e6 / time for time in times)
            yield Measurement("data", "text to tokens on disk", mine, "MB/s", reference, other)
