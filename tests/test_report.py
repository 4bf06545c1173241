"""The report of an ablation: what its page, its numbers and its warnings say of folders whole, broken or on the way."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.lab.ablation import figures
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import curve_table, read_results
from lm.lab.ablation.warnings import plan_warnings, report_warnings
from lm.lab.report.figures import line_styles
from lm.system.files import read_csv
from tests.helpers.ablation_folder import METRICS, WHOLE, Page, change_results, lines, make, numbers, write

STUDIES = sorted(path.parent for path in (Path(__file__).parents[1] / "docs/studies").rglob("contrasts.csv"))
RARELY = pytest.mark.nightly
FULL: dict[str, Any] = {"tuned": True, "broken": True}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tuned, and with runs that diverged, failed or have not finished. Copy it before a change."""
    return make(tmp_path_factory.mktemp("full"), **FULL)


def edit_record(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((path / "ablation.json").read_text())
    change(record)
    write(path / "ablation.json", record)


# --- the page


def test_the_page_has_its_sections_and_names_cannot_leave_them(full: Path) -> None:
    page = Page(full)
    assert page.headings[0] == "Should a small model tie its LM head?"
    assert page.headings[1:] == [
        *("Comparisons", "Learning curves", "Tuning", "Arms", "Scores", "Best values"),
        *("Runs without a result", "How to reproduce this"),
    ]
    assert not {"script", "b", "link", "img", "iframe"} & {*page.tags}
    folders = [full / address for address in page.addresses if not address.startswith("#")]
    assert folders, "of the finished runs"
    assert all(folder.is_dir() for folder in folders), "nothing is loaded"
    assert page.tags.count("svg") == len(list((full / "figures").glob("*.svg"))) == 3
    assert "RuntimeError: a | <b>crack</b>" in page.text
    assert "step 70, running, interrupted" in page.text
    assert "refresh" not in page.meta, "nothing writes it meanwhile"


def test_the_first_screen_answers_and_says_what_it_rests_on(full: Path) -> None:
    page, found, text = Page(full), numbers(full), (full / "report.md").read_text()
    assert [row[0] for row in page.tables[1][1:]] == ["untied", "untied_matched", "tied_naive"]
    first = page.text.partition("Comparisons arm")[0]
    assert "Results so far:" in first
    assert [answer["sentence"] for answer in found["answers"] if answer["sentence"] not in first] == []
    told = [warning["summary"] for warning in found["warnings"]]
    assert [summary for summary in told if summary not in first] == []
    assert {"45 of 60 runs are done.", "There are only 3 seeds."} <= {*told}
    assert (found["schema_version"], [row["primary"] for row in found["contrasts"]]) == (2, [True, True, False])
    assert {row["status"] for row in found["without_result"]} == {"failed", "diverged", "missing"}
    (untied,) = (arm for arm in found["arms"] if arm["name"] == "untied")
    assert untied["ladder"]["best"] == pytest.approx(1, abs=0.1)
    for words in ("89,999 tokens, the same for all pairs", "each arm at its own best of five learning rates"):
        assert words in first
    assert "±0.01 (1 % of perplexity)" in first
    assert len(text.splitlines()) < 50, "one screen"
    assert "| untied | tied |" in text


def test_losses_of_different_texts_have_no_mean(tmp_path: Path) -> None:
    path = make(tmp_path, folds=True)
    found, page = numbers(path), Page(path)
    assert [arm["scores"] for arm in found["arms"]] == [{}] * 4
    assert "Scores" not in page.headings
    assert "differences are compared" in page.text


def test_the_curve_of_an_arm_that_keeps_its_best_model_is_that_of_the_model_that_is_compared(tmp_path: Path) -> None:
    path = make(tmp_path, **TWO)
    best(losses((400, 3.6, 9), (800, 3.4, 9), (900, 3.7, 9), (1000, 3.9, WHOLE)))(path)
    found = read_results(path)
    curve = curve_table(found.curves_shown, "untied")
    assert curve.iloc[:3].mean(axis=1).tolist() == pytest.approx([3.6, 3.4, 3.4])
    scores = found.runs[found.runs.arm == "untied"].set_index("seed").val_loss
    assert curve.iloc[-1].tolist() == scores[curve.columns].tolist(), "not 3.9, that of the last model"


def test_curves_pass_through_their_panels_and_arms_have_colours_of_their_own(full: Path) -> None:
    figure = figures.learning(read_results(full))
    for panel in figure.axes:
        (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
        curves = [line.get_xydata() for line in panel.lines if len(line.get_xydata()) > 2]
        assert len(curves) >= 2
        assert any(left < x < right and low < y < high for curve in curves for x, y in curve)
    assert len({style.color for style in line_styles(range(9)).values()}) == 9


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize(
    "done", [(), (("tied", 0),), (("untied", 1),), (("tied", 0), ("untied", 1)), (("tied", 0), ("untied", 0))]
)
def test_a_report_can_be_written_after_any_run(done: tuple[tuple[str, int], ...], tuned: bool, tmp_path: Path) -> None:
    path = make(tmp_path, done=lambda arm, seed: (arm, seed) in done, tuned=tuned)
    assert [row["n_seeds"] for row in numbers(path)["contrasts"]] == [
        int(len(done) == 2 and done[0][1] == done[1][1]),
        0,
        0,
    ]


def test_what_weakens_a_verdict_stands_below_it(tmp_path: Path) -> None:
    path = make(tmp_path, **TWO)
    best(nothing)(path)
    write_report(read_results(path))
    weakness, text = "The scored model is chosen by the text that scores it.", Page(path).text
    _, first, second = re.split(r"head=untied is |untied_matched .*?tied", text)[:3]
    assert (weakness in first, weakness in second.partition(":")[0]) == (True, False)
    assert weakness in next(line for line in (path / "report.md").read_text().splitlines() if "head=untied is" in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "study",
    [
        pytest.param(path, id=path.name, marks=[] if path.name in ("tying_broken", "longer_tuned", "parts") else RARELY)
        for path in STUDIES
    ],
)
def test_a_committed_study_renders_without_its_record_and_says_that_it_is_frozen(study: Path, tmp_path: Path) -> None:
    path = tmp_path / study.name
    shutil.copytree(study, path)
    (path / "ablation.json").write_text("of an earlier version")
    write_report(read_results(path))
    page, rows = Page(path), read_csv(path / "contrasts.csv")
    assert page.headings[0] == numbers(path)["question"] == rows[0]["question"]
    assert "The contrasts of this study are frozen as published." in page.text
    assert [row["sentence"] for row in numbers(path)["contrasts"]] == [row["sentence"] for row in rows]
    assert len(page.tables[1]) == 1 + sum(row["budgets"] != "" for row in rows)
    for name in ("results.csv", "curves.csv", "contrasts.csv"):
        assert [place.read_bytes() for place in path.glob(name)] == [place.read_bytes() for place in study.glob(name)]


# --- warnings

TWO = {"report": False}
Change = Callable[[Path], Any]


def curves(path: Path, pattern: str, *points: tuple[int, float, Any]) -> None:
    """Give runs these steps, validation losses and numbers of tokens that they were scored on."""
    rows = [(step, step * 1024, 0.001, 3, 1, loss, 2, 0.4, tokens) for step, loss, tokens in points]
    for metrics in path.glob(f"runs/{pattern}/metrics.csv"):
        write(metrics, lines(METRICS, *rows))


def losses(*points: tuple[int, float, Any]) -> Change:
    return lambda path: curves(path, "untied-*", *points)


def settings(key: str, value: Any, arm: str = "tied") -> Change:
    return lambda path: edit_record(path, lambda content: content["arms"][arm]["settings"].update({key: value}))


def best(change: Change) -> Change:
    """A change, and untied keeps its best model."""

    def both(path: Path) -> None:
        change(path)
        settings("checkpoint.best", True, "untied")(path)

    return both


def tilted(slope: float) -> Change:
    """Losses that fall by so much per factor of two, up to the upper end of the ladders of untied."""

    def change(path: Path) -> None:
        for place in path.glob("runs/untied-seed*/result.json"):
            steps = int(place.parent.name.rpartition("-")[2])
            content = json.loads(place.read_text())
            write(place, content | {"val_loss": 3.5 - slope * math.log2(steps / 1000)})

    return change


def noisy(path: Path) -> None:
    for i, place in enumerate(sorted(path.glob("runs/untied-seed*/result.json"))):
        write(place, json.loads(place.read_text()) | {"val_loss": 3.5 + i * 37 % 11 / 1000})


def untuned(path: Path) -> None:
    edit_record(path, lambda content: content["arms"]["tied"].update(is_tuned=False))


def changed(pattern: str, **changes: Any) -> Change:
    return lambda path: change_results(path, pattern, **changes)


def nothing(path: Path) -> None: ...


TUNED = TWO | {"tuned": True}
WARNINGS: list[tuple[str, dict[str, Any], Change, bool]] = [
    ("There is only one seed", TWO | {"seeds": (3,)}, nothing, True),
    ("There are only 4 seeds", TWO | {"seeds": (0, 1, 2, 3)}, nothing, True),
    ("There are only", TWO | {"seeds": (0, 1, 2, 3, 4)}, nothing, False),
    ("The best value is an end of the ladder: untied (upper end).", TUNED, tilted(0.05), True),
    ("The best value is an end", TUNED, nothing, False),
    ("No difference shows between the values of a ladder: untied.", TUNED, noisy, True),
    ("No difference shows between the values of a ladder", TUNED, nothing, False),
    ("One arm is tuned and the other is not: untied and tied", TUNED, untuned, True),
    ("Two runs of a pair", TWO, changed("untied-seed2-*", threads=2), True),
    ("Two runs of a pair", TWO, changed("*-seed2-*", threads=2), False),
    ("The scored model is chosen by the text that scores it: untied", TWO, best(nothing), True),
    ("The scored model is chosen", TWO, nothing, False),
    ("Tokens have more context in one arm than in the other: untied and tied", TWO, settings("data.seq_len", 64), True),
    ("Tokens have more context", TWO, settings("data.document_mask", True), True),
    ("Tokens have more context", TWO, nothing, False),
]


@pytest.mark.parametrize(("summary", "options", "change", "told"), WARNINGS)
def test_a_weakness_is_told(summary: str, options: dict[str, Any], change: Change, told: bool, tmp_path: Path) -> None:
    path = make(tmp_path, **options)
    change(path)
    found = read_results(path)
    summaries = [warning.summary for warning in report_warnings(found)]
    assert any(text.startswith(summary) for text in summaries) is told
    assert {warning.summary for warning in plan_warnings(found.record)} <= {*summaries}
