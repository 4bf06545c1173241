"""A verdict on the numbers of any program: rows of arm, seed and value are an ablation of which nothing else is known.

A value that is not finite, empty, or NA is a run that diverged; so is one whose square is not finite. Rows of a seed
that makes no pair are left out, except in an arm that has diverged.
"""

import csv
import math
import os
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from lm.errors import UserError, error_prefix, reading, require
from lm.lab.ablation.folder import FILE, REPORTED, UNUSED, AblationRecord, ArmRecord, RunReader, frame_of
from lm.lab.ablation.question import Question
from lm.lab.ablation.results import Results
from lm.system.files import read_json

KINDS: dict[str, type] = {"arm": str, "seed": int, "value": float}
RUN = KINDS | dict.fromkeys(("run_dir", "status", "error", "purpose"), str) | {"factor": float}
TOO_LARGE = 1e150  # the squares of differences are added


def read_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a CSV file with a header. Raises UserError that names the file and the line."""
    if not path.is_file():
        raise UserError(f"rows={path}: no such file; expected a CSV file with the columns {', '.join(KINDS)}")
    with reading(path, "CSV in UTF-8"), open(path, encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, skipinitialspace=True, strict=True)
        names = [name.strip() for name in next(filter(None, lines), [])]
        for mark, word in ((";", "semicolons"), ("\t", "tabs")):
            if len(names) == 1 and mark in names[0]:
                raise UserError(f"its fields end in {word}; expected commas, and a point in decimals")
        rows = {f"line {lines.line_num}": fields for fields in lines if fields}
        for line, fields in rows.items():
            require(len(fields) == len(names), f"{line}: has {len(fields)} fields", f"{len(names)}, as the header has")
        return checked_rows(pd.DataFrame(rows.values(), [*rows], names))


def checked_rows(given: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of a frame that are read. Raises UserError that names a column, or a row by its index."""
    columns = f"has the columns {', '.join(map(str, given.columns)) or 'none'}"
    is_whole = all([*given.columns].count(name) == 1 for name in KINDS)
    require(is_whole, columns, f"{', '.join(KINDS)}, each once")
    rows, places = [], dict[tuple[str, int], Any]()
    for place, arm, seed, value in given[[*KINDS]].itertuples(name=None):
        with error_prefix(str(place) if isinstance(place, str) else f"row {place}"):
            require(not pd.isna(arm) and str(arm).strip() != "", f"arm={arm}", "a name")
            run = _name(str(arm)), _whole(seed)
            require(run not in places, f"arm={arm} seed={seed}: is there twice, before in {places.get(run)}", "once")
            places[run] = place
            rows.append((*run, _number(value)))
    return pd.DataFrame(rows, columns=[*KINDS])


def _name(arm: str) -> str:
    return unicodedata.normalize("NFC", arm).strip()  # é is one letter, however it is stored


def _whole(seed: Any) -> int:
    with suppress(ValueError):
        whole = int(_plain(seed).removesuffix(".0"))  # pandas has made a float of it
        if 0 <= whole < 2**63:
            return whole
    raise UserError(f"seed={seed}: expected a whole number, 0 to 2**63 - 1")


def _number(value: Any) -> float:
    try:
        return math.nan if pd.isna(value) or str(value).strip() in ("", "NA") else float(_plain(value))
    except (ValueError, TypeError):
        raise UserError(f"value={value}: expected a number, or nan of a run that diverged") from None


def _plain(value: Any) -> str:
    """Return the text of a number. Raises ValueError for the underscores that Python, and no CSV, allows."""
    if "_" in str(value):
        raise ValueError(value)
    return str(value)


# --- as an ablation


def judged(
    rows: pd.DataFrame,
    baseline: str | None,
    margin: float | None,
    higher: bool,
    command: str = "",
    folder: Path = Path(os.devnull),
) -> Results:
    """Return the rows as the results of an ablation. Of two arms the first is the baseline if none is named."""
    arms = [*dict.fromkeys(rows["arm"])]
    require(len(arms) > 1, f"column arm: has {', '.join(arms) or 'no value'}", "two names or more")
    require(baseline is not None or len(arms) == 2, "baseline: not given", f"one of {', '.join(arms)}")
    baseline = arms[0] if baseline is None else _name(baseline)
    require(baseline in arms, f"baseline={baseline}: no such arm", f"one of {', '.join(arms)}")
    require(margin is None or 0 < margin < math.inf, f"margin={margin}", "more than 0, in the unit of the values")
    of_baseline = rows["arm"] == baseline
    common = {*rows["seed"][of_baseline]} & {*rows["seed"][~of_baseline]}
    seeds = sorted(common)
    pairs = f"column seed: {baseline} and another arm have {len(seeds)} of the seeds in common"
    require(len(seeds) > 1, pairs, "two or more, because each makes a pair")
    question = Question(
        name="rows",
        question=f"Which is better, {' or '.join(arms)}?",
        arms={arm: [] for arm in arms},
        baseline=baseline,
        seeds=seeds,
        folds=False,
        metric="higher_value" if higher else "value",
        equivalence_margin=margin,
    )
    record = AblationRecord(question=question, arms={arm: ArmRecord() for arm in arms}, command=command)
    lost = {*rows["arm"][~(rows["value"].abs() < TOO_LARGE)]}  # all their runs count, those that trained too
    runs = frame_of([_run(row, row["seed"] in common or row["arm"] in lost) for row in rows.to_dict("records")], RUN)
    results = Results(record, RunReader(folder))
    # There are no folders of runs to read.
    results.runs = runs.assign(higher_value=runs["value"])
    return results


def _run(row: dict[Any, Any], counts: bool) -> dict[str, Any]:
    is_finite = abs(row["value"]) < TOO_LARGE
    outcome = {"status": "done"} if is_finite else {"status": "diverged", "error": "no finite value"}
    about = {"purpose": REPORTED if counts else UNUSED, "factor": 1.0}
    return row | outcome | about | {"run_dir": f"{row['arm']} seed {row['seed']}"}


def own_folder(folder: Path) -> Path:
    """Return the folder for a report of rows. Raises UserError if it holds anything else."""
    is_report = False
    with suppress(OSError, ValueError):
        is_report = "contrasts" in read_json(folder / "report.json")
    is_used = folder.exists() and any(folder.iterdir()) and not (is_report and not (folder / FILE).exists())
    require(not is_used, f"output_dir={folder}", "a new folder, an empty one, or one with a report of rows")
    return folder
