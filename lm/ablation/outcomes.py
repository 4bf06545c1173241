"""What became of a run of an ablation: told by the run's own folder, or by its row in results.csv.

Under version control a study keeps its rows and not its models: a run without a folder is what results.csv, and for
its curve curves.csv, say of it. Nothing is written here.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from lm.ablation.run_files import Outcome, RunFiles
from lm.config import BadInput
from lm.report.metrics import FILE, Lines, read_lines
from lm.system.files import checksum, read_object, read_regular, without_checksum

RESULT: dict[str, type[int] | type[float] | type[str]] = {  # of a run's result.json, as columns of results.csv
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1"), float),
    **dict.fromkeys(("n_params", "flops_per_token", "steps", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_second"), float),
    **dict.fromkeys(("config_hash", "data_hash", "tokenizer_hash"), str),
    "threads": int,
    **dict.fromkeys(("device", "cpu", "precision", "python"), str),
}
WHO = ("arm", "purpose", "seed", "budgets", "status", "error")  # columns of results.csv before these
CHANGED = "was changed after it was written: its row_hash is another"
AGAIN = "remove it, and ablate makes the run again"
RUN_DIR = re.compile(r"(?:cells|trials)/([\w.-]+)-seed(\d+)-[\w.-]+")  # its arm and seed
CURVE = "curve_hash"  # column of results.csv: of the rows of the run in curves.csv
WHERE = ("host", "executor")  # columns of results.csv, too, where a run was made
CHECKED = ("run_dir", "status", *RESULT, "source_hash", "torch", "resumed_from", CURVE, *WHERE)  # those of row_hash
Kind = TypeVar("Kind")


class Outcomes:
    """The runs of an ablation's folder. A run is named by its directory below it, as in cells/tied-seed0-1a2b3c4d5e.

    Raises BadInput if results.csv is not what a report has written. No verdict rests on curves, nor on
    where a run was made: what is wrong with such files is in `damaged`, by file, as soon as they are asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.damaged = folder, dict[Path, str]()
        lines = count(2)
        rows = self.table("results.csv", lambda row: (row["run_dir"], from_row(row, next(lines))), WHO)
        self.rows = {run_dir: one for run_dir, one in rows if one.status in ("done", "failed", "diverged")}

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
        """The host and the executor that made a run."""
        path = RunFiles(self.folder / run_dir).where
        try:
            said = without_checksum(read_object(path))
            return {key: said[key] for key in WHERE if isinstance(said.get(key), str)}
        except (FileNotFoundError, NotADirectoryError):
            pass
        except ValueError as error:
            self.damaged[path] = f"{path}: {error}; restore it, or remove it"
        return {}

    def ended(self) -> dict[str, tuple[str, int]]:
        """Every run that has come to an end, by its folder or its row, with its arm and its own seed."""
        folders = {"/".join(path.parts[-3:-1]) for path in self.folder.glob("*/*/result.json")}
        named = {run_dir: RUN_DIR.fullmatch(run_dir) for run_dir in sorted(folders | self.rows.keys())}
        return {run_dir: (found[1], int(found[2])) for run_dir, found in named.items() if found}

    def lines(self, run_dir: str, name: str, result: Mapping[str, Any] = MappingProxyType({})) -> Lines:
        """The whole rows of a CSV file of a run, those of curves.csv for a metrics.csv that is absent or damaged."""
        path = self.folder / run_dir / name
        try:
            return read_lines(path, result)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except BadInput as error:
            self.damaged[path] = str(error)
        return self.curve(run_dir) if name == FILE else []

    def curve(self, run_dir: str) -> Lines:
        """The rows of a run in curves.csv, none if they are not those whose hash is in its row of results.csv."""
        found, one = self.curves.get(run_dir, []), self.rows.get(run_dir)
        written = one.row.get(CURVE) if one and one.row and one.status == "done" else ""
        if not (found and written) or curve_hash(found) == written:
            return found
        said = f"{self.curves_csv}: the rows of {run_dir} were changed after they were written"
        self.damaged.setdefault(self.curves_csv, f"{said}; restore the file, or remove it to go on without its curves")
        return []

    @property
    def curves_csv(self) -> Path:
        return self.folder / "curves.csv"

    @cached_property
    def curves(self) -> dict[str, Lines]:
        found: dict[str, Lines] = {}
        try:
            for run_dir, point in self.table("curves.csv", lambda row: (row["run_dir"], row)):
                found.setdefault(run_dir, []).append(point)
        except BadInput as error:
            self.damaged[self.curves_csv] = str(error)
        except OSError as error:
            self.damaged[self.curves_csv] = f"{self.curves_csv}: cannot be read ({error.strerror})"
        return found

    def table(
        self, name: str, read: Callable[[dict[str, str]], tuple[str, Kind]], columns: tuple[str, ...] = ()
    ) -> list[tuple[str, Kind]]:
        """Every row of a file in the ablation's folder that must have these columns, none if there is no such file."""
        path = self.folder / name
        try:
            reader = csv.DictReader(io.StringIO(read_regular(path).decode(), newline=""))
            rows = list(reader)
            if torn := [i for i, row in enumerate(rows, 2) if None in (*row, *row.values())]:
                raise ValueError(f"line {torn[0]} is not a whole row")
            if absent := [one for one in ("run_dir", *columns) if one not in (reader.fieldnames or ())]:
                raise ValueError(f"has no column {absent[0]}")
            return [read(row) for row in rows]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, csv.Error) as error:
            raise BadInput(f"{path}: not what a report has written ({error!r}); restore it, or remove it") from error


def from_row(row: dict[str, str], line: int) -> Outcome:
    """A row that does not match its row_hash, or whose values are no such numbers, fails and is named."""
    where, result = f"line {line} of results.csv ({row['run_dir']})", dict[str, Any]()
    if row.get("row_hash", "") not in ("", row_hash(row), row_hash(row | dict.fromkeys(WHERE, ""))):
        return Outcome("failed", f"{where} {CHANGED}; {AGAIN}", row=row)
    if row["status"] == "done":
        for key, kind in RESULT.items():
            try:
                result[key] = kind(row[key])
            except ValueError:
                result[key] = math.nan
            if isinstance(result[key], float) and not math.isfinite(result[key]):
                return Outcome("failed", f"{where}: {key}={row[key]}: expected a number; {AGAIN}", row=row)
        result |= {"versions": {"torch": row["torch"]}, "samples": []}
        result["resumed_from"] = [int(step) for step in row["resumed_from"].split()]
    return Outcome(row["status"], row["error"], result, row)


def row_hash(row: Mapping[str, Any]) -> str:
    """Of what a row says of its run. Empty columns are left out."""
    return checksum({key: str(row[key]) for key in CHECKED if row.get(key) not in (None, "")})[:16]


def curve_hash(points: Lines) -> str:
    """Of the rows of a run in curves.csv. Empty columns are left out."""
    rows = [{key: value for key, value in one.items() if value and key != "run_dir"} for one in points]
    return checksum({"rows": rows})[:16]
