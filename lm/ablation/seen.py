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
from lm.config.typed import build
from lm.system.files import read_regular

FILE = "verdicts.jsonl"


def verdicts_seen(folder: Path, record: AblationRecord) -> list[Look]:
    """What was asked whenever a verdict was seen, each once."""
    found = [*record.verdicts_seen, *written(folder)]
    return [one for i, one in enumerate(found) if one not in found[:i]]


def remember(folder: Path, record: AblationRecord, seeds: list[int]) -> None:
    """That a verdict on these seeds is shown; one seed gives none. A folder that may only be read stays as it is."""
    now = look(record, seeds)
    if len(seeds) > 1 and now not in verdicts_seen(folder, record):
        with contextlib.suppress(OSError), open(folder / FILE, "a+b", buffering=0, opener=no_link) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            end = b"" if file.read(1) in (b"", b"\n") else b"\n"  # a line that broke off ends here
            file.write(end + f"{json.dumps(asdict(now))}\n".encode())  # at once, beside those of other processes


def no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def written(folder: Path) -> list[Look]:
    try:
        lines = read_regular(folder / FILE).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        # one that is damaged says nothing of the others
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            found.append(build(Look, json.loads(line)))
    return found
