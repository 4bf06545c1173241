"""The report of an ablation: what its page, its numbers and its warnings say of folders whole, broken or on the way."""

import json
import math
import shutil
from copy import deepcopy
from dataclasses import replace

import pytest

from lm.lab.ablation.figures import learning
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import read_results
from lm.lab.ablation.warnings import plan_warnings, report_warnings, weakening
from lm.lab.commands import report
from lm.system.files import read_csv
from lm.training.train import train
from tests.helpers import ROOT
from tests.helpers.ablation_folder import ARMS, CRACK, Page, make, numbers, write
from tests.helpers.ablations import draw_nothing
from tests.helpers.runs import composed
from tests.helpers.tiny import TINY_RUN

STUDIES = ROOT / "docs/studies"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Tuned, and with runs that diverged, failed or have not finished."""
    return make(tmp_path_factory.mktemp("full"), tuned=True, broken=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Tuned, of five seeds, and with nothing that weakens a verdict."""
    return read_results(make(tmp_path_factory.mktemp("calm"), tuned=True, seeds=range(5), report=False))


@pytest.fixture
def calm(results):
    """The same, to be changed."""
    return replace(results, record=deepcopy(results.record))  # which reads its own runs


def test_the_command_says_what_became_of_the_runs_and_prints_the_numbers(tmp_path, lab, monkeypatch):
    draw_nothing(monkeypatch)
    folder = make(tmp_path, broken=True, report=False)
    code, shown, said = lab("report", str(folder))
    assert (code, "diverged: runs/" in shown, str(folder / "report.html") in shown) == (0, True, True), said
    code, shown, _ = lab("report", f"output_dir={folder}", "json=true")
    assert (code, json.loads(shown)) == (0, numbers(folder))


# --- the page


def test_the_page_has_its_sections_and_names_cannot_leave_them(full):
    page = Page(full)
    assert page.headings[:2] == ["Should a small model tie its LM head?", "Comparisons"]
    assert not {"script", "b", "link", "img", "iframe"} & {*page.tags}
    folders = [full / address for address in page.addresses if not address.startswith("#")]
    assert folders, "of the finished runs"
    assert all(folder.is_dir() for folder in folders), "nothing is loaded"
    assert page.tags.count("svg") == 3
    assert CRACK in page.text
    assert "step 70, running, interrupted" in page.text
    assert not page.is_written_again, "nothing writes it meanwhile"


def test_an_arm_that_has_lost_a_seed_has_a_curve_of_the_others(full):
    losses, _ = learning(read_results(full)).axes
    assert {line.get_label() for line in losses.lines} == {*ARMS}


def test_losses_of_different_texts_have_no_mean(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    path = make(tmp_path, folds=True)
    assert [arm["scores"] for arm in numbers(path)["arms"]] == [{}] * 4
    assert "Scores" not in Page(path).headings


@pytest.mark.parametrize(
    ("done", "tuned", "n_pairs"),
    [
        ([], False, 0),
        ([], True, 0),
        ([("tied", 0), ("untied", 1)], False, 0),
        ([("tied", 0), ("untied", 0)], True, 1),
    ],
)
def test_a_report_can_be_written_after_any_run(done, tuned, n_pairs, tmp_path):
    path = make(tmp_path, done=lambda arm, seed: (arm, seed) in done, tuned=tuned)
    assert [row["n_seeds"] for row in numbers(path)["contrasts"]] == [n_pairs, 0, 0]


def test_a_weakness_is_of_the_comparisons_and_the_sums_that_have_it(tmp_path):
    """untied has another context than tied, and untied_matched has the context of untied."""
    changes = {"baselines": {"untied_matched": "untied"}, "contrasts": {"sum": {"untied": 1, "tied": -1}}}
    found = read_results(make(tmp_path, report=False, **changes))
    for arm in ("untied", "untied_matched"):
        found.record.arms[arm].settings["data.seq_len"] = 64
    told = report_warnings(found)
    weakened = {row.arm: [*weakening(row, told)] for row in found.contrasts}
    assert {arm for arm, words in weakened.items() if "more context" in " ".join(words)} == {"untied", "sum"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tying_broken", "tying/longer_tuned", "cs336/parts"])
def test_a_committed_study_renders_without_its_record_and_says_that_it_is_frozen(name, tmp_path):
    path = shutil.copytree(STUDIES / name, tmp_path / "study")
    (path / "ablation.json").write_text("of an earlier version")
    write_report(read_results(path))
    rows = read_csv(path / "contrasts.csv")
    assert "frozen as published" in Page(path).text
    assert [row["sentence"] for row in numbers(path)["contrasts"]] == [row["sentence"] for row in rows]
    for table in (STUDIES / name).glob("*.csv"):
        assert (path / table.name).read_bytes() == table.read_bytes()


# --- warnings: what is done to the results, and what is told


def of_seeds(n):
    return lambda found: setattr(found.record.question, "seeds", [*range(n)])


def scored(loss):
    """Let the runs of untied have this loss by the number of the run and its factor in factors of two."""

    def change(found):
        own = found.runs[found.runs.arm == "untied"]
        losses = [loss(i, math.log2(factor)) for i, factor in enumerate(own.factor)]
        found.runs.loc[own.index, "val_loss"] = losses

    return change


def with_threads(*arms):
    def change(found):
        found.runs.loc[found.runs.arm.isin(arms) & (found.runs.seed == 2), "threads"] = 2

    return change


def with_setting(key, value):
    return lambda found: found.record.arms["untied"].settings.update({key: value})


def copied(found):
    for arm in found.record.arms.values():
        arm.copied = 0.98


WARNINGS = [
    (copied, "98 % of a validation text stands in the training text too"),
    (of_seeds(1), "There is only one seed"),
    (of_seeds(4), "There are only 4 seeds"),
    (
        scored(lambda i, doubled: 3.5 - 0.05 * doubled),
        "The best value is an end of the ladder: untied (upper end).",
    ),
    (scored(lambda i, _: 3.5 + i * 37 % 11 / 1000), "No difference shows between the values of a ladder: untied."),
    (with_threads("untied"), "Two runs of a pair"),
    (with_setting("checkpoint.best", True), "The scored model is chosen by the text that scores it: untied"),
    (with_setting("data.seq_len", 64), "Tokens have more context in one arm than in the other: untied and tied"),
    (with_setting("data.document_mask", True), "Tokens have more context"),
]


@pytest.mark.parametrize(("change", "summary"), WARNINGS)
def test_a_weakness_is_told(change, summary, calm):
    change(calm)
    summaries = [warning.summary for warning in report_warnings(calm)]
    assert any(text.startswith(summary) for text in summaries), summaries
    assert {warning.summary for warning in plan_warnings(calm.record)} <= {*summaries}


def test_where_nothing_weakens_a_verdict_nothing_is_told(calm):
    with_threads(*ARMS)(calm)
    assert report_warnings(calm) == []


# --- the page of a single run, with the samples that were taken during its training

PROMPTS = ["def f0(x", "</code><script>alert(1)</script>"]
OPTIONS = ["trainer.max_steps=8", "validation.every=4", "checkpoint.every=4", "model.dropout=0.1"]


@pytest.mark.slow
def test_the_page_of_a_run(text_file, tmp_path, capsys):
    """It was asked to continue two prompts."""
    run = composed(*TINY_RUN, *OPTIONS, f"data.path={text_file}", f"run_dir={tmp_path}/a <b>run_*x*")
    run_dir, result = train(replace(run, prompts=PROMPTS))
    odd = {"prompt": "\x1b[31m\udc80", "continuation": "\x00"}
    kept = {"step": 4, "val_loss": result["val_loss"], "last_val_loss": 9.5}
    write(run_dir / "result.json", result | {"samples": [*result["samples"], odd], "best": kept, "copied": 0.98})
    report.run([f"run_dir={run_dir}"])
    assert capsys.readouterr().out == f"{run_dir}/report.html: finished\n"
    page = Page(run_dir)
    assert not {"script", "b", "link", "img", "iframe"} & {*page.tags}
    assert page.tags.count("svg") == 1
    assert all(address.startswith("#") for address in page.addresses)
    assert page.headings[0] == run_dir.name
    for words in (
        f"{result['val_loss']:.4f} nats per token",
        f"n-gram {result['baselines_bpb']['ngram']:.3f}",
        *("after 4 steps", "after the last step", *PROMPTS, r"\x1b[31m\udc80"),
        f"python -m lm generate 'run_dir={run_dir}' 'def f0(x' temperature=0.8",
        result["data_hash"][:16],
        "4 (the last step has 9.5000 nats)",
        "98% of it stands in the training text too",
    ):
        assert words in page.text
    assert "model.d_model" in page.text
    assert "model.norm" not in page.text, "it has its default"
    (run_dir / "result.json").unlink()
    with open(run_dir / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 8, "tok')  # as while it is written
    report.run([f"run_dir={run_dir}"])
    page = Page(run_dir)
    assert "unfinished: step 8 of 8" in page.text
    assert f"python -m lm train 'run_dir={run_dir}'" in page.text
    assert "after 4 steps" in page.text
