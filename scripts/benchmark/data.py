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
        folder, number = Path(name), count()
        sample = prepare(DataConfig(max_bytes=TEXT, cache_dir=name), TokenizerConfig(vocab_size=2048))
        text = sample.tokenizer.decode(sample.train.tolist())
        rows = [text[start : start + ROW] for start in range(0, len(text), ROW)]
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (folder / "tokenizer.json").write_text(sample.tokenizer.to_json())
        backend, table = sample.tokenizer.backend, datasets.Dataset.from_dict({"text": rows})
        config = DataConfig(source="json", path=str(folder / "rows.jsonl"))
        tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=str(folder / "tokenizer.json"))

        def prepared() -> None:
            prepare(DataConfig(source="json", path=config.path, cache_dir=f"{name}/{next(number)}"), tokenizer)

        def mapped() -> None:
            table.map(
                lambda batch: {"ids": [row.ids for row in backend.encode_batch_fast(batch["text"])]},
                batched=True,
                num_proc=os.cpu_count(),
                remove_columns="text",
                cache_file_name=str(folder / "mapped.arrow"),
                load_from_cache_file=False,
                new_fingerprint="x",
            )

        calls = {
            "lm": prepared,
            "the tokenizer alone": lambda: backend.encode_batch_fast(rows, add_special_tokens=False),
            "datasets.map": mapped,
        }
        n_bytes = len(text.encode())
        for reference, *spent in compare(calls, seconds, at_least=3):
            mine, other = (n_bytes / 1e6 / time for time in spent)
            yield Measurement("data", "text to tokens on disk", mine, "MB/s", reference, other)
