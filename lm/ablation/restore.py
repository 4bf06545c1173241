"""Runs of which only their row in results.csv is left: under version control a study keeps its rows, not its models."""

import csv
import json
import logging
import re
from pathlib import Path
from typing import Any

from lm.ablation.workers import Place
from lm.config import BadInput
from lm.files import write_text

WHOLE = ("n_params", "flops_per_token", "steps", "tokens", "threads")
REAL = ("val_loss", "val_bpb", "val_top1", "seconds", "tokens_per_second")
WORDS = ("config_hash", "data_hash", "tokenizer_hash", "device", "precision", "python")
LOST = ("status", "error")
PLACE = r"(cells|trials)/[\w-][\w.-]*"
log = logging.getLogger(__name__)


def restore(path: Path) -> None:
    """Where no run has a directory, give those of results.csv that came to an end what they had ended with.

    A directory's name ends in the hash of all that decides its run, so a row serves the same run and no other.
    Raises BadInput if the file is not what a report has written.
    """
    if any((path / folder).exists() for folder in ("cells", "trials")):
        return
    try:
        with open(path / "results.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if re.fullmatch(PLACE, row["run_dir"])]
        done = {row["run_dir"]: result(row) for row in rows if row["status"] == "done"}
        lost = {
            row["run_dir"]: {key: row[key] for key in LOST} for row in rows if row["status"] in ("failed", "diverged")
        }
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise BadInput(f"{path / 'results.csv'}: not what a report has written ({error!r}); remove it") from error
    for run_dir, found in done.items():
        (path / run_dir).mkdir(parents=True, exist_ok=True)
        write_text(path / run_dir / "result.json", json.dumps(found, indent=1) + "\n")
    for run_dir, found in lost.items():
        outcome = Place(path / run_dir).outcome
        outcome.parent.mkdir(parents=True, exist_ok=True)
        write_text(outcome, json.dumps(found) + "\n")
    if done:
        log.info("%s: %s runs are taken from results.csv", path, len(done))


def result(row: dict[str, str]) -> dict[str, Any]:
    """What a row says of a run, as result.json says it."""
    found: dict[str, Any] = {key: int(row[key]) for key in WHOLE} | {key: float(row[key]) for key in REAL}
    found |= {key: row[key] for key in WORDS} | {"versions": {"torch": row["torch"]}, "samples": []}
    return found | {"resumed_from": [int(step) for step in row["resumed_from"].split()]}
