"""Several ablations side by side: the figure, the table and the one results.csv."""

import csv
import json
import math
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import some
from lm.ablation.judge.power import Tuning
from lm.ablation.judge.statistics import holm
from lm.ablation.judge.study import read_study
from lm.ablation.report.across import Apart, Shown, all_apart, apart
from lm.ablation.report.across import shown as shown_of
from lm.ablation.report.overview import folders, grouped, overview, write_overview
from lm.report.plots import short
from markdown_it import MarkdownIt
from scipy import stats
from test_report import make

from lm.ablation.report import write_report
from lm.ablation.summary import overview_table
from lm.config import UserError

FIRST, SECOND = "wide vocabulary", "small"


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """One begun later than the other, with runs that serve two budgets; the other with bytes of another length."""
    make(tmp_path / SECOND, begun="2026-02-01 12:00+00:00", tuned=True)
    make(
        tmp_path / FIRST,
        begun="2026-01-31 12:00+00:00",
        seeds=(0, 1, 2, 3),
        budgets=("tokens",),
        equivalence_margin=0.02,
        report=False,
    )
    for path in (tmp_path / FIRST).glob("cells/*/result.json"):
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"val_bpb": result["val_loss"] / 3 + result["seed"] % 2 / 1000}))
    write_report(tmp_path / FIRST)
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with open(path / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def distribution(samples: list[list[float]], noise: list[tuple[float, float]]) -> Any:
    """Of the true difference of two samples, or the true mean of one; by the formulas, with Satterthwaite's freedom.

    `noise`: further variances, each with its df.
    """
    parts = [*((variance(values) / len(values), len(values) - 1) for values in samples), *noise]
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / df for part, df in parts)
    return stats.t(freedom, fmean(samples[0]) - sum(map(fmean, samples[1:])), total**0.5)


def comparisons(path: Path) -> dict[tuple[str, str], list[str]]:
    lines = [line[2:-2].split(" | ") for line in (path / "overview.md").read_text().splitlines()]
    named = [(line, re.sub(r"\[(.+)\]\(.+\)", r"\1", line[1])) for line in lines if len(line) > 2]
    return {(line[0], name): line[2:] for line, name in named if name in (FIRST, SECOND)}


def test_every_primary_comparison_of_every_ablation_as_results_csv_gives_it(several: Path) -> None:
    write_overview(several)
    figure, found = (several / "figures/overview.svg").read_text(), comparisons(several)
    assert list(found) == [
        ("untied - tied, at equal tokens", FIRST),  # begun first
        ("untied - tied, at equal tokens", SECOND),
        ("untied_matched - tied, at equal tokens", FIRST),
        ("untied_matched - tied, at equal tokens", SECOND),  # and the same runs at equal FLOPs
        ("untied - tied, at equal FLOPs", SECOND),
    ]
    bits_of: dict[str, list[float]] = {}
    ps: dict[str, list[float]] = {"expected": [], "shown": []}
    for (heading, where), (verdict, difference, span, unit, margin, n, bits, than_first, p) in found.items():
        arm, budget = heading.partition(" ")[0], heading.rpartition(" ")[2].lower()
        chosen = [row for row in rows(several) if row["ablation"] == where and budget in row["budgets"].split()]
        report = json.loads((several / where / "report.json").read_text())["contrasts"]
        (own,) = (one for one in report if (one["arm"], one["budget"]) == (arm, budget))
        assert (verdict, margin) == (own["verdict"], "0.01" if where == SECOND else "0.02")
        for column, shown in (("val_loss", difference), ("val_bpb", bits)):
            ours, theirs = ([float(row[column]) for row in chosen if row["arm"] == name] for name in (arm, "tied"))
            low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
            here = [one - other for one, other in zip(ours, theirs, strict=True)]
            noise = (
                fmean(ours) / fmean(float(row["val_loss"]) for row in chosen if row["arm"] == arm) * own["tuning_sd"]
            )
            if noise:
                error = math.hypot(stats.sem(here), noise)
                low, high = stats.t.interval(0.95, own["df"], fmean(here), error)
            mean = sum(ours) / len(ours) - sum(theirs) / len(theirs)
            assert shown == f"{mean:+.4f}"
            if column == "val_loss":
                assert (int(n), span, unit) == (len(ours), f"{low:+.4f} to {high:+.4f}", "nats per token")
            else:
                assert f">{mean:+.4f} [{low:+.4f}, {high:+.4f}]<" in figure
                assert f">{verdict}<" in figure
                first = bits_of.setdefault(heading, here)
                runs = read_study(several / where).contrasts()
                dfs = [run.tuning.df for run in runs if run.tuning and (run.arm, run.budget) == (arm, budget)]
                if here is first:
                    assert (than_first, p) == ("", "")
                    continue
                apart = [ours - theirs for ours, theirs in zip(here, first, strict=False)]  # of the seeds of both
                truth = distribution([apart], [(noise**2, df) for df in dfs])
                low, high = truth.interval(0.95)
                assert than_first == f"{fmean(apart):+.4f} [{low:+.4f}, {high:+.4f}]"
                ps["expected"].append(2 * min(truth.cdf(0), truth.sf(0)))
                ps["shown"].append(float(p.replace("<", "")))
    lower, higher = sorted(ps["expected"])
    corrected = {lower: min(1, 2 * lower), higher: max(higher, min(1, 2 * lower))}
    assert ps["shown"] == pytest.approx([corrected[p] for p in ps["expected"]], abs=0.0006)
    assert all(f">{text}<" in figure for pair in found for text in pair)
    assert "bits per byte (left is better)" in figure


def apart_by(ours: dict[int, float], theirs: dict[int, float], noise: Tuning | None = None) -> Apart:
    study: Any = None
    one, first = (Shown(Path(), study, study, study, values, noise) for values in (ours, theirs))
    return apart(one, first)


def test_ablations_that_share_their_seeds_are_paired_and_others_are_not() -> None:
    values = [0.1, 0.5, 0.2, 0.9, 0.4]
    first, shifted = dict(enumerate(values)), {seed: 0.3 + value + seed / 1000 for seed, value in enumerate(values)}
    same = apart_by(shifted, first)
    truth = distribution([[0.3 + seed / 1000 for seed in range(5)]], [])
    assert same.by_seed
    assert (same.low, same.high) == pytest.approx(truth.interval(0.95))
    other = apart_by({seed + 3: value for seed, value in shifted.items()}, first)  # two seeds of five are the same
    truth = distribution([[*shifted.values()], values], [])
    assert not other.by_seed
    assert (other.low, other.high) == pytest.approx(truth.interval(0.95))
    assert other.p == pytest.approx(2 * truth.cdf(0))
    noisy = apart_by(shifted, first, Tuning(0.01, 4))
    assert (noisy.high or 0) - (noisy.low or 0) > 2 * 2 * 0.02**0.5  # of both
    assert apart_by({0: 1.0}, first).low is None
    assert (apart_by(first, first).mean, apart_by(first, first).p) == (0, 1)


def test_the_number_of_differences_is_corrected_for() -> None:
    rng = random.Random(0)
    group = []
    for i in range(5):
        found: Any = SimpleNamespace(folder=Path(str(i)), contrast=SimpleNamespace(runs="r"), tuning=None)
        found.differences = {seed: rng.gauss(0, 1) + i for seed in range(5)}
        group.append(found)
    everything = list(all_apart([group[:3], group[3:]]).values())
    assert [one.p_adjusted for one in everything] == holm([one.p or 0 for one in everything])
    assert len(everything) == 3


def test_the_terminal_shows_the_primary_comparisons_as_a_table(several: Path) -> None:
    head, *lines, _, end = overview_table(several, write_overview(several)).splitlines()
    assert head.split()[:3] == ["ablation", "arm", "baseline"]
    assert [line.rpartition("untied")[0].strip() for line in lines][:1] == [FIRST]
    assert not any("|" in line or "`" in line for line in [head, *lines])
    assert end == f"2 ablations; {several / 'overview.md'}"


@pytest.mark.parametrize("both", [False, True])
def test_intervals_are_called_by_their_level(both: bool, tmp_path: Path) -> None:
    study = read_study(make(tmp_path / "other", budgets=("tokens",), report=False))
    with_looks = replace(study, record=replace(study.record, looks=[2, 3]))
    studies = {tmp_path / "one": with_looks, tmp_path / "other": with_looks if both else study}
    groups = grouped(one for folder, study in studies.items() for one in shown_of(folder, study))
    ci = with_looks.ci
    assert ci != "95 % CI"
    written = overview("?", studies, groups).partition("overview.svg)")[2]
    for text in (written, overview_table(tmp_path, studies)):
        head, *lines = [line for line in text.splitlines() if re.search("difference |untied", line)][:5]
        assert (ci in head, "95 % CI" in head) == (both, False)
        for line in lines:
            name = re.findall(r"\bone\b|\bother\b", line)[0]
            assert ("(" in line) == (not both), line
            assert both or f"({ci if name == 'one' else '95 % CI'})" in line


def test_arms_with_names_that_look_alike_are_not_compared(tmp_path: Path) -> None:
    make(tmp_path / "one", budgets=("tokens",), report=False)
    (study,) = write_overview(tmp_path).values()
    long = [f"an_arm_with_a_long_name_{i}_which_ends_like_the_other" for i in range(2)]
    assert short(long[0]) == short(long[1])
    contrasts = study.contrasts()
    for one, name in zip(contrasts, long, strict=False):
        one.arm = name
    groups = grouped(Shown(Path(), study, one, one.comparison, {}, None) for one in contrasts[:2])
    assert [[one.contrast.arm for one in group] for group in groups.values()] == [[long[0]], [long[1]]]


@pytest.mark.slow
def test_links_lead_to_the_reports_that_there_are(several: Path) -> None:
    write_overview(several)
    assert {path.name for path in several.iterdir()} >= {"overview.md", "results.csv", "figures"}
    html = MarkdownIt("commonmark").enable("table").render((several / "overview.md").read_text())
    assert set(re.findall('href="([^"]+)"', html)) == {"wide%20vocabulary/report.md", "small/report.md"}
    (several / SECOND / "report.md").unlink()
    write_overview(several)
    assert "small/report.md" not in (several / "overview.md").read_text()


@pytest.mark.slow
def test_one_results_csv_has_every_row_and_column_of_all(several: Path) -> None:
    write_overview(several)
    assert "optim.lr" in rows(several)[0]  # which only the tuned one has
    for name in (FIRST, SECOND):
        theirs = [row | {"ablation": name} for row in rows(several / name)]
        ours = [row for row in rows(several) if row["ablation"] == name]
        assert [{key: row[key] for key in theirs[0]} for row in ours] == theirs


@pytest.mark.slow
def test_under_version_control_only_plans_and_rows_are_left(several: Path) -> None:
    write_overview(several)
    before = (several / "overview.md").read_text(), rows(several)
    for name in (FIRST, SECOND):
        shutil.rmtree(several / name / "cells")
        shutil.rmtree(several / name / "trials", ignore_errors=True)
    write_overview(several)
    assert ((several / "overview.md").read_text(), rows(several)) == before


def test_a_divergence_is_remembered_where_only_rows_are_left(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"broken\xff")  # of a stranger: a name that is not UTF-8
    make(folder, broken=True)
    write_overview(tmp_path)
    before = (tmp_path / "overview.md").read_text(), rows(tmp_path)
    assert {row["status"] for row in rows(tmp_path)} == {"done", "diverged", "failed", "missing"}
    shutil.rmtree(folder / "cells")
    write_overview(tmp_path)
    assert ((tmp_path / "overview.md").read_text(), rows(tmp_path)) == before


def test_what_weakens_an_answer_and_what_is_left_out_is_said(several: Path) -> None:
    make(several / "begun", done=lambda arm, seed: arm == "tied")
    make(several / "top1", metric="val_top1")
    make(several / "all", primary=[], done=lambda arm, seed: seed < 2)
    write_overview(several)
    text = (several / "overview.md").read_text()
    assert "- **begun** is not shown: no pair of runs yet." in text
    assert "- **top1** is not shown: its metric is val_top1." in text
    assert "- **all:** " in text
    assert "runs are done." in text
    assert "tied_naive - tied" in text  # where none is primary, all are shown


@pytest.mark.slow
def test_what_differs_between_the_conditions_is_told(several: Path) -> None:
    write_overview(several)
    assert "Settings that differ" not in (several / "overview.md").read_text()  # nothing does
    record = json.loads((several / SECOND / "ablation.json").read_text())
    record["arms"]["tied"]["settings"] |= {"trainer.max_steps": 60, "head.untie_at": 0.5, "logger": {}}
    (several / SECOND / "ablation.json").write_text(json.dumps(record))
    write_overview(several)
    text = (several / "overview.md").read_text()
    assert f"| {FIRST} | - |\n| {SECOND} | `head.untie_at=0.5` `trainer.max_steps=60` |" in text


def test_nothing_to_show(tmp_path: Path) -> None:
    make(tmp_path / "begun", done=lambda arm, seed: False)
    write_overview(tmp_path)
    assert "overview.svg" not in (tmp_path / "overview.md").read_text()


def test_an_ablation_is_no_folder_of_ablations(several: Path) -> None:
    shutil.copytree(several / SECOND, several / SECOND / "copy")
    assert folders(several / SECOND) == []
    assert folders(several / "none") == []
    assert [path.name for path in folders(several)] == [SECOND, FIRST]


@pytest.mark.parametrize("record", some(["{}", "[]", '{"cells": [], "arms": {}}'], 3))
def test_a_damaged_record_is_named(several: Path, record: str) -> None:
    (several / SECOND / "ablation.json").write_text(record)
    with pytest.raises(UserError, match=r"small/ablation\.json: .*"):
        write_overview(several)
