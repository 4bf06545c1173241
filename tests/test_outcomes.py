"""What became of a run: by its own folder, by its row in results.csv, and never by another run's."""

import csv
import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, WHOLE_RESULT, some
from helpers.ablation_folder import ARMS, Page, make, numbers, results

from lm.ablation.outcomes import RESULT, WHO, Outcomes
from lm.ablation.report import write_report
from lm.ablation.report_input import read_results
from lm.ablation.summary import result_table
from lm.config import BadInput
from lm.system.files import csv_text, write_json, write_text
from lm.training.run_directory import RunDirectory

NAME = "cells/a-seed0-0123456789"
PLANNED = {"config_hash": "c", "data_hash": "d", "device": "cuda"}
RUN = WHOLE_RESULT | {
    "seed": 0,
    "config_hash": "c",
    "data_hash": "d",
    "device": "NVIDIA H200",
    "precision": "bf16-mixed",
}


def put(folder: Path, content: str) -> None:
    (folder / NAME).mkdir(parents=True)
    (folder / NAME / "result.json").write_text(content)


def put_row(folder: Path, **changes: Any) -> None:
    row: dict[str, Any] = dict.fromkeys(RESULT, 1) | {"run_dir": NAME, "arm": "a", "seed": 0, "status": "done"}
    row |= {"purpose": "reported", "budgets": "tokens", "host": "here"}
    row |= {"config_hash": "c", "data_hash": "d", "source_hash": "s", "torch": "2", "resumed_from": "5 7", "error": ""}
    write_text(folder / "results.csv", csv_text([], [row | changes]))


def test_hashes_decide_and_not_what_a_device_and_a_precision_are_called(tmp_path: Path) -> None:
    put(tmp_path, json.dumps(RUN))
    assert Outcomes(tmp_path).of(NAME, PLANNED).result == RUN


@pytest.mark.parametrize("key", ["config_hash", "data_hash"])
def test_a_result_of_something_else_is_not_accepted(tmp_path: Path, key: str) -> None:
    put(tmp_path, json.dumps(RUN | {key: "copied"}))
    found = Outcomes(tmp_path).of(NAME, PLANNED)
    assert (found.status, found.result) == ("failed", {})
    assert found.error == f"its {key} is not the one planned: remove {NAME}"


def test_a_result_of_another_seed_is_not_accepted(tmp_path: Path) -> None:
    """Also where the plan has no hash of its settings, as that of the trials in a report."""
    put(tmp_path, json.dumps(RUN | {"seed": 3}))
    assert Outcomes(tmp_path).of(NAME).error == f"its seed is not the one planned: remove {NAME}"


@pytest.mark.parametrize("content", ["[]", "3", "null", "", "[" * 10**5, "\xff"])
def test_a_file_that_is_no_result_is_one_line(tmp_path: Path, content: str) -> None:
    put(tmp_path, "")
    (tmp_path / NAME / "result.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadInput, match=r"result\.json: ") as caught:
        RunDirectory(tmp_path / NAME).read_result()
    assert "\n" not in str(caught.value)
    assert Outcomes(tmp_path).of(NAME).status == "failed"


@pytest.mark.parametrize(
    "content",
    [
        '{"status": "failed"}',
        "[" * 10**5,
        "[]",
    ],
)
def test_a_file_that_is_no_outcome_is_a_failure_and_no_result(tmp_path: Path, content: str) -> None:
    (tmp_path / "cells").mkdir()
    path = tmp_path / f"{NAME}.json"
    path.write_text(content)
    found = Outcomes(tmp_path).of(NAME)
    assert (found.status, found.result) == ("failed", {})
    assert found.error.startswith(f"{path}: not what lm wrote (")


def test_a_result_that_cannot_be_read_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, json.dumps(RUN))
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
    )
    with pytest.raises(OSError, match="Input/output error"):
        Outcomes(tmp_path).of(NAME)


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
        ("status\ndone\n", "has no column run_dir"),
        (f"{','.join(['run_dir', *WHO, *RESULT])}\n{NAME},done\n", "line 2 is not a whole row"),
        (f"{','.join(WHO)}\n{','.join(WHO)}\n", "has no column run_dir"),
    ],
)
def test_a_spoilt_results_csv_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(BadInput, match=said):
        Outcomes(tmp_path)


@pytest.mark.parametrize("value", ["three", "nan", ""])
def test_a_number_that_is_none_is_named(tmp_path: Path, value: str) -> None:
    put_row(tmp_path, val_loss=value)
    found = Outcomes(tmp_path).of(NAME)
    assert (found.status, found.result) == ("failed", {})
    assert found.error.startswith(f"line 2 of results.csv ({NAME}): val_loss={value}: expected a number; remove it")


def test_a_row_cannot_name_a_place_outside(tmp_path: Path) -> None:
    put_row(tmp_path, run_dir="cells/../../x")
    assert Outcomes(tmp_path).ended() == {}


def test_a_report_says_how_many_runs_are_rows(tmp_path: Path) -> None:
    path, lost = make(tmp_path, budgets=("tokens",)), "results.csv is all that is left, and it holds no samples."
    assert "all that is left" not in Page(path).text
    shutil.rmtree(path / "cells/untied-seed0-1000")
    write_report(path)
    assert "seed 1. " in Page(path).text, "the first seed of which all samples are there"
    for folder in path.glob("cells/untied-*"):
        shutil.rmtree(folder)
    write_report(path)
    assert f"Of the runs of untied {lost}" in Page(path).text
    assert "for 3 of 12 runs, results.csv is all that is left" in Page(path).text
    assert numbers(path)["runs"]["rows"] == 3
    shutil.rmtree(path / "cells")
    write_report(path)
    assert f"Of the runs of {', '.join(ARMS)} {lost}" in Page(path).text
    record = json.loads((path / "ablation.json").read_text())
    for arm in record["arms"].values():
        arm["settings"]["prompts"] = []
    (path / "ablation.json").write_text(json.dumps(record))
    write_report(path)
    assert "Samples" not in Page(path).headings, "samples that were not asked for are not lost"


def test_what_a_result_says_of_its_machine_steers_no_terminal_that_a_pipe_leads_to(tmp_path: Path) -> None:
    result = make(tmp_path, budgets=("tokens",)) / "cells/tied-seed0-1000/result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"python": "\x1b]0;x\x07"}))
    assert r"Python 3.11.7 and \x1b]0;x\x07" in result_table(read_results(tmp_path))


def test_the_rows_of_curves_stand_for_runs_without_a_folder(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",))
    before = (path / "curves.csv").read_text()
    shutil.rmtree(path / "cells")
    write_report(path)
    assert (path / "curves.csv").read_text() == before
    assert "Learning curves" in Page(path).headings
    (path / "curves.csv").unlink()
    write_report(path)
    assert "12 runs have no learning curve." in Page(path).text


@pytest.mark.parametrize("name", ["curves.csv", "cells/tied-seed0-1000/metrics.csv", "cells/tied-seed0-1000.where"])
def test_a_file_that_is_not_what_it_was_is_named(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, budgets=("tokens",))
    if name == "curves.csv":
        shutil.rmtree(path / "cells")
    (path / name).write_bytes(b"\xff" if name.endswith(".csv") else b'{"a": "b"}\n')
    with pytest.raises(BadInput, match=re.escape(f"{path / name}: ")):
        write_report(path)


def test_results_csv_says_where_a_run_was_made(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",), report=False)
    write_json(path / "cells/tied-seed0-1000.where", {"host": "node7", "executor": "ray", "pid": 1})
    write_report(path)
    assert results(path)[0]["host"] == "node7"


def test_where_there_is_a_folder_its_row_decides_nothing_and_rows_alone_are_written_as_they_were(
    tmp_path: Path,
) -> None:
    def write_again() -> str:
        write_report(path)
        return (path / "results.csv").read_text()

    path = make(tmp_path, budgets=("tokens",), report=False)
    rows = write_again()
    (path / "results.csv").write_text(rows.replace(results(path)[0]["val_loss"], "1.0"))
    assert write_again() == rows
    shutil.rmtree(path / "cells")
    assert write_again() == rows


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
