"""The report, from folders made by hand: whole, broken, just begun, on the way; what it says and what it shows."""

import csv
import html
import json
import math
import random
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from conftest import WHOLE_RESULT, some
from hypothesis import given
from hypothesis import strategies as st
from lm.ablation.judge.statistics import judge
from lm.ablation.judge.study import read_study
from lm.ablation.report.again import again_section
from lm.ablation.report.arms import matches_row, matches_section
from lm.ablation.report.conditions import made_with
from lm.ablation.report.diagnostics import SIDES
from lm.ablation.report.forest import Line, draw_forest
from lm.ablation.report.numbers import results as all_rows
from lm.ablation.report.tuning import draw_search
from lm.ablation.report.warnings import progress, warnings_of
from lm.ablation.seen import remember, verdicts_seen
from lm.report.page import code, fence, page, plain, table
from lm.report.plots import looks, panels
from markdown_it import MarkdownIt
from scipy import stats

from lm.ablation import seen as seen_module
from lm.ablation.record import SearchRecord, TrialRecord, look, read_record
from lm.ablation.report import write_report
from lm.ablation.summary import result_table
from lm.config import UserError
from lm.training.diagnostics import COLUMNS as DIAGNOSTICS

ARMS = {"tied": 3.50, "untied": 3.53, "untied_matched": 3.502, "tied_naive": 4.4}  # and what they come to
KNOBS = {arm: ["optim.lr", "head.head_lr_multiplier"] if "untied" in arm else ["optim.lr"] for arm in ARMS}
EVIL = "</code><script>alert(1)</script>\n```\n| a | b |\n|---|---|\n<img src=http://evil.example/x>"
PROMPTS = ["def f(x, y):\n    return", f"# {EVIL}"]
METRICS = ("step", "tokens", "lr", "train/loss", "train/grad_norm", "val/loss", "val/bpb", "val/top1", "val/tokens")
WHOLE = 89_999  # tokens of the validation text that are scored


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def lines(*rows: Any) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def write_run(path: Path, arm: str, seed: int, loss: float, steps: int, diagnostics: bool = False) -> None:
    chance = random.Random(f"{arm} {seed} {steps}")
    continuations = [" x + y\n" + arm[:3] * 4, arm + EVIL]
    result = WHOLE_RESULT | {
        "val_loss": loss,
        "val_bpb": loss / 2.23,
        "val_top1": 0.42 - loss / 30,
        "n_params": 1_017_472,
        "flops_per_token": 6_000_000,
        "steps": steps,
        "tokens": steps * 1024,
        "seconds": 0.09 * steps * chance.uniform(0.95, 1.05),
        "tokens_per_second": 11_000.0,
        "seed": seed,
        "resumed_from": [40] if seed == 1 else [],
        "config_hash": "c" * 64,
        "data_hash": "d" * 64,
        "tokenizer_hash": "t" * 64,
        "threads": 1,
        "device": "cpu",
        "precision": "32-true",
        "python": "3.11.7",
        "versions": {"torch": "2.13.0"},
        "samples": [{"prompt": p, "continuation": c} for p, c in zip(PROMPTS, continuations, strict=True)],
    }
    write(path / "result.json", result)
    metrics, inside = [], []
    for step in range(100, steps + 1, 100):
        now = loss + 4 * math.exp(-5 * step / steps) + chance.gauss(0, 0.01)
        metrics.append([step, step * 1024, 0.001, now - 0.1, 1.2, now, now / 2.23, 0.42 - now / 30, WHOLE])
        sides = [0.4 + chance.random() / 9, 1.5 + chance.random(), "nan" if step == 100 else chance.uniform(-0.1, 0.1)]
        bands = [now + i - 2 + 0.02 * i * ("untied" in arm) + chance.gauss(0, 0.01) for i in range(5)]
        inside.append([step, step * 1024, 0.3, *sides, *bands, *(1.0 + i for i in range(10))])
    write(path / "metrics.csv", lines(METRICS, *metrics))
    if diagnostics:
        write(path / "diagnostics.csv", lines(DIAGNOSTICS, *inside))


def write_search(path: Path, arm: str, diverged: bool) -> dict[str, Any]:
    points = [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0)] + [(1.0, 0.5), (1.0, 2.0)] * (len(KNOBS[arm]) == 2)
    trials = []
    for lr, head in points:
        values = dict(zip(KNOBS[arm], (0.003 * lr, 0.004 * head), strict=False))
        loss, name = (
            ARMS[arm] + 0.1 * math.log2(lr) ** 2 + 0.002 * math.log2(head),
            f"trials/{arm}-seed1000-{lr}-{head}",
        )
        lost = diverged and lr == 2.0
        if lost:
            write(path / f"{name}.json", {"status": "diverged", "error": "the loss is nan"})
        else:
            write_run(path / name, arm, 1000, loss, 400)
        trials.append({"values": values, "score": None if lost else loss, "run_dirs": [name]})
    return {
        "hyperparameters": KNOBS[arm],
        "seeds": [1000],
        "inside": {setting: setting == "optim.lr" or (None if arm == "untied" else False) for setting in KNOBS[arm]},
        "trials": trials,
    }


def write_cell(path: Path, arm: str, seed: int, steps: int, broken: bool, diagnostics: bool) -> None:
    chance = random.Random(f"{arm} {seed} {steps}")
    loss = ARMS[arm] + 0.01 * seed + chance.gauss(0, 0.002) + (1000 - steps) / 4000
    outcome = path.with_name(path.name + ".json")
    if broken and (arm, seed) == ("tied_naive", 2):
        write(outcome, {"status": "diverged", "error": "the loss is nan at step 7"})
    elif broken and (arm, seed) == ("tied_naive", 1):
        write(outcome, {"status": "failed", "error": "RuntimeError: a | <b>crack</b>"})
    elif broken and (arm, seed) == ("untied_matched", 2):
        write(path / "metrics.csv", lines(("step", "tokens"), (70, 71680)))
    else:
        write_run(path, arm, seed, loss, steps, diagnostics)


def make(
    path: Path,
    done: Callable[[str, int], bool] = lambda arm, seed: True,
    seeds: tuple[int, ...] = (0, 1, 2),
    budgets: tuple[str, ...] = ("tokens", "flops"),
    tuned: bool = False,
    broken: bool = False,
    diagnostics: bool = False,
    report: bool = True,
    every: int = 100,
    **record: Any,
) -> Path:
    """An ablation's folder: four arms, of which untied trains for fewer steps at equal FLOPs."""
    steps = {
        arm: {"own": 1000, "tokens": 1000, "time": 1000, "flops": 900 if arm == "untied" else 1000} for arm in ARMS
    }
    cells = [
        {"arm": arm, "seed": seed, "budget": budget, "steps": steps[arm][budget]}
        | {"run_dir": f"cells/{arm}-seed{seed}-{steps[arm][budget]}", "config_hash": "c" * 64}
        for arm in ARMS
        for budget in budgets
        for seed in seeds
    ]
    for cell in cells:
        if done(cell["arm"], cell["seed"]):
            write_cell(path / cell["run_dir"], cell["arm"], cell["seed"], cell["steps"], broken, diagnostics)
    arms = {
        arm: {
            "words": [f"head={arm.partition('_')[0]}", *["model.n_layers=3"] * (arm == "untied_matched")],
            "matched": {"model.d_ff": 200} if arm == "untied_matched" else {},
            "tuned": dict(zip(KNOBS[arm], (0.003, 0.002), strict=False)) if tuned else {},
            "n_params": 1_017_472,
            "flops_per_token": 6_000_000,
            "tokens_per_step": 1024,
            "seconds_per_step": 0.09,
            "steps": steps[arm],
            "vocab_size": 2048,
            "train_tokens": 4_000_000,
            "val_tokens": 90_000,
            "identity": {"data_hash": "d" * 64, "tokenizer_hash": "t" * 64, "source_hash": "s" * 64},
            "settings": {"head.untie_at": i / 4, "validation.every": every},
        }
        for i, arm in enumerate(ARMS)
    }
    content: dict[str, Any] = {
        "name": "tying",
        "question": "Should a small model tie its LM head?",
        "baseline": "tied",
        "seeds": list(seeds),
        "equivalence_margin": 0.01,
        "metric": "val_loss",
        "primary": ["untied", "untied_matched"],
        "match_parameters": {"untied_matched": "model.d_ff"},
        "seed_offsets": {},
        "budgets": list(budgets),
        "tune": {"trials": 5 if tuned else 0, "seeds": [1000]},
        "plot_over": None,
        "overrides": [],
        "common": ["trainer.max_steps=1000"],
        "contrasts": {arm: "tied" for arm in ARMS if arm != "tied"},
        "command": "python scripts/ablate.py ablation=tying 'a=``x``'",
        "threads": 1,
        "workers": 2,
        "machine": "Linux x86_64, 2 cores, 0 GPUs",
        "python": "3.11.7",
        "versions": {"torch": "2.13.0"},
        "arms": arms,
        "cells": cells,
        "tuning_done": True,
        "untuned": {},
        "begun": "2026-01-31 12:00+00:00",
        "cautions": [["The warm-up of tied is long:", "its rate never rises above 55% of optim.lr."]],
    }
    if tuned:
        content["searches"] = {arm: write_search(path, arm, broken and arm == "untied") for arm in ARMS}
    write(path / "ablation.json", content | record)
    if report:
        write_report(path)
    return path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("full"), tuned=True, broken=True, diagnostics=True, plot_over="head.untie_at")


def markdown(path: Path) -> str:
    return (path / "report.md").read_text()


def headings(path: Path) -> list[str]:
    return re.findall(r"^## (.*)$", re.sub(r"^(`{3,})\n.*?\n\1$", "", markdown(path), flags=re.M | re.S), flags=re.M)


def numbers(path: Path) -> dict[str, Any]:
    """report.json, which must be JSON in the strict sense."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads((path / "report.json").read_text(), parse_constant=refuse)


def results(path: Path) -> list[dict[str, str]]:
    with open(path / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_all_sections_in_order_and_every_figure_where_it_is_shown(full: Path) -> None:
    assert headings(full) == [
        "Comparisons",
        "Results per seed",
        "Arms",
        "Learning curves",
        "Tuning",
        "Comparisons over head.untie_at",
        "Training diagnostics",
        "Samples",
        "Runs without a result",
        "How to reproduce this",
    ]
    shown = re.findall(r"!\[.+\]\((figures/\w+\.svg)\)", markdown(full))
    assert shown == [f"figures/{name}.svg" for name in FIGURES]
    for name in shown:
        assert ET.parse(full / name).getroot().tag.endswith("svg")
    assert (full / "report.html").read_text().count("<svg ") == len(FIGURES)


FIGURES = ("forest", "seeds", "learning", "tuning", "setting", "bands", "gradients")


def test_the_answer_comes_first_and_what_weakens_it_at_once(full: Path) -> None:
    head = markdown(full).partition("## Comparisons")[0]
    title, quote = head.splitlines()[0], [line[2:] for line in head.splitlines() if line.startswith("> ")]
    assert title == "# Should a small model tie its LM head?"
    assert quote[0] == "**Results so far:**"
    said = numbers(full)["verdict"]
    assert [line.replace("**", "").removeprefix("- ") for line in quote[1:]] == [plain(line) for line in said]
    assert [line.partition(":")[0] for line in quote[1:]] == [
        "- **At equal tokens, untied is worse than tied",
        "- **At equal tokens and FLOPs, untied_matched compared with tied is undecided",  # by the same runs
        "- **At equal FLOPs, untied is worse than tied",
    ]
    for note in ("12 of 15 runs are done.", "1 run diverged (tied_naive).", "1 run failed (tied_naive)."):
        assert f"**{note}**" in head
    assert "edge of the search range: untied_matched (head.head_lr_multiplier).**" in head
    assert "**Some hyperparameters were not varied: untied (head.head_lr_multiplier).**" in head
    assert "**The warm-up of tied is long:**" in head
    assert "3 seeds" in head
    assert "equivalence margin, the smallest difference that matters, is 0.01." in head
    assert "search trials on seed 1000; results use other seeds, but the same validation text." in head
    assert (
        "count the seeds and, where there are enough search trials, that each arm's settings may not be its best"
        in head
    )
    assert "**The noise of tuning is not counted: " in head


def test_comparisons_are_those_that_results_csv_gives(full: Path) -> None:
    scores = {
        (row["arm"], budget, int(row["seed"])): float(row["val_loss"])
        for row in results(full)
        if row["purpose"] == "reported" and row["status"] == "done"
        for budget in row["budgets"].split()
    }
    found = numbers(full)["contrasts"]
    assert [(one["arm"], one["budget"]) for one in found] == [
        (arm, budget) for budget in ("tokens", "flops") for arm in ("untied", "untied_matched", "tied_naive")
    ]
    for one in found:
        seeds = [s for s in (0, 1, 2) if (one["arm"], one["budget"], s) in scores]
        ours = np.array([scores[one["arm"], one["budget"], seed] for seed in seeds])
        theirs = np.array([scores["tied", one["budget"], seed] for seed in seeds])
        assert (one["n_seeds"], one["seeds"]) == (len(seeds), seeds)
        assert sorted(seeds + one["lost_seeds"]) == [0, 1, 2]
        assert one["mean_difference"] == pytest.approx((ours - theirs).mean())
        assert one["wins"] == (ours < theirs).sum()
        if len(seeds) == 1:
            assert one["sd"] is one["ci_low"] is one["p"] is one["p_adjusted"] is None
            continue
        error = math.hypot(stats.sem(ours - theirs), one["tuning_sd"])
        truth = stats.t(one["df"], (ours - theirs).mean(), error)
        assert (one["df"] == len(seeds) - 1) == (one["tuning_sd"] == 0)
        assert (one["ci_low"], one["ci_high"]) == pytest.approx(truth.interval(0.95))
        assert one["p"] == pytest.approx(2 * min(truth.cdf(0), truth.sf(0)))
        assert one["p_equivalent"] == pytest.approx(max(truth.cdf(-0.01), truth.sf(0.01)))
    assert any(one["tuning_sd"] for one in found)
    ps = sorted({one["p"] for one in found if one["primary"]})  # runs that serve two budgets are one comparison
    smallest = next(one for one in found if one["p"] == ps[0])
    assert smallest["p_adjusted"] == pytest.approx(len(ps) * ps[0])
    assert [one["primary"] for one in found] == [True, True, False] * 2


def test_the_forest_plot_repeats_a_comparison_only_if_its_runs_differ(tmp_path: Path) -> None:
    path = make(tmp_path)  # at equal FLOPs only the runs of untied differ
    text = re.findall(r"<text[^>]*>([^<]*)</text>", (path / "figures/forest.svg").read_text())
    later = text[text.index("At equal FLOPs") :]
    assert any("untied" in word for word in later)
    others = {one["arm"] for one in numbers(path)["contrasts"]} - {"untied"}
    assert others
    assert others <= set(text) - set(later)


def test_the_main_table_has_few_columns_and_the_statistics_follow(full: Path) -> None:
    """Six columns fit a telephone; a table for each of the two budgets."""
    text = markdown(full).partition("### Test statistics")
    assert text[0].count("| arm | difference | 95 % CI | verdict | seeds | baseline |") == 2
    assert (
        text[2].count("| arm | p | p (Holm) | p equivalence (Holm) | minimum detectable effect | per-seed wins |") == 2
    )


def test_labels_of_the_forest_plot_are_clear_of_the_line_at_zero() -> None:
    groups = {"At equal tokens": [Line(arm, judge({arm: [0.1, 0.2]}, 0.01)[arm]) for arm in ARMS]}
    (axes,) = draw_forest([*groups.items()], 0.01, "difference").axes
    zeros = [sorted(map(float, line.get_ydata())) for line in axes.get_lines() if set(line.get_xdata()) == {0}]
    assert len(zeros) == len(ARMS)
    half = 0.15  # of a label's height, in rows
    for text in axes.texts:
        assert not any(
            low < text.get_position()[1] + half and text.get_position()[1] - half < high for low, high in zeros
        )


def test_means_and_costs_are_those_of_results_csv(full: Path) -> None:
    rows, found = results(full), numbers(full)
    for one in found["arms"]:
        values = [
            float(row["val_loss"])
            for row in rows
            if (row["arm"], row["status"]) == (one["arm"], "done") and one["budget"] in row["budgets"].split()
        ]
        assert one["n"] == len(values)
        assert one["mean"] == pytest.approx(np.mean(values))
        assert one["sd"] == (pytest.approx(np.std(values, ddof=1)) if len(values) > 1 else None)
    for arm, cost in found["cost"].items():
        for kind, purpose in (("reported", "reported"), ("trials", "trial")):
            mine = [float(row["seconds"] or 0) for row in rows if (row["arm"], row["purpose"]) == (arm, purpose)]
            assert cost[kind] == pytest.approx(sum(mine))


def test_results_csv_has_a_row_for_each_run(full: Path) -> None:
    rows = results(full)
    assert len(rows) == 15 + 3 + 5 + 5 + 3  # of the trials, tied heads have one setting to tune
    assert [row["status"] for row in rows].count("missing") == 1
    shared = next(row for row in rows if row["run_dir"] == "cells/tied-seed0-1000")
    assert (shared["budgets"], shared["optim.lr"], shared["head.head_lr_multiplier"]) == ("tokens flops", "0.003", "")
    assert (shared["source_hash"], shared["torch"], shared["threads"]) == ("s" * 64, "2.13.0", "1")
    trial = next(row for row in rows if row["run_dir"] == "trials/untied-seed1000-1.0-0.5")
    assert (trial["purpose"], trial["seed"], trial["head.head_lr_multiplier"]) == ("trial", "1000", "0.002")


def test_runs_without_a_result_are_listed_with_their_reason(full: Path) -> None:
    section = markdown(full).partition("## Runs without a result")[2]
    assert r"| tied_naive | 1 | equal tokens and FLOPs | failed | RuntimeError: a \| \<b\>crack\</b\> |" in section
    assert "| tied_naive | 2 | equal tokens and FLOPs | diverged | the loss is nan at step 7 |" in section
    assert "| untied | 1000 | search trial | diverged | the loss is nan |" in section
    assert "| untied_matched | 2 | equal tokens and FLOPs | step 70 of 1,000, running or interrupted |" in section
    cells = numbers(full)["cells"]
    assert (cells["done"], cells["failed"], cells["diverged"], cells["missing"]) == (12, 1, 1, 1)
    assert {one["error"] for one in cells["reasons"]} == {"RuntimeError: a | <b>crack</b>", "the loss is nan at step 7"}


class Page(HTMLParser):
    """The tags of a page, its ids, its addresses, the texts of its blocks of code; refuses tags that do not nest."""

    VOID = ("meta", "br", "hr", "img", "link", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.blocks: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [tag] * (tag not in self.VOID)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name.endswith(("src", "href"))]
        self.addresses += re.findall(r"url\((.*?)\)", " ".join(value or "" for _, value in attrs))
        self.blocks += [""] * (tag == "pre")
        self.cells += [""] * (tag == "td")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.blocks[-1] += data
        if "td" in self.open:
            self.cells[-1] += data


def test_the_page_stands_alone(full: Path) -> None:
    text = (full / "report.html").read_text()
    found = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert found.addresses
    assert all(one.startswith("#") and one[1:] in found.ids for one in found.addresses)
    assert len(found.ids) == len(set(found.ids))
    assert {"comparisons", "tuning"} <= set(found.ids)
    assert text.startswith("<!DOCTYPE html>")
    assert '<html lang="en">' in text
    assert "@import" not in text
    assert "<td><strong>untied_<wbr>matched</strong></td>" in text  # so that a column can be narrow
    assert text.count('role="img" aria-label="') == len(FIGURES)


def test_texts_of_models_stay_in_their_blocks(full: Path) -> None:
    found = Page((full / "report.html").read_text())
    assert f"# {EVIL}" in found.blocks
    assert f"tied▶_naive{EVIL}" in found.blocks
    assert not {"a", " a ", "RuntimeError: a "} & set(found.cells)
    assert "RuntimeError: a | <b>crack</b>" in found.cells
    assert "python scripts/ablate.py ablation=tying 'a=``x``'" in found.blocks


def test_continuations_say_where_they_leave_the_baseline(full: Path) -> None:
    section = markdown(full).partition("## Samples")[2]
    assert "**untied**: the same as tied for 7 characters, then:\n\n```\n x + y\n▶untuntuntunt\n```" in section
    assert "**tied_naive**: the same as tied." in section
    assert "**untied**: differs from tied from the first character:" in section


def test_the_command_that_updates_a_report_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "my folder", budgets=("tokens",), report=False)
    for place, said in ((tmp_path, "my folder"), (path, "."), (tmp_path.parent, f"{tmp_path.name}/my folder")):
        monkeypatch.chdir(place)
        word = shlex.quote(f"output_dir={said}")
        assert again_section(read_study(path))[-1] == f"```\npython scripts/report.py {word}\n```"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "'output_dir=my folder'" in again_section(read_study(path))[-1], "no path of the machine"
    assert "'output_dir=../my folder'" in again_section(read_study(Path("../my folder")))[-1], "as it was given"


def cell(text: str) -> list[str]:
    return Page(page("", table(["a", "b"], [[text, "x"]]), {})).cells


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], include_characters="\t\n\r"), max_size=30))
def test_any_text_is_shown_as_it_is(text: str) -> None:
    said = " ".join(text.split())
    assert cell(plain(text)) == [said, "x"]
    heading = MarkdownIt("commonmark").render(f"# q {plain(text)}")
    assert html.unescape(heading) == f"<h1>{f'q {said}'.strip()}</h1>\n"
    if said:
        assert cell(code(text))[0] == said
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    assert Page(page("", f"before\n\n{fence(text)}\n\nafter", {})).blocks == [lines]


def test_the_same_folder_gives_the_same_bytes(full: Path) -> None:
    def content() -> dict[Path, bytes]:
        return {
            path: path.read_bytes() for path in [*full.glob("report.*"), *full.glob("figures/*"), full / "results.csv"]
        }

    first = content()
    assert len(first) == 4 + len(FIGURES)
    write_report(full)
    assert content() == first


def test_figures_say_what_the_table_says(full: Path) -> None:
    forest = (full / "figures/forest.svg").read_text()
    for one in numbers(full)["contrasts"]:
        assert f">{one['arm']}</text>" in forest
        if one["ci_low"] is not None:
            label = f"{one['mean_difference']:+.4f} [{one['ci_low']:+.4f}, {one['ci_high']:+.4f}]"
            assert f">{label}</text>" in forest
        assert f">{one['verdict']}</text>" in forest
    assert "left is better" in forest
    assert "↑ 4.4" in (full / "figures/seeds.svg").read_text()  # far off, so that it does not crush the others
    for arm in ARMS:
        assert f">{arm}</text>" in (full / "figures/learning.svg").read_text()


def test_loss_by_frequency_is_paired_by_seed(full: Path) -> None:
    def last(arm: str, seed: int) -> float:
        path = full / f"cells/{arm}-seed{seed}-1000/diagnostics.csv"
        with open(path, newline="") as file:
            return float(list(csv.DictReader(file))[-1]["loss/band5"])

    differences = [last("untied", seed) - last("tied", seed) for seed in (0, 1, 2)]
    half = stats.t.ppf(0.975, 2) * np.std(differences, ddof=1) / math.sqrt(3)
    mean = fmean(differences)
    assert f"| {mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}] |" in markdown(full)


def test_gradients_and_row_norms_are_those_that_training_writes(full: Path) -> None:
    assert set(SIDES) <= set(DIAGNOSTICS)
    assert "| untied | embedding | 1 | 2 | 3 | 4 | 5 | 30 % |" in markdown(full)
    assert "| untied | LM head | 6 | 7 | 8 | 9 | 10 | 30 % |" in markdown(full)


def test_tuning_shows_every_trial_and_warns_of_an_edge(full: Path) -> None:
    section = markdown(full).partition("## Tuning")[2]
    assert "| untied | head.head_lr_multiplier | 0.002 | **not varied** | 0.002 to 0.008 | 0.004 | 5 | 1 |" in section
    assert "| tied | optim.lr | 0.003 | inside | 0.0015 to 0.006 | 0.003 | 3 | 0 |" in section


def test_nothing_finished(tmp_path: Path) -> None:
    path = make(tmp_path, done=lambda arm, seed: False, tune={"trials": 5, "seeds": [1000]}, tuning_done=False)
    assert headings(path) == ["Arms", "Runs without a result", "How to reproduce this"]
    assert "**0 of 15 runs are done.**" in markdown(path)
    assert "**Tuning is not finished.**" in markdown(path)
    assert (
        "> - **At equal tokens and FLOPs, untied compared with tied is undecided:** no seed has finished in both."
        in markdown(path)
    )
    found = numbers(path)
    assert found["cells"]["missing"] == 15
    assert {one["mean_difference"] for one in found["contrasts"]} == {None}
    assert Page((path / "report.html").read_text()).tags.count("svg") == 0


def test_runs_that_were_left_out_are_named(tmp_path: Path) -> None:
    path = make(tmp_path, report=False)
    write_run(path / "cells/untied-seed7-0123456789", "untied", 7, 3.0, 1000)
    write_run(path / "cells/tied-seed1-0123456789", "tied", 1, 3.0, 900)
    write_report(path)
    assert "**Finished runs are left out: untied seed 7.**" in markdown(path)
    assert "**1 finished run is not used:** the settings," in markdown(path)
    before = (path / "results.csv").read_text()
    assert before.count(",unused,") == 2
    shutil.rmtree(path / "cells")  # as under version control
    write_report(path)
    assert (path / "results.csv").read_text() == before
    assert "**Finished runs are left out: untied seed 7.**" in markdown(path)


@pytest.mark.slow
def test_rows_of_runs_that_are_asked_for_no_more_are_kept(tmp_path: Path) -> None:
    path = make(tmp_path, tuned=True)
    before = results(path)
    shutil.rmtree(path / "cells")
    shutil.rmtree(path / "trials")
    record = json.loads((path / "ablation.json").read_text())
    del record["searches"]["untied"]["trials"][1:]
    record["cells"] = [one for one in record["cells"] if "untied_matched" not in one["run_dir"]]
    write(path / "ablation.json", record)
    for _ in range(2):
        write_report(path)
        kept = {row["run_dir"]: row for row in results(path)}
        assert kept.keys() == {row["run_dir"] for row in before}
        unused = [row for row in kept.values() if row["purpose"] == "unused"]
        assert {row["run_dir"][:6] for row in unused} == {"cells/", "trials"}
        same = ("val_loss", "seconds", "config_hash", "optim.lr", "source_hash")
        assert all(row[key] == one[key] for one in before for key in same for row in [kept[one["run_dir"]]])


@pytest.mark.slow
def test_the_other_comparisons_follow_the_answer(tmp_path: Path) -> None:
    path = make(tmp_path, primary=["untied_matched"])
    assert re.search(r"^Other comparisons at equal tokens: untied is worse than tied \(\+0", markdown(path), re.M)
    none_named = make(tmp_path / "all", primary=[])
    assert "Other comparisons" not in markdown(none_named)


SHRINKS = "shrinks during training"


def shrink(path: Path, before: float, noise: float = 0.0, last: int = 1000) -> str:
    """The report where untied minus tied goes from `before`, halfway, to what the runs end with."""
    for seed in (0, 1, 2):
        ours, theirs = (path / f"cells/{arm}-seed{seed}-1000" for arm in ("untied", "tied"))
        end = [json.loads((one / "result.json").read_text())["val_loss"] for one in (ours, theirs)]
        rows = []
        for step in range(100, 1001, 100):
            gap = end[0] - end[1] if step > 500 else before + noise * (seed - 1)
            rows.append((step, step * 1024, 0.001, 3, 1, 4 + gap, 2, 0.4, WHOLE))
        write(ours / "metrics.csv", lines(METRICS, *(row for row in rows if row[0] <= last)))
        write(theirs / "metrics.csv", lines(METRICS, *((*row[:5], 4, 2, 0.4, WHOLE) for row in rows)))
    write_report(path)
    return markdown(path)


@pytest.mark.slow
@pytest.mark.parametrize("budgets", [("tokens",), ("tokens", "flops")])
def test_a_difference_that_shrinks_is_told(tmp_path: Path, budgets: tuple[str, ...]) -> None:
    path, where = make(tmp_path, budgets=budgets, report=False), " at equal tokens" * (len(budgets) > 1)
    told = f"**The difference between untied and tied shrinks during training{where}.** It was +0.0800 halfway"
    assert told in shrink(path, 0.08)
    assert SHRINKS not in shrink(path, 0.04)  # at this pace there is enough left after twice the training
    assert SHRINKS not in shrink(path, 0.08, noise=0.05)  # by chance
    assert SHRINKS not in shrink(path, 0.01)  # it grows
    assert SHRINKS not in shrink(path, -0.08)  # the sign was the opposite


@pytest.mark.slow
def test_a_negative_difference_that_shrinks_is_told(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",), report=False)
    for seed in (0, 1, 2):
        result = path / f"cells/untied-seed{seed}-1000/result.json"
        write(result, json.loads(result.read_text()) | {"val_loss": 3.45 + 0.01 * seed})
    assert SHRINKS in shrink(path, -0.12)
    assert SHRINKS not in shrink(path, -0.06)
    assert SHRINKS not in shrink(path, -0.12, last=900)  # not known to its end


def test_a_difference_below_the_margin_shrinks_in_silence(tmp_path: Path) -> None:
    path = make(tmp_path / "first", budgets=("tokens",))
    lead = numbers(path)["contrasts"][0]["mean_difference"]
    for equivalence_margin, silent in ((0.99 * lead, False), (1.01 * lead, True)):
        path = make(tmp_path / f"{silent}", budgets=("tokens",), report=False, equivalence_margin=equivalence_margin)
        assert (SHRINKS not in shrink(path, 0.08)) is silent
        assert numbers(path)["contrasts"][0]["verdict"] == "worse"


@pytest.mark.parametrize(("rise", "told"), [(0.02, True), (0.009, False), (-0.5, False)])
def test_a_loss_that_rises_before_the_end_is_told(tmp_path: Path, rise: float, told: bool) -> None:
    path = make(tmp_path, budgets=("tokens",), report=False, equivalence_margin=0.01)
    for seed in (0, 1, 2):
        rows = [(step, step * 1024, 0.001, 3, 1, loss, 2, 0.4, WHOLE) for step, loss in ((500, 4 - rise), (1000, 4))]
        write(path / f"cells/untied-seed{seed}-1000/metrics.csv", lines(METRICS, *rows))
    write_report(path)
    assert ("**The validation loss rises before the end: untied (by 0.02).**" in markdown(path)) is told
    assert "rises before the end: tied" not in markdown(path)


def score_on(path: Path, rows: list[tuple[int, float, Any]]) -> str:
    """The report of runs with these steps, validation losses and numbers of tokens that they were scored on."""
    for metrics in path.glob("cells/*/metrics.csv"):
        whole = [(step, step * 1024, 0.001, 3, 1, loss, 2, 0.4, tokens) for step, loss, tokens in rows]
        write(metrics, lines(METRICS, *whole))
    write_report(path)
    return markdown(path)


@pytest.mark.parametrize(("tokens", "told"), [(9000, True), (500, False)])
def test_an_estimate_below_the_score_is_no_rise(tmp_path: Path, tokens: int, told: bool) -> None:
    path = make(tmp_path, budgets=("tokens",), report=False, equivalence_margin=0.01)
    found = score_on(path, [(400, 4.5, tokens), (800, 3.9, tokens), (1000, 4.0, 9000)])
    assert ("The validation loss rises before the end" in found) is told


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (
            500,
            WHOLE,
            "estimates on 500 of 89,999 tokens of the validation text, in evenly spaced windows; the last one",
        ),
        (WHOLE, WHOLE, "Every point is a score of the whole validation text."),
        (500, 500, "estimates on 500 of 89,999 tokens of the validation text, also after the last step"),
    ],
)
def test_the_report_says_what_its_curves_cover(tmp_path: Path, first: Any, last: Any, said: str) -> None:
    path = make(tmp_path, budgets=("tokens",), report=False)
    assert said in score_on(path, [(500, 4.5, first), (1000, 4.0, last)])
    assert ",val/tokens\n" in (path / "curves.csv").read_text()


@pytest.mark.parametrize(("every", "told"), [(501, True), (0, True), (500, False), (100, False)])
def test_why_there_is_no_learning_figure_is_said(tmp_path: Path, every: int, told: bool) -> None:
    """Validated once or never, a run has no curve."""
    path = make(tmp_path, budgets=("tokens",), report=False, every=every)
    for metrics in path.glob("cells/*/metrics.csv"):
        write(metrics, lines(METRICS, (1000, 1024000, 0.001, 3, 1, 4, 2, 0.4, WHOLE)))
    write_report(path)
    said = f"runs of 1,000 steps with `validation.every={every}` are not validated twice during training. "
    assert (f"There are no learning curves: {said}Set `validation.every=100` to record them." in markdown(path)) is told
    assert ("Learning curves" in headings(path)) is told


def seen(path: Path) -> list[list[int]]:
    return [one.seeds for one in verdicts_seen(path, read_record(path))]


@pytest.mark.slow
def test_a_verdict_that_was_shown_is_remembered(tmp_path: Path) -> None:
    path = make(tmp_path, done=lambda arm, seed: seed == 0)
    assert seen(path) == []  # one seed gives no verdict
    make(path, done=lambda arm, seed: seed < 2)
    (path / "report.json").write_text("{")
    make(path, report=False)
    result_table(path)  # it shows verdicts too
    write_report(path)
    assert seen(path) == [[0, 1], [0, 1, 2]]
    assert verdicts_seen(path, read_record(path))[0].equivalence_margin == 0.01
    assert [one["seeds"] for one in numbers(path)["verdicts_seen"]] == seen(path)
    first, second = (path / "verdicts.jsonl").read_text().splitlines()
    (path / "verdicts.jsonl").write_text(f"{first[:20]}\n{second}\n")
    assert seen(path) == [[0, 1, 2]]
    (path / "verdicts.jsonl").write_text(f"{second}\n{first[:20]}")
    remember(path, read_record(path), [0, 1])
    assert seen(path) == [[0, 1, 2], [0, 1]], "after a line that broke off"


def test_looks_of_several_processes_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, report=False)
    record, file, read, others = read_record(path), path / "verdicts.jsonl", seen_module.written, list[list[int]]()

    def while_another_writes(folder: Path) -> Any:
        found = read(folder)
        others.append([0, 10 + len(others)])
        with open(file, "a") as its:
            its.write(json.dumps(asdict(look(record, others[-1]))) + "\n")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(seen_module, "written", while_another_writes)
        remember(path, record, [0, 1, 2])
    assert seen(path) == [*others, [0, 1, 2]]
    file.write_text(file.read_text() + '{"se')  # broken off
    remember(path, record, [1, 2])
    assert seen(path) == [*others, [0, 1, 2], [1, 2]]


def test_missing_learning_curves_are_told(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",), report=False)
    for seed in (0, 1):
        (path / f"cells/untied-seed{seed}-1000/metrics.csv").unlink()
    write_report(path)
    assert "**2 runs have no learning curve.**" in markdown(path)
    assert "**There are only 3 seeds.**" in markdown(path)
    assert ">untied</text>" in (path / "figures/learning.svg").read_text()


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    path = make(tmp_path, seeds=(7,), budgets=("tokens",))
    assert "**There is only one seed.**" in markdown(path)
    assert "> - **untied compared with tied is undecided:** +0.0" in markdown(path)
    assert "(one seed)" in (path / "figures/forest.svg").read_text()
    assert "Verdicts can still change" not in markdown(path)
    assert {one["sd"] for one in numbers(path)["arms"]} == {None}
    assert "at equal" not in markdown(path).partition("## Arms")[2]  # one budget needs no column


def test_while_runs_go_on(tmp_path: Path) -> None:
    path = make(tmp_path, done=lambda arm, seed: seed == 0 or (seed == 1 and arm in ("tied", "untied")))
    assert "**8 of 15 runs are done.**" in markdown(path)
    assert "**Only 3 seeds are planned.**" in markdown(path)
    assert "> **Results so far:**" in markdown(path)
    assert [one["seeds"] for one in numbers(path)["contrasts"]][:3] == [[0, 1], [0], [0]]
    assert "| untied_matched | 1 | equal tokens and FLOPs | not started |" in markdown(path)
    assert not {"Tuning", "Training diagnostics", "Comparisons over head.untie_at"} & set(headings(path))


def test_seeds_are_planned_only_while_runs_are_missing(tmp_path: Path) -> None:
    path = make(tmp_path, seeds=(0, 1), budgets=("tokens",), broken=True, report=False)  # a run failed
    assert [one.head for one in progress(read_study(path))] == ["There are only 2 seeds."]


def test_where_more_is_better_the_right_side_is(tmp_path: Path) -> None:
    path = make(tmp_path, budgets=("tokens",), metric="val_top1", equivalence_margin=0.0003)
    found = {one["arm"]: one for one in numbers(path)["contrasts"]}
    assert found["untied"]["mean_difference"] < 0
    assert found["untied"]["verdict"] == "worse"
    assert "**untied is worse than tied:** -0.0" in markdown(path)
    assert "right is better" in (path / "figures/forest.svg").read_text()


def test_a_difference_that_may_be_too_small_is_told(tmp_path: Path) -> None:
    """untied is worse by about 0.03; the interval reaches down to about 0.02."""
    for equivalence_margin, told in ((0.01, False), (0.028, True)):
        path = make(tmp_path / str(equivalence_margin), budgets=("tokens",), equivalence_margin=equivalence_margin)
        (one,) = (one for one in numbers(path)["contrasts"] if one["arm"] == "untied")
        assert (one["verdict"], one["ci_low"] < equivalence_margin) == ("worse", told)
        assert ("**The difference between untied and tied may be too small to matter.**" in markdown(path)) is told


@pytest.mark.parametrize("leader", ["tied", "untied"])
@pytest.mark.parametrize(
    ("apart", "equivalence_margin", "told"),
    some(
        [
            (-0.04, 0.01, True),
            (0.009, 0.01, True),
            (0.011, 0.01, False),  # the trials show one that matters
            (-0.04, 0.028, True),
            (0.009, 0.028, False),  # nearly the same
            (-0.04, 0.032, False),  # the runs show none
        ],
        4,
    ),
)
def test_a_difference_that_the_trials_do_not_show_is_told(
    tmp_path: Path, leader: str, apart: float, equivalence_margin: float, told: bool
) -> None:
    """Of the runs the leader leads by about 0.03; how far its best trial lies ahead is set here."""
    path = make(tmp_path, budgets=("tokens",), tuned=True, report=False, equivalence_margin=equivalence_margin)
    if leader == "untied":
        apart = -apart
        for seed in (0, 1, 2):
            result = path / f"cells/untied-seed{seed}-1000/result.json"
            write(result, json.loads(result.read_text()) | {"val_loss": 3.47 + 0.01 * seed})
    record = json.loads((path / "ablation.json").read_text())
    best = {arm: min(trial["score"] for trial in record["searches"][arm]["trials"]) for arm in ("tied", "untied")}
    for trial in record["searches"]["untied"]["trials"]:
        trial["score"] += best["tied"] - best["untied"] + apart
    write(path / "ablation.json", record)
    write_report(path)
    said = f"**The search trials do not show the difference between untied and tied.** It is {apart:+.4f} between"
    assert (said in markdown(path)) is told
    found = next(one for one in numbers(path)["contrasts"] if one["arm"] == "untied")
    assert found["verdict"] == {"tied": "worse", "untied": "better"}[leader]
    assert 0.028 < abs(found["mean_difference"]) < 0.032


@pytest.mark.parametrize(("factor", "told"), [(1.015, False), (1.03, True), (0.95, True)])
def test_unequal_times_at_equal_time_are_told(tmp_path: Path, factor: float, told: bool) -> None:
    path = make(tmp_path, budgets=("time",), report=False)
    change_results(path, "*", seconds=100.0)
    change_results(path, "untied-*", seconds=100.0 * factor)
    study = read_study(path)
    heads = [head for head, _ in warnings_of(study, study.contrasts()) if "equal time" in head]
    said = f"untied took {factor:.3f} times as long as tied (median of 3 pairs: {factor:.2f} to {factor:.2f})"
    assert heads == [f"Training times at equal time differ by more than 2 %: {said}."] * told
    assert matches_row(study, "untied", "tied", "time")[-1] == f"{factor:.3f}"


def test_how_near_arms_come_to_what_is_held_equal_is_said(tmp_path: Path) -> None:
    study = read_study(make(tmp_path, report=False, done=lambda arm, seed: False))
    arms = study.record.arms
    arms["untied"].flops_per_token, arms["untied"].n_params = 6_630_000, 1_018_000
    for arm in arms.values():
        arm.settings["optim.warmup_steps"] = 50
    assert matches_row(study, "untied", "tied", "tokens") == ["untied", "tied", "tokens", *NEAR_TOKENS, "-"]
    assert matches_row(study, "untied", "tied", "flops") == ["untied", "tied", "FLOPs", *NEAR_FLOPS, "-"]
    warm_up = "The warm-up is a fixed number of steps, `optim.warmup_steps=50`, in runs of 900 to 1,000 steps."
    (*_, said) = matches_section(study)
    assert warm_up in said


NEAR_TOKENS, NEAR_FLOPS = ["1.0005", "1.0000", "1.1050"], ["1.0005", "0.9000", "0.9945"]


def test_a_trial_outside_the_plot_is_marked_at_the_nearer_edge(tmp_path: Path) -> None:
    """One far better than those of the primary arms is no cross and no triangle at the worse edge."""
    _, axes = panels(1, 2.0, 0.5)
    axes[0].set(ylim=(3.4, 3.6), xscale="log")
    points = ((0.1, 1.5), (0.2, 3.5), (0.4, 9.0))
    trials = [TrialRecord(values={"optim.lr": lr}, score=loss, run_dirs=[]) for lr, loss in points]
    search = SearchRecord(hyperparameters=["optim.lr"], seeds=[], inside={}, trials=trials)
    study = read_study(make(tmp_path))
    draw_search(axes[0], study, search, "optim.lr", looks(["tied"])["tied"], "tied")
    ends = {line.get_xdata()[0]: line.get_ydata()[0] for line in axes[0].get_lines() if line.get_marker() in ("^", "v")}
    assert ends == {0.1: 3.4, 0.4: 3.6}


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    def identity(arm: str) -> dict[str, str]:
        return {"data_hash": "d" * 64, "tokenizer_hash": arm, "source_hash": "s" * 64}

    path = make(tmp_path, budgets=("tokens",), diagnostics=True, report=False)
    record = json.loads((path / "ablation.json").read_text())
    for arm, one in record["arms"].items():
        one["identity"] = identity(arm)
        for place in path.glob(f"cells/{arm}-seed*/result.json"):
            write(place, json.loads(place.read_text()) | {"tokenizer_hash": arm})
    write(path / "ablation.json", record)
    write_report(path)
    assert "### Loss by frequency" not in markdown(path)  # a band holds other tokens in each arm
    assert "tokenizer hash (untied)" in markdown(path)


def change_results(path: Path, pattern: str, **changes: Any) -> None:
    for place in path.glob(f"cells/{pattern}/result.json"):
        write(place, json.loads(place.read_text()) | changes)


def test_pairs_that_mix_conditions_are_named(tmp_path: Path) -> None:
    def said() -> list[str]:
        study = read_study(path)
        return [head for head, _ in warnings_of(study, study.contrasts()) if "onditions" in head]

    path = make(tmp_path, budgets=("tokens",), report=False)
    assert said() == []
    change_results(path, "*", cpu="unknown")
    assert ["CPU of the runs", "unknown"] in made_with(read_study(path))
    change_results(path, "*-seed2-*", threads=2, cpu="one")
    assert said() == ["Conditions differ between seeds: threads 1, 2."]
    rows = dict(made_with(read_study(path)))
    assert rows["threads of the runs"] == "1 (8 of 12 runs), 2 (4 of 12 runs)"
    assert rows["CPU of the runs"] == "one (4 of 12 runs), unknown (8 of 12 runs)"
    change_results(path, "untied-seed2-*", cpu="another")
    change_results(path, "tied-seed[01]-*", threads=8, versions={"torch": "2.12.0"})
    (found,) = said()
    pairs = "untied and tied, threads 1 and 8, torch 2.13.0 and 2.12.0, seed 0, 1; untied and tied, CPU another and one"
    assert found.startswith(f"Two runs of a pair were made under different conditions: {pairs}, seed 2;")
    row = {row["run_dir"]: row for row in all_rows(read_study(path))}["cells/untied-seed2-1000"]
    assert (row["cpu"], row["threads"], row["torch"]) == ("another", 2, "2.13.0")


def test_a_folder_without_an_ablation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no ablation\.json; expected"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
