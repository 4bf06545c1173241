"""The verdicts that were seen, in verdicts.jsonl: a line for each, written by whatever shows one, also during runs.

ablate.py, which alone writes ablation.json, takes them over into it.
"""

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from lm.ablation.record import AblationRecord, look
from lm.config.ablation import Look
from lm.config.checks import reading
from lm.config.typed import build
from lm.system.files import json_sha256, read_json_lines

FILE = "verdicts.jsonl"


def verdicts_seen(folder: Path, record: AblationRecord) -> list[Look]:
    """What was asked whenever a verdict was seen, each once."""
    found = [*record.verdicts_seen, *written(folder)]
    return [*{json_sha256(asdict(one)): one for one in found}.values()]


def remember(folder: Path, record: AblationRecord, seeds: list[int]) -> None:
    """That a verdict on these seeds is shown; one seed gives none. A folder that may only be read stays as it is."""
    now = look(record, seeds)
    if len(seeds) > 1 and now not in verdicts_seen(folder, record):
        with contextlib.suppress(OSError), open(folder / FILE, "a+b", buffering=0) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            begin = "" if file.read(1) in (b"", b"\n") else "\n"  # after a line that broke off
            file.write(f"{begin}{json.dumps(asdict(now))}\n".encode())  # at once, beside those of other processes


def written(folder: Path) -> list[Look]:
    """Raises UserError naming the file."""
    try:
        with reading(folder / FILE):
            return [build(Look, row) for row in read_json_lines(folder / FILE)]
    except FileNotFoundError:
        return []
