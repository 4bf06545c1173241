"""Runs of which only their row in results.csv is left: under version control a study keeps its rows, not its models."""

import csv
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from lm.ablation.run.workers import Place
from lm.config import BadInput

RESULT: dict[str, type[int] | type[float] | type[str]] = {  # of a run's result.json, as columns of results.csv
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1"), float),
    **dict.fromkeys(("n_params", "flops_per_token", "steps", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_second"), float),
    **dict.fromkeys(("config_hash", "data_hash", "tokenizer_hash"), str),
    "threads": int,
    "device": str,
    "precision": str,
    "python": str,
}
LOST = ("status", "error")
PLACE = r"(cells|trials)/[\w-][\w.-]*"
log = logging.getLogger(__name__)


def restore(path: Path) -> None:
    """Where no run has a directory, give those of results.csv that came to an end what they had ended with.

    A directory's name ends in the hash of all that decides its run, so a row serves the same run and no other. All
    are made aside and then appear: whoever is interrupted finds none of them, or all.
    Raises BadInput if a file is not what a report has written.
    """
    aside, folders = path / ".restored", [path / name for name in ("trials", "cells")]
    if not (path / "results.csv").exists() or (not aside.exists() and any(map(filled, folders))):
        return
    if not any(map(filled, folders)):
        shutil.rmtree(aside, ignore_errors=True)
        log.info("%s: %s runs are taken from results.csv", path, rebuild(path, aside))
    for folder in folders:
        if (aside / folder.name).exists():
            (aside / folder.name).replace(folder)
    shutil.rmtree(aside, ignore_errors=True)


def filled(folder: Path) -> bool:
    return any(folder.glob("*"))


def rebuild(path: Path, aside: Path) -> int:
    """Write into `aside` what results.csv and curves.csv tell of runs; returns how many are done."""
    try:
        rows = [row for row in read_table(path / "results.csv") if re.fullmatch(PLACE, row["run_dir"])]
        done = {row["run_dir"]: result(row) for row in rows if row["status"] == "done"}
        lost = {
            row["run_dir"]: {key: row[key] for key in LOST} for row in rows if row["status"] in ("failed", "diverged")
        }
        curves: dict[str, list[dict[str, str]]] = {}
        for point in read_table(path / "curves.csv") if (path / "curves.csv").exists() else ():
            if None not in (*point, *point.values()):  # a row that is no whole one
                curves.setdefault(point.pop("run_dir"), []).append(point)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise BadInput(
            f"{path}: results.csv or curves.csv is not what a report has written ({error!r}); remove it"
        ) from error
    for run_dir, found in done.items():
        (aside / run_dir).mkdir(parents=True)
        (aside / run_dir / "result.json").write_text(json.dumps(found, indent=1) + "\n")
        if points := curves.get(run_dir):
            lines = [list(points[0]), *(point.values() for point in points)]
            (aside / run_dir / "metrics.csv").write_text("".join(",".join(one) + "\n" for one in lines))
    for run_dir, found in lost.items():
        outcome = Place(aside / run_dir).outcome
        outcome.parent.mkdir(parents=True, exist_ok=True)
        outcome.write_text(json.dumps(found) + "\n")
    return len(done)


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def result(row: dict[str, str]) -> dict[str, Any]:
    """What a row says of a run, as result.json says it."""
    found: dict[str, Any] = {key: kind(row[key]) for key, kind in RESULT.items()}
    found |= {"versions": {"torch": row["torch"]}, "samples": []}
    return found | {"resumed_from": [int(step) for step in row["resumed_from"].split()]}
