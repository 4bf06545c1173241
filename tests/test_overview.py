"""Several ablations side by side: the figure, the table and the one results.csv."""

import csv
import shutil
from pathlib import Path

import pytest
from scipy import stats
from test_report import make

from lm.ablation.report.overview import folders, write_overview


@pytest.fixture
def several(tmp_path: Path) -> Path:
    make(tmp_path / "small", begun="2026-02-01 12:00+00:00")
    make(tmp_path / "large_vocabulary", begun="2026-01-31 12:00+00:00", seeds=(0, 1, 2, 3), budgets=("tokens",))
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with open(path / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def contrasts(path: Path) -> dict[tuple[str, str], list[str]]:
    lines = [line.strip("| ").split(" | ") for line in (path / "overview.md").read_text().splitlines()]
    return {(line[0], line[1].partition("]")[0][1:]): line[2:] for line in lines if len(line) > 2 and "](" in line[1]}


def test_every_primary_contrast_of_every_ablation_as_results_csv_gives_it(several: Path) -> None:
    write_overview(several)
    found = contrasts(several)
    assert list(found) == [
        ("untied - tied, at equal tokens", "large_vocabulary"),  # begun first
        ("untied - tied, at equal tokens", "small"),
        ("untied_matched - tied, at equal tokens", "large_vocabulary"),
        ("untied_matched - tied, at equal tokens", "small"),  # at equal FLOPs the same runs, so not again
        ("untied - tied, at equal FLOPs", "small"),
    ]
    for (heading, where), (n, difference, span, unit, bits, _) in found.items():
        arm, budget = heading.partition(" ")[0], heading.rpartition(" ")[2].lower()
        chosen = [row for row in rows(several) if row["ablation"] == where and budget in row["budgets"].split()]
        for column, shown in (("val_loss", difference), ("val_bpb", bits)):
            ours, theirs = ([float(row[column]) for row in chosen if row["arm"] == name] for name in (arm, "tied"))
            test = stats.ttest_rel(ours, theirs)
            low, high = test.confidence_interval(0.95)
            mean = sum(ours) / len(ours) - sum(theirs) / len(theirs)
            assert shown == f"{mean:+.4f}"
            if column == "val_loss":
                assert (int(n), span, unit) == (len(ours), f"{low:+.4f} to {high:+.4f}", "nats per token")
            else:
                assert f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" in (several / "figures/overview.svg").read_text()


def test_one_results_csv_has_every_row_of_all(several: Path) -> None:
    write_overview(several)
    for name in ("small", "large_vocabulary"):
        theirs = [row | {"ablation": name} for row in rows(several / name)]
        assert [row for row in rows(several) if row["ablation"] == name] == theirs


def test_under_version_control_only_plans_and_rows_are_left(several: Path) -> None:
    write_overview(several)
    before = (several / "overview.md").read_text(), rows(several)
    for name in ("small", "large_vocabulary"):
        shutil.rmtree(several / name / "cells")
    write_overview(several)
    assert ((several / "overview.md").read_text(), rows(several)) == before


def test_an_ablation_without_a_pair_is_left_out(several: Path) -> None:
    make(several / "begun", done=lambda arm, seed: arm == "tied")
    assert [path.name for path in folders(several)] == ["begun", "large_vocabulary", "small"]
    write_overview(several)
    assert {name for _, name in contrasts(several)} == {"large_vocabulary", "small"}


def test_an_ablation_is_no_folder_of_ablations(several: Path) -> None:
    assert folders(several / "small") == []
    assert folders(several / "none") == []
