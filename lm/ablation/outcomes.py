"""What became of a run of an ablation: told by the run's own folder, or by its row in results.csv.

Under version control a study keeps its rows and not its models: a run without a folder is what results.csv, and for
its curve curves.csv, say of it. Nothing is written here.
"""

import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lm.ablation.run_files import Outcome, RunFiles
from lm.config import UserError
from lm.config.checks import reading
from lm.report.metrics import FILE, Lines, read_lines
from lm.system.files import read_csv, read_json

RESULT: dict[str, type[int] | type[float] | type[str]] = {  # of a run's result.json, as columns of results.csv
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1"), float),
    **dict.fromkeys(("n_params", "flops_per_token", "steps", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_second"), float),
    **dict.fromkeys(("config_hash", "data_hash", "tokenizer_hash"), str),
    "threads": int,
    **dict.fromkeys(("device", "cpu", "precision", "python"), str),
}
WHO = ("arm", "purpose", "seed", "budgets", "status", "error")  # columns of results.csv before these
RUN_DIR = re.compile(r"(?:cells|trials)/([\w.-]+)-seed(\d+)-[\w.-]+")  # its arm and seed
WHERE = ("host", "executor")  # columns of results.csv, too: where a run was made


class Outcomes:
    """The runs of an ablation's folder. A run is named by its directory below it, as in cells/tied-seed0-1a2b3c4d5e.

    Raises UserError if results.csv is not what a report has written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = self.table("results.csv", ("run_dir", *WHO))
        with reading(folder / "results.csv"):
            found = {row["run_dir"]: from_row(row, line) for line, row in enumerate(rows, 2)}
        self.rows = {run_dir: one for run_dir, one in found.items() if one.status in ("done", "failed", "diverged")}

    def of(self, run_dir: str, planned: Mapping[str, str] = MappingProxyType({})) -> Outcome:
        """`planned` has the hashes that a result must have, if it says them.

        One of other settings, another text or another seed than its directory is named by fails.
        """
        found = RunFiles(self.folder / run_dir).read()
        if found.status == "missing" and not (self.folder / run_dir).exists():
            found = self.rows.get(run_dir, found)
        said = found.row or found.result
        other = [key for key, value in planned.items() if key.endswith("_hash") and said.get(key, value) != value]
        if (named := RUN_DIR.fullmatch(run_dir)) and int(found.result.get("seed", named[2])) != int(named[2]):
            other.insert(0, "seed")
        if found.status != "done" or not other:
            return found
        where = "its row in results.csv" if found.row else run_dir
        return Outcome("failed", f"its {other[0]} is not the one planned: remove {where}")

    def where(self, run_dir: str) -> dict[str, str]:
        """The host and the executor that made a run, if it is known. Raises UserError."""
        path = RunFiles(self.folder / run_dir).where
        try:
            with reading(path):
                found = read_json(path)
                return {key: found[key] for key in WHERE}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def ended(self) -> dict[str, tuple[str, int]]:
        """Every run that has come to an end, by its folder or its row, with its arm and its own seed."""
        folders = {"/".join(path.parts[-3:-1]) for path in self.folder.glob("*/*/result.json")}
        named = {run_dir: RUN_DIR.fullmatch(run_dir) for run_dir in sorted(folders | self.rows.keys())}
        return {run_dir: (found[1], int(found[2])) for run_dir, found in named.items() if found}

    def lines(self, run_dir: str, name: str) -> Lines:
        """The whole rows of a CSV file of a run, those of curves.csv for a metrics.csv that is absent."""
        path = self.folder / run_dir / name
        return read_lines(path) if name != FILE or path.exists() else self.curves.get(run_dir, [])

    @cached_property
    def curves(self) -> dict[str, Lines]:
        found: dict[str, Lines] = {}
        for row in self.table("curves.csv", ("run_dir",)):
            found.setdefault(row["run_dir"], []).append(row)
        return found

    def table(self, name: str, columns: tuple[str, ...]) -> Lines:
        """Every row of a file in the ablation's folder that must have these columns, none if there is no such file."""
        path = self.folder / name
        try:
            with reading(path):
                rows = read_csv(path)
                for line, row in enumerate(rows, 2):
                    if None in (*row, *row.values()):
                        raise UserError(f"line {line} is not a whole row")
                    if absent := [column for column in columns if column not in row]:
                        raise UserError(f"has no column {absent[0]}")
                return rows
        except FileNotFoundError:
            return []


def from_row(row: dict[str, str], line: int) -> Outcome:
    """A row whose values are no such numbers fails and is named."""
    result: dict[str, Any] = {}
    for key, kind in RESULT.items() if row["status"] == "done" else ():
        try:
            result[key] = kind(row[key])
        except ValueError:
            result[key] = math.nan
        if isinstance(result[key], float) and not math.isfinite(result[key]):
            where = f"line {line} of results.csv ({row['run_dir']}): {key}={row[key]}: expected a number"
            return Outcome("failed", f"{where}; remove it, and ablate makes the run again", row=row)
    if result:
        result |= {"versions": {"torch": row["torch"]}, "samples": []}
        result["resumed_from"] = [int(step) for step in row["resumed_from"].split()]
    return Outcome(row["status"], row["error"], result, row)
