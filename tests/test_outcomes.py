"""What became of a run: by its own folder, by its row in results.csv, and never by another run's."""

import csv
import errno
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, WHOLE_RESULT, some
from test_report import ARMS, make, numbers, results

from lm import results as frames
from lm.ablation.judge.study import Study, read_study
from lm.ablation.outcomes import RESULT, WHO, Outcomes, row_hash
from lm.ablation.report import write_report
from lm.ablation.report.answer import basis
from lm.ablation.report.numbers import results_csv
from lm.ablation.report.text import text_section
from lm.ablation.report.warnings import changed, damaged, warnings_of
from lm.ablation.summary import result_table
from lm.config import BadInput
from lm.report.metrics import read_lines
from lm.system.files import sha256, write_sealed
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


def put_row(folder: Path, checked: bool = True, edited: dict[str, Any] | None = None, **changes: Any) -> None:
    row: dict[str, Any] = dict.fromkeys(RESULT, 1) | {"run_dir": NAME, "arm": "a", "seed": 0, "status": "done"}
    row |= {"purpose": "reported", "budgets": "tokens", "host": "here"}
    row |= {"config_hash": "c", "data_hash": "d", "source_hash": "s", "torch": "2", "resumed_from": "5 7", "error": ""}
    row |= changes
    row |= {"row_hash": row_hash(row)} if checked else {}
    row |= edited or {}
    with open(folder / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)


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


@pytest.mark.parametrize("key", ["val_loss", "seed", "config_hash", "checksum"])
def test_a_result_that_was_changed_is_named(tmp_path: Path, key: str) -> None:
    put(tmp_path, "")
    place = RunDirectory(tmp_path / NAME)
    place.write_result(RUN)
    assert place.read_result() == RUN
    written = json.loads(place.result.read_text())
    place.result.write_text(json.dumps(written | {key: {"val_loss": 0.5, "seed": 2}.get(key, "0")}))
    with pytest.raises(BadInput, match=r"result\.json: damaged, its content does not match its checksum; remove it"):
        place.read_result()
    found = Outcomes(tmp_path).of(NAME)
    assert (found.status, found.result) == ("failed", {})
    assert f"{NAME}/result.json: damaged" in found.error


def test_a_result_whose_checksum_has_lost_its_name_is_damaged_and_not_one_of_an_earlier_version(tmp_path: Path) -> None:
    put(tmp_path, "")
    place = RunDirectory(tmp_path / NAME)
    place.write_result(RUN)
    place.result.write_text(place.result.read_text().replace('"checksum"', '"bhecksum"'))
    with pytest.raises(BadInput, match=r"result\.json: damaged, its checksum is called 'bhecksum'; remove it"):
        place.read_result()


@pytest.mark.parametrize("key", WHOLE_RESULT)
def test_a_result_without_a_key_or_with_a_wrong_one_is_named(tmp_path: Path, key: str) -> None:
    for content in ({name: value for name, value in RUN.items() if name != key}, RUN | {key: None}):
        path = tmp_path / str(len(content))
        put(path, json.dumps(content))
        assert f"result.json: {key}: " in Outcomes(path).of(NAME).error
        with pytest.raises(BadInput, match=rf"result\.json: {key}: .*; remove it, and train or ablate writes it again"):
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


@pytest.mark.parametrize(
    "content",
    [
        '{"status": "failed", "error": 5}',
        '{"status": "failed"}',
        '{"status": [], "error": ""}',
        "[" * 10**5,
        '{"status": "done", "error": ""}',
        '{"status": "failed", "error": "", "result": [1]}',
    ],
)
def test_a_file_that_is_no_outcome_is_a_failure_and_no_result(tmp_path: Path, content: str) -> None:
    (tmp_path / "cells").mkdir()
    path = tmp_path / f"{NAME}.json"
    path.write_text(content)
    assert Outcomes(tmp_path).of(NAME)[:3] == ("failed", f"{path.name}: not what ablate wrote", {})


def test_a_pipe_in_the_place_of_a_result_is_not_waited_for(tmp_path: Path) -> None:
    put(tmp_path, "")
    (tmp_path / NAME / "result.json").unlink()
    os.mkfifo(tmp_path / NAME / "result.json")
    os.mkfifo(tmp_path / "results.csv")
    with pytest.raises(OSError, match=r"result\.json: is a pipe or a device, expected a file"):
        RunDirectory(tmp_path / NAME).read_result()
    with pytest.raises(OSError, match=r"results\.csv: is a pipe or a device"):
        Outcomes(tmp_path)


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
        ("status\ndone\n", "run_dir"),
        (f"{','.join(['run_dir', *WHO, *RESULT])}\n{NAME},done\n", "line 2 is not a whole row"),
        (f"{','.join(['run_dir', *WHO, *RESULT])}\n".replace("arm", "aRm"), "has no column arm"),
        ("\n\n3\n", "line 2 is not a whole row"),
        ("", "has no column run_dir"),
        ("", "; restore it, or remove it"),
    ],
)
def test_a_spoilt_results_csv_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(BadInput, match=said):
        Outcomes(tmp_path)


@pytest.mark.parametrize("value", ["three", "nan", ""])
def test_a_number_that_is_none_is_named(tmp_path: Path, value: str) -> None:
    put_row(tmp_path, checked=False, val_loss=value)
    found = Outcomes(tmp_path).of(NAME)
    assert (found.status, found.result) == ("failed", {})
    assert found.error.startswith(f"line 2 of results.csv ({NAME}): val_loss={value}: expected a number; remove it")


@pytest.mark.parametrize("key", ["val_loss", "seconds", "config_hash", "status", "torch", "cpu", "host", "row_hash"])
def test_a_row_that_was_changed_is_named(tmp_path: Path, key: str) -> None:
    put_row(tmp_path, edited={key: "diverged" if key == "status" else 7})
    found = Outcomes(tmp_path).of(NAME, PLANNED)
    assert (found.status, found.result) == ("failed", {})
    assert found.error.startswith(f"line 2 of results.csv ({NAME}) was changed after it was written")


def test_a_row_cannot_name_a_place_outside(tmp_path: Path) -> None:
    put_row(tmp_path, run_dir="cells/../../x")
    assert Outcomes(tmp_path).ended() == {}


def test_a_report_says_how_many_runs_are_rows(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",))
    assert "all that is left" not in (path / "report.md").read_text()
    shutil.rmtree(path / "cells/untied-seed0-1000")
    assert "seed 1. " in text_section(read_study(path))[1], "the first seed of which all samples are there"
    for folder in path.glob("cells/untied-*"):
        shutil.rmtree(folder)
    write_report(path)
    lost = "Of the runs of untied results.csv is all that is left, and it holds no samples."
    assert lost in (path / "report.md").read_text()
    assert "For 3 of 12 runs, results.csv is all that is left." in (path / "report.md").read_text()
    assert numbers(path)["cells"]["rows"] == 3
    shutil.rmtree(path / "cells")
    study = read_study(path)
    assert text_section(study) == ["## Samples", lost.replace("untied", ", ".join(ARMS))]
    for arm in study.record.arms.values():
        arm.settings["prompts"] = []
    assert text_section(study) == [], "samples that were not asked for are not lost"


def test_what_a_result_says_of_its_machine_steers_no_terminal_that_a_pipe_leads_to(tmp_path: Path) -> None:
    result = make(tmp_path, budgets=("tokens",)) / "cells/tied-seed0-1000/result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"python": "\x1b]0;x\x07"}))
    assert "Python " in result_table(tmp_path)
    assert r" \x1b]0;x\x07" in result_table(tmp_path)


def test_a_curve_that_was_changed_is_named_and_verdicts_stay(tmp_path: Path) -> None:
    def warned() -> str:
        """What the report and the terminal say of the files of curves."""
        write_report(path)
        assert "## Learning curves" in (path / "report.md").read_text()
        (told,) = [one.head for one in damaged(read_study(path))] or [""]
        assert told in result_table(path)
        return told

    path = make(tmp_path, budgets=("tokens",))
    run, curves = path / "cells/tied-seed0-1000", path / "curves.csv"
    result, rows, whole = run / "result.json", (run / "metrics.csv").read_text(), curves.read_text()
    sealed = json.loads(result.read_text()) | {"metrics_hash": sha256(run / "metrics.csv")}
    result.write_text(json.dumps(sealed))
    assert read_lines(run / "metrics.csv", sealed)
    (run / "metrics.csv").write_text(rows.replace("7", "8", 1))
    assert f"{run}/metrics.csv: was changed after its run had finished; restore it, or remove it" in warned()
    (run / "metrics.csv").unlink()
    (run / "metrics.csv").symlink_to(run / "metrics.csv")
    assert f"{run}/metrics.csv: cannot be read (Too many levels of symbolic links)" in warned()
    with pytest.raises(BadInput, match=r"metrics\.csv: cannot be read"):
        frames.curves(path)
    assert curves.read_text() == whole, "its rows in curves.csv stand for a metrics.csv that is damaged"
    shutil.rmtree(path / "cells")
    assert not warned()
    changed = whole.replace("7", "8", 1)
    for text, said in (
        (changed, "the rows of cells/tied-seed0-1000 were changed after they were written; restore the file, or"),
        (whole.replace("run_dir", "x", 1), "not what a report has written (ValueError('has no column run_dir'))"),
    ):
        curves.write_text(text)
        assert f"{curves}: {said}" in (warned() if text == changed else next(damaged(read_study(path))).head)
        write_report(path)
        assert curves.read_text() == text, "it is the only copy of its other rows"
    curves.unlink()
    curves.mkdir()
    assert next(damaged(read_study(path))).head == f"{curves}: cannot be read (Is a directory)."
    curves.rmdir()
    curves.write_text(changed)
    whole = (path / "results.csv").read_text()
    (path / "results.csv").write_text(whole.replace(results(path)[0]["curve_hash"], ""))
    assert "was changed after it was written" in Outcomes(path).of("cells/tied-seed0-1000").error
    earlier = re.sub(r",[0-9a-f]{16},cells/", ",,cells/", whole.replace("curve_hash", "of_old"))
    (path / "results.csv").write_text(earlier)
    assert not warned(), "rows of earlier versions do not say it"


def test_curves_are_checked_where_they_are_asked_for(tmp_path: Path) -> None:
    """Not those of a run that has its folder, as after a report that was killed between its files, nor removed ones."""
    path = make(tmp_path, budgets=("tokens",))
    assert (path / "curves.csv").stat().st_mtime_ns <= (path / "results.csv").stat().st_mtime_ns
    shutil.rmtree(path / "cells/tied-seed0-1000")
    whole = (path / "curves.csv").read_text()
    (path / "curves.csv").write_text(re.sub(r"(cells/tied-seed1-1000,.*)7", r"\g<1>8", whole))
    write_report(path)
    assert (path / "curves.csv").read_text() == whole
    (path / "curves.csv").unlink()
    for _ in range(2):
        write_report(path)
        assert not [*damaged(read_study(path))]
        text = (path / "report.md").read_text()
        assert "**1 run has no learning curve.** Neither a metrics.csv nor rows in curves.csv can be used." in text


def test_a_column_whose_name_was_changed_is_named(tmp_path: Path) -> None:
    """Where it matters: the rows of runs that have their folders are written anew."""

    def told() -> list[str]:
        study = read_study(path)
        return [one.head for one in warnings_of(study, study.contrasts()) if "has a column" in one.head]

    path = make(tmp_path, budgets=("tokens",), tuned=True)
    whole = (path / "results.csv").read_text()
    for name, folders in itertools.product(("optim.lr", "row_hash", "head.head_lr_multiplier"), (True, False)):
        if not folders:
            shutil.rmtree(path / "cells", ignore_errors=True)
            shutil.rmtree(path / "trials", ignore_errors=True)
        other = name[:-1] + "x"
        (path / "results.csv").write_text(whole.replace(name, other, 1))
        assert len(told()) == (not (path / "cells").exists())
        assert all(
            f"/results.csv: has a column {other}, expected settings of this ablation; rest" in one for one in told()
        )
    (path / "results.csv").write_text(whole)
    assert not told()
    write_report(path)
    assert (path / "results.csv").read_text() == whole


def test_the_file_that_says_where_a_run_was_made_is_checked(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",), report=False)
    where = path / "cells/tied-seed0-1000.where"
    write_sealed(where, {"host": "node7", "executor": "ray", "pid": 1})
    write_report(path)
    assert results(path)[0]["host"] == "node7"
    where.write_text(where.read_text().replace("node7", "node6"))
    write_report(path)
    assert "host" not in results(path)[0]
    assert f"**{where}: damaged, its content does not match its checksum; rest" in (path / "report.md").read_text()
    assert f"{where}: damaged" in result_table(path)


def test_an_edited_row_is_no_result(tmp_path: Path) -> None:
    """Where there is a folder, results.csv decides nothing; where there is none, the row is named and kept."""

    def write_again() -> Study:
        study = read_study(path)
        (path / "results.csv").write_text(results_csv(study))
        return study

    path = make(tmp_path, budgets=("tokens",), report=False)
    write_again()
    rows = (path / "results.csv").read_text()
    edited = rows.replace(results(path)[0]["val_loss"], "1.0")
    (path / "results.csv").write_text(edited)
    write_again()
    assert (path / "results.csv").read_text() == rows
    shutil.rmtree(path / "cells")
    assert write_again().rows_unchecked() == 0
    assert (path / "results.csv").read_text() == rows, "rows alone are written as they were read"
    (path / "results.csv").write_text(rows.replace("cells/tied-seed0-1000", "cells/tied-seed9-1000"))
    told = next(changed(read_study(path))).head
    assert told.endswith(
        " of results.csv (cells/tied-seed9-1000) was changed after it was written: its row_hash is another."
    )
    (path / "results.csv").write_text(edited)
    for _ in range(2):
        (broken,) = (row for row in write_again().rows if row.status != "done")
        assert "(cells/tied-seed0-1000) was changed after it was written" in broken.error
        assert {row["run_dir"]: row["val_loss"] for row in results(path)}["cells/tied-seed0-1000"] == "1.0"
    (path / "results.csv").write_text(re.sub(r",[0-9a-f]{16},cells/", ",,cells/", rows))
    study = write_again()
    assert "An earlier version wrote 12 of these rows without a row_hash" in basis(study, study.contrasts())[0]
    assert {row["row_hash"] for row in results(path)} == {""}, "a report vouches for no row that it has only read"


WRITE = """
import sys
from pathlib import Path
from lm.ablation.report import write_report
from lm.ablation.report.answer import basis
from lm.ablation.report.numbers import results_csv
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
