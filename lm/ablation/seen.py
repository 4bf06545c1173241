"""The verdicts that were seen, in verdicts.jsonl: a line for each, written by whatever shows one, also during runs.

ablate.py, which alone writes ablation.json, takes them over into it.
"""

import contextlib
import os
from dataclasses import asdict
from pathlib import Path

from lm.ablation.record import AblationRecord, look
from lm.config.ablation import Look
from lm.system.files import hash_of, read_regular
from lm.system.lines import BROKE_OFF, read_sealed_lines, sealed_line

FILE = "verdicts.jsonl"


def verdicts_seen(folder: Path, record: AblationRecord) -> list[Look]:
    """What was asked whenever a verdict was seen, each once."""
    found = [*record.verdicts_seen, *written(folder)[0]]
    return [*{hash_of(asdict(one)): one for one in found}.values()]


def remember(folder: Path, record: AblationRecord, seeds: list[int]) -> None:
    """That a verdict on these seeds is shown; one seed gives none. A folder that may only be read stays as it is."""
    now = look(record, seeds)
    if len(seeds) > 1 and now not in verdicts_seen(folder, record):
        with contextlib.suppress(OSError), open(folder / FILE, "a+b", buffering=0, opener=no_link) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            end = b"" if file.read(1) in (b"", b"\n") else BROKE_OFF + b"\n"
            file.write(end + sealed_line(asdict(now)).encode())  # at once, beside those of other processes


def no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def written(folder: Path) -> tuple[list[Look], list[int]]:
    """The lines, and the numbers of those that are not as they were written, which say nothing of the others."""
    try:
        return read_sealed_lines(read_regular(folder / FILE), Look)
    except FileNotFoundError:
        return [], []
