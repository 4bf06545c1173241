"""The list of runs: what differs, conditions, order, CSV, the picture of their curves."""

import csv
import io
import re
import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from lm.config import DataConfig, RunConfig
from lm.folder import newest_run
from lm.lab.commands import runs as command
from lm.lab.runs.find import differing, find_runs
from lm.lab.runs.listing import listing, listing_csv, ordered, where
from lm.lab.runs.sweep import sweep_table
from tests.helpers.ablation_folder import write_run_dir
from tests.helpers.limits import as_nobody
from tests.helpers.refusals import refused
from tests.helpers.tiny import HEADS

LOSSES = {"tied": 3.0, "untied": 3.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four finished runs, one that is not, one that has diverged, and a broken one."""
    top = tmp_path_factory.mktemp("list")
    for head, loss in LOSSES.items():
        for seed in (0, 1):
            result = {"val_loss": loss + seed / 10, "val_bpb": loss / 2 + seed / 10, "head": head, "seed": seed}
            write_run_dir(top / f"runs/{head}-{seed}", RunConfig(head=HEADS[head], seed=seed), result)
    write_run_dir(top / "runs/cells/late", RunConfig(head=HEADS["tied"], seed=2))
    write_run_dir(top / "runs/cells/off", RunConfig(head=HEADS["tied"], seed=3))
    (top / "runs/cells/off.json").write_text('{"status": "diverged", "error": "the loss is nan"}')
    (top / "runs/torn").mkdir()
    (top / "runs/torn/config.yaml").write_text("[[")
    return top / "runs"


def names(found):
    return [run.name for run in found]


def test_the_table_has_what_differs_and_a_line_for_each_broken_run(folder, tmp_path):
    runs = ordered(find_runs(folder), "val_loss")
    text = listing(runs, len(runs))
    head, *rows = [line.split() for line in text.split("\n\n")[0].splitlines()]
    assert head[:7] == ["run", "status", "val_loss", "val_bpb", "head.name", "seed", "val_top1"]
    assert rows[0][:6] == ["tied-0", "finished", "3.0000", "1.5000", "tied", "0"]
    assert "n-gram" in head
    assert {"head.kind", "head.embedding_std", "seed"} < set(differing(runs))
    assert "model.n_layers" not in differing(runs)
    assert "unfinished: step 30 of 40" in text
    assert "diverged: the loss is nan" in text
    shutil.copytree(folder, tmp_path / "runs")
    (tmp_path / "runs/tied-0/result.json").write_text("[]")
    text = listing(find_runs(tmp_path / "runs"), 7)
    assert "tied-0/result.json: " in text
    (tmp_path / "runs/tied-1/config.yaml").write_text("")
    assert "tied-1/config.yaml: not what train wrote" in listing(find_runs(tmp_path / "runs"), 7)
    assert text.endswith("7 runs: 1 unfinished, 1 diverged, 2 broken, 3 finished")


def test_runs_of_different_texts_are_apart(tmp_path):
    for i, (name, loss) in enumerate((("a", 2.0), ("b", 1.0), ("a", 3.0))):
        data = DataConfig(source="text", path=f"{name}.txt")
        write_run_dir(tmp_path / f"run{i}", RunConfig(data=data, seed=i), {"val_loss": loss}, data_hash=name)
    first, second, _ = listing(ordered(find_runs(tmp_path), "val_loss"), 3).split("\n\n")
    assert re.findall(r"^run\d|\w\.txt", first, re.M) == ["b.txt", "run1"]
    assert re.findall(r"^run\d|\w\.txt", second, re.M) == ["a.txt", "run0", "run2"]


def test_conditions_and_order(folder):
    runs = find_runs(folder)
    for conditions, expected in {
        "val_loss <= 3.1": ["tied-0", "tied-1"],
        "head_name != 'tied' and status == 'finished'": ["untied-0", "untied-1"],
        "n_params_by_role_embedding == 1 and run == 'tied-1'": ["tied-1"],
        "val_loss.isna() and status != 'broken'": ["cells/late", "cells/off"],
        "checkpoint_best and seed == 3": [],  # although a broken run has no settings
        "not checkpoint_best and head_untie_at.isna() and seed == 3": ["cells/off"],
    }.items():
        assert sorted(names(where(runs, conditions))) == expected, conditions
    assert names(ordered(runs, "val_loss"))[:4] == ["tied-0", "tied-1", "untied-0", "untied-1"]
    assert names(ordered(runs, "-val_loss"))[:4] == ["untied-1", "untied-0", "tied-1", "tied-0"]
    assert {*names(ordered(runs, "-val_loss"))[4:]} == {"cells/late", "cells/off", "torn"}
    rows = {row["run"]: row for row in csv.DictReader(io.StringIO(listing_csv(runs)))}
    assert (len(rows), rows["cells/off"]["note"], rows["torn"]["val_loss"]) == (7, "the loss is nan", "")
    assert names(ordered(runs, "-head.name"))[0].startswith("untied")
    with refused(r"^sort=-loss: .*did you mean val_loss"):
        ordered(runs, "-loss")


def test_the_picture_has_a_curve_for_each_run(folder, tmp_path, capsys):
    picture = tmp_path / "a picture.svg"
    command.run([f"folder={folder}", "where=status == 'finished'", f"plot={picture}"])
    words = {element.text for element in ElementTree.parse(picture).iter() if element.text}
    assert {"tied seed=0", "tied seed=1", "untied seed=0", "untied seed=1", "training tokens"} <= words
    out, error = capsys.readouterr()
    assert out.endswith("4 runs of 7: 4 finished\n")
    assert error.endswith("a picture.svg: the validation loss of 4 of 4 runs\n")
    for name in ("a picture.svg", "a picture.png"):
        for _ in range(2):  # an earlier picture of runs may be written again
            command.run([f"folder={folder}", f"plot={tmp_path / name}"])
    for key, name in (("plot", "mine.svg"), ("csv", "mine.csv")):
        (tmp_path / name).write_text("mine\nrun,2\n")
        with refused(rf"^{key}=.*{name}: expected a new file"):
            command.run([f"folder={folder}", f"{key}={tmp_path / name}"])
        assert (tmp_path / name).read_text() == "mine\nrun,2\n"


def test_a_picture_of_one_run_needs_no_names(folder, tmp_path):
    command.run([f"folder={folder}", "where=run == 'tied-0'", f"plot={tmp_path / 'curve.svg'}"])
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_the_table_of_a_sweep_has_values_as_they_were_typed():
    result = dict.fromkeys(("seed", "val_loss", "val_bpb", "n_params", "seconds"), 1)
    rows = sweep_table([([f"data.path='{name}'"], result) for name in ("2024_01", "2024_02")])
    assert [row[0] for row in rows] == ["data.path", "2024_01", "2024_02"]


def test_a_config_of_another_program_hides_no_run_below_it(tmp_path):
    write_run_dir(tmp_path / "project/a", RunConfig(head=HEADS["tied"]), {"val_loss": 3.0})
    (tmp_path / "project/config.yaml").write_text("lr: 0.1\n")
    assert "project/a" in names(find_runs(tmp_path))
    write_run_dir(tmp_path / "project/ablation/runs/tied", RunConfig(head=HEADS["tied"]), {"val_loss": 3.0})
    (tmp_path / "project/ablation/ablation.json").touch()
    assert newest_run(tmp_path) == tmp_path / "project/a", "a run of an ablation does not count"


def test_a_folder_that_cannot_be_listed_is_named(open_folder, caplog):
    for name in ("open", "closed/run"):
        write_run_dir(open_folder / name, RunConfig(head=HEADS["tied"]))
    (open_folder / "closed").chmod(0)
    with as_nobody():
        assert names(find_runs(open_folder)) == ["open"]
    assert "closed is left out: Permission denied" in caplog.text
