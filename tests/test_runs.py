"""The list of runs: what differs, conditions, order, CSV, the picture of their curves."""

import csv
import errno
import io
import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import HEADS, WHOLE_RESULT, Script

from lm.cli import runs as listing_command
from lm.config import DataConfig, RunConfig, UserError
from lm.runs.find import differing, find_runs
from lm.runs.listing import listing, listing_csv
from lm.runs.query import ordered, where

HASHES = {"data_hash": "text", "tokenizer_hash": "tok", "config_hash": "x"}
LOSSES = {"tied": 3.0, "untied": 3.2}


def write_run(path: Path, run: RunConfig, result: dict[str, Any] | None = None, **hashes: str) -> None:
    path.mkdir(parents=True)
    settings = asdict(run) | {"trainer": {"max_steps": 40}} | HASHES | hashes
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    loss = (result or {}).get("val_loss", 3.5)
    rows = [f"{step},{128 * step},{loss + 1 / step}" for step in (10, 20, 30)]
    (path / "metrics.csv").write_text("\n".join(["step,tokens,val/loss", *rows, ""]))
    if result:
        (path / "result.json").write_text(json.dumps(WHOLE_RESULT | result))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four finished runs, one that is not, one that has diverged, and a broken one."""
    for head, loss in LOSSES.items():
        for seed in (0, 1):
            result = {"val_loss": loss + seed / 10, "val_bpb": loss / 2 + seed / 10, "head": head, "seed": seed}
            write_run(tmp_path / f"runs/{head}-{seed}", RunConfig(head=HEADS[head], seed=seed), result)
    write_run(tmp_path / "runs/cells/late", RunConfig(head=HEADS["tied"], seed=2))
    write_run(tmp_path / "runs/cells/off", RunConfig(head=HEADS["tied"], seed=3))
    (tmp_path / "runs/cells/off.json").write_text('{"status": "diverged", "error": "the loss is nan"}')
    (tmp_path / "runs/torn").mkdir()
    (tmp_path / "runs/torn/config.yaml").write_text("[[")
    return tmp_path / "runs"


def names(found: list[Any]) -> list[str]:
    return [run.name for run in found]


def test_settings_that_are_equal_in_all_runs_are_left_out(folder: Path) -> None:
    runs = ordered(find_runs(folder), "val_loss")
    head, *rows = [line.split() for line in listing(runs, len(runs)).split("\n\n")[0].splitlines()]
    assert head[:4] == ["run", "status", "head.name", "seed"]
    assert head[4:7] == ["val_loss", "val_bpb", "val_top1"]
    assert rows[0][:6] == ["tied-0", "finished", "tied", "0", "3.0000", "1.5000"]
    assert {"head.kind", "head.embedding_std", "seed"} < set(differing(runs))
    assert "model.n_layers" not in differing(runs)


def test_a_part_of_the_head_that_its_name_does_not_say_is_shown(tmp_path: Path) -> None:
    for std in (0.02, 0.04):
        write_run(tmp_path / str(std), RunConfig(head=replace(HEADS["tied"], embedding_std=std)), {"head": "tied"})
    assert listing(find_runs(tmp_path), 2).split()[1] == "head.embedding_std"


def test_a_text_that_has_changed_under_its_path_is_told(tmp_path: Path) -> None:
    for i, path in enumerate(("a.txt", "a.txt", "b.txt")):
        text = RunConfig(data=DataConfig(source="text", path=path))
        write_run(tmp_path / str(i), text, {"head": "tied"}, data_hash=f"{i}")
    runs = find_runs(tmp_path)
    assert differing(runs[:2]) == ["data_hash"]
    assert differing(runs[1:]) == ["data.path"]


def test_the_setting_of_the_loss_is_not_taken_for_a_score(tmp_path: Path) -> None:
    for loss in ("plain", "chunked"):
        write_run(tmp_path / loss, RunConfig(loss=loss), {"head": "tied"})
    runs = find_runs(tmp_path)
    assert "  loss (setting)  val_loss  " in listing(runs, 2)
    assert "run,status,note,loss,val_loss," in listing_csv(runs)


def test_a_hash_is_shortened_in_the_table_only(tmp_path: Path) -> None:
    for i, digest in enumerate(("0123456789abcdef", None)):
        write_run(tmp_path / str(i), RunConfig(init_sha256=digest), {"head": "tied"})
    runs = find_runs(tmp_path)
    assert "01234567 " in listing(runs, 2)
    assert "0123456789abcdef" in listing_csv(runs)


def test_runs_without_a_result_are_one_line_each(folder: Path) -> None:
    runs = find_runs(folder)
    said = listing(runs, len(runs))
    assert "unfinished: step 30 of 40" in said
    assert "diverged: the loss is nan" in said
    (broken,) = [line for line in said.splitlines() if line.startswith("broken: ")]
    assert "torn/config.yaml: " in broken
    assert said.endswith("7 runs: 1 unfinished, 1 diverged, 4 finished, 1 broken")


def test_a_damaged_file_is_a_broken_run(folder: Path) -> None:
    (folder / "tied-0/result.json").write_text("[]")
    (folder / "cells/late.json").mkdir()
    said = listing(find_runs(folder), 7)
    assert "tied-0/result.json: " in said
    assert f"Is a directory: '{folder}/cells/late.json'" in said


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ("val_loss<3.1", ["tied-0"]),
        ("val_loss<=3.1", ["tied-0", "tied-1"]),
        ("head.name=untied, seed>0", ["untied-1"]),
        ("head.name != tied,status=finished", ["untied-0", "untied-1"]),
        ("optim.betas=[0.9,0.95]", ["cells/late", "cells/off", "tied-0", "tied-1", "untied-0", "untied-1"]),
        ("head.embedding_std=2e-2, val_loss>=3.1", ["tied-1"]),
        ("compile=false, head.untie_at=null, seed=3", ["cells/off"]),
        ("n_params_by_role.embedding==1, run=tied-1", ["tied-1"]),
        ("val_loss=3.0", ["tied-0"]),
        ("seed<-1", []),
    ],
)
def test_conditions(folder: Path, conditions: str, found: list[str]) -> None:
    assert sorted(names(where(find_runs(folder), conditions))) == found


def test_the_order(folder: Path) -> None:
    runs = find_runs(folder)
    assert names(ordered(runs, "val_loss"))[:4] == ["tied-0", "tied-1", "untied-0", "untied-1"]
    assert names(ordered(runs, "-val_loss"))[:4] == ["untied-1", "untied-0", "tied-1", "tied-0"]
    assert {*names(ordered(runs, "-val_loss"))[4:]} == {"cells/late", "cells/off", "torn"}
    assert names(ordered(runs, "-head.name"))[0].startswith("untied")


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    with pytest.raises(UserError) as caught:
        listing_command.run(list(line))
    assert capsys.readouterr().out == ""
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("where=val_loss", "where=val_loss: expected a condition such as"),
        ("where=val_loss<low", "where=val_loss<low: low is no number"),
        ("where=lr<3", "where: lr is neither a setting nor a result of these runs; did you mean optim.lr?"),
        ("sort=val_los", "sort: val_los is neither a setting nor a result of these runs; did you mean val_loss?"),
        ("plot=curves.pdf", "plot=curves.pdf: expected a name that ends in .svg or .png"),
        ("plot=none/a.svg", "plot=none/a.svg: no such folder as none"),
        ("csv=none/a.csv", "csv=none/a.csv: no such folder as none"),
        ("folder=none", "folder=none: no such folder"),
        ("folder=runs/cells/late/checkpoints", "folder=runs/cells/late/checkpoints: holds no runs"),
    ],
)
def test_a_mistake_is_one_line(
    word: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cells/late/checkpoints").mkdir()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["runs.py"])
    assert refused(capsys, word).startswith(said)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["runs"]


def test_the_csv_has_every_run_and_every_result(folder: Path) -> None:
    runs = find_runs(folder)
    rows = {row["run"]: row for row in csv.DictReader(io.StringIO(listing_csv(runs)))}
    assert rows.keys() == {run.name for run in runs}
    assert rows["untied-1"]["val_loss"] == "3.3000000000000003"
    assert rows["untied-1"]["head.kind"] == "untied"
    assert rows["untied-1"]["n_params_by_role.embedding"] == "1"
    assert rows["cells/off"]["note"] == "the loss is nan"
    assert rows["torn"]["val_loss"] == ""


def test_names_from_outside_steer_no_terminal(tmp_path: Path) -> None:
    name = "\x1b[2J\x07"
    data = DataConfig(source="text", path=name)
    write_run(tmp_path / "runs" / name, RunConfig(data=data), {"device": name, "val_loss": 1.0})
    (tmp_path / "runs/\x1b[31mtorn").mkdir()
    (tmp_path / "runs/\x1b[31mtorn/config.yaml").write_text("[")
    runs = find_runs(tmp_path / "runs")
    assert not [c for c in listing(runs, len(runs)) if not c.isprintable() and c not in "\n\t"]


# --- the command


def test_the_command_lists_without_anything_heavy(script: Script, folder: Path, tmp_path: Path) -> None:
    line = ["where=status=finished", "sort=-val_loss", "csv=-"]
    answer = script("runs", "runs/", *line, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert answer.returncode == 0, answer.stderr
    assert [row["run"] for row in csv.DictReader(io.StringIO(answer.stdout))] == names(
        ordered(where(find_runs(folder), "status=finished"), "-val_loss")
    )
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "lm.runs.find" in imported
    assert not {"torch", "lightning", "numpy", "matplotlib", "scipy", "datasets"} & imported


Draw = Callable[[str], Path]


@pytest.fixture
def draw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(sys, "argv", ["runs.py"])

    def run(name: str) -> Path:
        listing_command.run(["where=status=finished", f"plot={name}"])
        return folder.parent / name

    return run


def test_the_picture_has_a_curve_for_each_run(draw: Draw, capsys: pytest.CaptureFixture[str]) -> None:
    picture = ElementTree.parse(draw("a picture.svg"))
    words = {element.text for element in picture.iter() if element.text}
    assert {"tied seed=0", "tied seed=1", "untied seed=0", "untied seed=1", "training tokens"} <= words
    out, error = capsys.readouterr()
    assert out.endswith("4 runs of 7: 4 finished\n")
    assert error == "a picture.svg: the validation loss of 4 of 4 runs\n"


def test_the_picture_can_be_a_bitmap(draw: Draw) -> None:
    assert draw("curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_listed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scandir = os.scandir

    def closed(path: Any) -> Any:
        if str(path).endswith("cells"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert len(find_runs(folder)) == 5
    assert "cells is left out: Permission denied" in caplog.text
