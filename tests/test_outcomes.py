"""What became of a run: by its own folder, by its row in results.csv, and never by another run's."""

import csv
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, WHOLE_RESULT, some
from test_report import make, numbers, results

from lm.ablation.outcomes import RESULT, Outcomes
from lm.ablation.report import write_report
from lm.config import BadInput
from lm.training.run_directory import RunDirectory

NAME = "cells/a-seed0-0123456789"
PLANNED = {"config_hash": "c", "data_hash": "d", "device": "cuda"}
RUN = WHOLE_RESULT | {"config_hash": "c", "data_hash": "d", "device": "NVIDIA H200", "precision": "bf16-mixed"}


def put(folder: Path, content: str) -> None:
    (folder / NAME).mkdir(parents=True)
    (folder / NAME / "result.json").write_text(content)


def put_row(folder: Path, **changes: Any) -> None:
    row: dict[str, Any] = dict.fromkeys(RESULT, 1) | {"run_dir": NAME, "arm": "a", "seed": 0, "status": "done"}
    row |= {"config_hash": "c", "data_hash": "d", "source_hash": "s", "torch": "2", "resumed_from": "5 7", "error": ""}
    row |= changes
    with open(folder / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)


def test_hashes_decide_and_not_what_a_device_and_a_precision_are_called(tmp_path: Path) -> None:
    put(tmp_path, json.dumps(RUN))
    assert Outcomes(tmp_path).of(NAME, PLANNED).result == RUN


@pytest.mark.parametrize("key", ["config_hash", "data_hash"])
def test_a_result_of_something_else_is_not_accepted(tmp_path: Path, key: str) -> None:
    put(tmp_path, json.dumps(RUN))
    found = Outcomes(tmp_path).of(NAME, PLANNED | {key: "other"})
    assert (found.status, found.result) == ("failed", {})
    assert found.error == f"its {key} is not the one planned: remove {NAME}"


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    put(tmp_path, "")
    assert "result.json cannot be read" in Outcomes(tmp_path).of(NAME).error


@pytest.mark.parametrize("key", WHOLE_RESULT)
def test_a_result_without_a_key_or_with_a_wrong_one_is_named(tmp_path: Path, key: str) -> None:
    for content in ({name: value for name, value in RUN.items() if name != key}, RUN | {key: None}):
        path = tmp_path / str(len(content))
        put(path, json.dumps(content))
        assert "result.json cannot be read" in Outcomes(path).of(NAME).error
        with pytest.raises(BadInput, match=rf"result\.json: {key}: .*; remove it, and the same command"):
            RunDirectory(path / NAME).read_result()


NOT_FINITE = json.dumps(RUN | {"val_loss": math.nan})


@pytest.mark.parametrize("content", ["[]", "3", "{}", "null", "", "[" * 10**5, "\xff", NOT_FINITE])
def test_a_file_that_is_no_result_is_one_line(tmp_path: Path, content: str) -> None:
    put(tmp_path, "")
    (tmp_path / NAME / "result.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadInput, match=r"result\.json: .*; remove it") as caught:
        RunDirectory(tmp_path / NAME).read_result()
    assert "\n" not in str(caught.value)
    assert Outcomes(tmp_path).of(NAME).status == "failed"


def test_earlier_columns_of_diagnostics_are_read_under_todays_names(tmp_path: Path) -> None:
    put(tmp_path, json.dumps(RUN))
    (tmp_path / NAME / "diagnostics.csv").write_text("step,lookup_grad,table_norm/band1\n1,2,3\n")
    (row,) = Outcomes(tmp_path).lines(NAME, "diagnostics.csv")
    assert row == {"step": "1", "embedding_grad": "2", "embedding_norm/band1": "3"}


def test_a_row_stands_for_a_run_without_a_folder(tmp_path: Path) -> None:
    put_row(tmp_path)
    found = Outcomes(tmp_path).of(NAME, PLANNED)
    assert (found.status, found.result["resumed_from"], found.result["versions"]) == ("done", [5, 7], {"torch": "2"})
    assert found.row
    (tmp_path / NAME).mkdir(parents=True)  # it is being run again
    assert Outcomes(tmp_path).of(NAME, PLANNED) == ("missing", "", {}, None)


@pytest.mark.parametrize("key", ["config_hash", "data_hash", "source_hash"])
def test_a_row_of_something_else_is_not_accepted(tmp_path: Path, key: str) -> None:
    put_row(tmp_path)
    found = Outcomes(tmp_path).of(NAME, PLANNED | {key: "other"})
    assert (found.status, found.result) == ("failed", {})
    assert found.error == f"its {key} is not the one planned: remove its row in results.csv"


@pytest.mark.parametrize(("status", "found"), [("diverged", "diverged"), ("failed", "failed"), ("missing", "missing")])
def test_a_row_without_a_result_says_what_became_of_its_run(tmp_path: Path, status: str, found: str) -> None:
    put_row(tmp_path, status=status, val_loss="", error="nan")
    assert Outcomes(tmp_path).of(NAME).status == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("status\ndone\n", "run_dir"),
        (f"{','.join(['run_dir', 'arm', 'seed', 'status', *RESULT])}\n{NAME},done\n", "line 2 is not a whole row"),
        ("\n\n3\n", "line 2 is not a whole row"),
    ],
)
def test_a_spoilt_results_csv_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(BadInput, match=said):
        Outcomes(tmp_path)


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    put_row(tmp_path, val_loss="three")
    with pytest.raises(BadInput, match=r"results\.csv: .*three"):
        Outcomes(tmp_path)


def test_a_row_cannot_name_a_place_outside(tmp_path: Path) -> None:
    put_row(tmp_path, run_dir="cells/../../x")
    assert Outcomes(tmp_path).ended() == {}


def test_a_report_says_how_many_runs_are_rows(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",))
    assert "all that is left" not in (path / "report.md").read_text()
    for folder in path.glob("cells/untied-*"):
        (folder / "result.json").unlink()
        (folder / "metrics.csv").unlink()
        folder.rmdir()
    write_report(path)
    assert "For 3 of 12 runs, results.csv is all that is left." in (path / "report.md").read_text()
    assert numbers(path)["cells"]["rows"] == 3


def test_an_edited_row_is_a_row(tmp_path: Path) -> None:
    """Where there is a folder, results.csv decides nothing; where there is none, the report says so."""
    path = make(tmp_path, budgets=("tokens",))
    rows = (path / "results.csv").read_text()
    (path / "results.csv").write_text(rows.replace(results(path)[0]["val_loss"], "1.0"))
    write_report(path)
    assert (path / "results.csv").read_text() == rows


WRITE = """
import sys
from pathlib import Path
from lm.ablation.report import write_report
write_report(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_two_reports_at_once_write_the_same(tmp_path: Path) -> None:
    path = make(tmp_path, tuned=True)
    before = results(path)
    for name in ("cells", "trials"):
        subprocess.run(["rm", "-r", path / name], check=True)
    for _ in range(3):
        both = [subprocess.Popen([sys.executable, "-c", WRITE, path], cwd=ROOT, stderr=subprocess.PIPE) for _ in "ab"]
        assert [(one.communicate()[1], one.returncode) for one in both] == [(b"", 0)] * 2
        assert results(path) == before
    assert not list(path.rglob(".partial-*"))


STUDY = Path(__file__).parents[1] / "docs/studies/tying_broken"


def val_losses(folder: Path) -> dict[str, str]:
    with open(folder / "results.csv", newline="") as file:
        return {row["run_dir"]: row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]}


@pytest.mark.parametrize("spoil", some(["other text", "empty folder", "torn result"], 3))
def test_a_report_never_erases_the_only_copy_of_a_result(tmp_path: Path, spoil: str) -> None:
    for name in ("ablation.json", "results.csv", "curves.csv"):
        shutil.copy(STUDY / name, tmp_path)
    before, record = val_losses(tmp_path), json.loads((tmp_path / "ablation.json").read_text())
    run = tmp_path / record["cells"][0]["run_dir"]
    if spoil == "other text":
        next(iter(record["arms"].values()))["identity"]["data_hash"] = "another"
        (tmp_path / "ablation.json").write_text(json.dumps(record))
    else:
        run.mkdir(parents=True)
    if spoil == "torn result":
        (run / "result.json").write_text("{")
    for _ in range(2):
        write_report(tmp_path)
        assert val_losses(tmp_path) == before
