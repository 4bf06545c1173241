"""Growth: memory of a long run, and time and memory with 10,000 runs, a line of 20 MB and 100,000 files.

Each is measured in a process of its own. Time is CPU time of all threads, on which other load has little influence;
memory is the peak less what the process held before. Beside it stands the same with less of what grows.
"""

import json
import multiprocessing
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from lm.benchmark.measure import Measurement
from lm.benchmark.memory import resident
from lm.benchmark.trainer import very_small
from lm.config import CheckpointConfig, DataConfig, TokenizerConfig, ValidationConfig
from lm.data.sources import RACY
from lm.data.tokens import prepare
from lm.runs.find import find_runs
from lm.runs.listing import listing
from lm.training.callbacks import LogAndValidate
from lm.training.train import train

STEPS, LIMIT = (1_000, 11_000), 100  # bytes a step between them
RUNS, LINE, FILES, FILE = 10_000, 20_000_000, 100_000, 50  # bytes of the line, and of a file
BYTES, BPE = TokenizerConfig(kind="byte", vocab_size=None), TokenizerConfig(vocab_size=1024)
TEXTS = {"bytes of a text": (BYTES, "txt"), "BPE of a text": (BPE, "txt"), "bytes of JSON": (BYTES, "jsonl")}
LINES = ("one line", "no spaces")  # of LINE bytes


def growth(device: str, seconds: float) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        held, _ = alone(long_run, folder, device)
        (before, after), steps = (held[step] for step in STEPS), STEPS[1] - STEPS[0]
        yield Measurement("growth", "memory, step 1,000 to 11,000", (after - before) / steps, "B/step", "limit", LIMIT)
        few, many = (of_runs(Path(folder, str(n)), Path(folder, "run"), n) for n in (RUNS // 10, RUNS))
        yield from rows(f"list of {RUNS:,} runs", many, f"{RUNS // 10:,} runs", few)
        text = words(LINE)
        write(folder, "one line", text)
        write(folder, "no spaces", text.replace(" ", "x"))
        write(folder, "lines of 80", "\n".join(text[at : at + 80] for at in range(0, LINE, 80)))
        for name, (tokenizer, suffix) in TEXTS.items():
            more, *ones = (alone(read, folder, f"{of}.{suffix}", tokenizer)[1] for of in ("lines of 80", *LINES))
            for line, one in zip(LINES, ones, strict=True):
                yield from rows(f"{name}, {line}", one, "lines of 80", more)
        write(folder, "one file", text[: FILES * FILE])
        for i in range(FILES):
            path = Path(folder, "files", str(i // 1000), f"{i}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[i * FILE : (i + 1) * FILE])
        time.sleep(RACY / 1e9)
        for which in ("first", "second"):
            many, one = (alone(read, folder, of, BYTES)[1] for of in ("files", "one file.txt"))
            yield from rows(f"{FILES:,} files, {which} start", many, "one file", one)


def rows(name: str, this: tuple[float, int], reference: str, its: tuple[float, int]) -> Iterator[Measurement]:
    yield Measurement("growth", f"time, {name}", this[0], "CPU s", reference, its[0])
    yield Measurement("growth", f"memory, {name}", this[1] / 1e6, "MB", reference, its[1] / 1e6)


def alone(work: Callable[..., Any], *given: Any) -> tuple[Any, tuple[float, int]]:
    """What a call returns in a process of its own, and its CPU seconds and peak bytes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (work, *given))


def measured(work: Callable[..., Any], *given: Any) -> tuple[Any, tuple[float, int]]:
    before, started = resident(), time.process_time()
    found = work(*given)
    return found, (time.process_time() - started, resident() - before)


def long_run(folder: str, device: str) -> dict[int, int]:
    """The bytes that the process holds after each of STEPS."""
    run = very_small(folder, device)
    held: dict[int, int] = {}
    log_row = LogAndValidate.log_row

    def noting(self: LogAndValidate, trainer: Any, metrics: dict[str, float]) -> None:
        log_row(self, trainer, metrics)
        if trainer.global_step in STEPS:
            held[trainer.global_step] = resident("VmRSS")

    LogAndValidate.log_row = noting  # type: ignore[method-assign]
    often = replace(run, checkpoint=CheckpointConfig(every=500), validation=ValidationConfig(every=100, batches=1))
    train(replace(often, trainer=replace(run.trainer, max_steps=STEPS[1] + 1), run_dir=f"{folder}/run"))
    return held


def of_runs(folder: Path, run: Path, n: int) -> tuple[float, int]:
    for i in range(n):
        (folder / f"run{i}").mkdir(parents=True)
        for name in ("config.yaml", "result.json"):
            shutil.copy(run / name, folder / f"run{i}")
    _, found = alone(list_runs, folder)
    return found


def list_runs(folder: Path) -> str:
    return listing(found := find_runs(folder), len(found))


def words(size: int) -> str:
    chosen = random.Random(0)
    known = ["".join(chosen.choices(ascii_lowercase, k=chosen.randint(2, 9))) for _ in range(20_000)]
    return " ".join(chosen.choices(known, k=size // 3))[:size]


def write(folder: str, name: str, text: str) -> None:
    Path(folder, f"{name}.txt").write_text(text)
    lines = (json.dumps({"text": line}) + "\n" for line in text.splitlines())
    Path(folder, f"{name}.jsonl").write_text("".join(lines))


def read(folder: str, name: str, tokenizer: TokenizerConfig) -> None:
    source = "json" if name.endswith(".jsonl") else "text"
    prepare(DataConfig(source=source, path=f"{folder}/{name}", cache_dir=f"{folder}/cache"), tokenizer)
