"""The verdict on rows of any program: that of an ablation on the same values, what is left out, and what is refused."""

import json
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from lm import judge
from lm.lab.ablation.report import result_table
from lm.lab.ablation.results import read_results
from lm.lab.ablation.rows import judged, read_rows
from tests.helpers import ROOT
from tests.helpers.ablation_folder import Page, numbers
from tests.helpers.refusals import refused

ROWS = "arm,seed,value\na,0,1.0\na,1,1.1\na,2,1.3\nb,2,1.19\nb,0,0.9\nb,1,1.02\n"


@pytest.fixture
def rows_of(tmp_path):
    """The rows of a file of this content."""

    def rows_of(content):
        (tmp_path / "x.csv").write_bytes(content.encode())
        return read_rows(tmp_path / "x.csv")

    return rows_of


TYING = [f"tying/{name}" for name in ("epochs", "longer", "repeated", "time", "unclipped")]


@pytest.mark.parametrize("name", [*TYING, "tying_diagnostics", "cs336/lr"])
def test_values_of_an_untuned_study_have_the_verdicts_and_intervals_that_were_published(name):
    study = read_results(ROOT / "docs/studies" / name)
    rows = study.reported[["arm", "seed", "val_loss"]].rename(columns={"val_loss": "value"})
    question, published = study.question, pd.DataFrame(map(asdict, study.contrasts))
    answer = judge(rows.sort_values("seed", kind="stable"), question.baseline, question.equivalence_margin)
    assert [*answer.contrasts["verdict"]] == [*published["verdict"]]
    numbers = ["ci_low", "ci_high", "p", "mean_difference", "sd", "p_adjusted", "p_equivalent_adjusted"]
    np.testing.assert_allclose(answer.contrasts[numbers].astype(float), published[numbers].astype(float), atol=1e-9)
    assert answer.interval == judge(answer.rows, question.baseline).interval, "the rows are those that count"


def test_higher_may_be_better_and_without_a_margin_nothing_is_equivalent(rows_of):
    lower, higher = (judge(rows_of(ROWS), higher=is_better) for is_better in (False, True))
    assert (lower.verdict, higher.verdict) == ("better", "worse")
    assert lower.contrasts["p_equivalent"].isna().all()


@pytest.mark.parametrize(
    ("names", "baseline"),
    [
        ((0, 1), "0"),
        ((False, True), "False"),
        (("null", "nan "), "null"),
        (("re\u0301", "b"), "r\u00e9"),  # a letter is one, however it is stored
    ],
)
def test_an_arm_is_called_as_it_is_named(names, baseline):
    arms = [name for name in names for _ in range(3)]
    frame = pd.DataFrame({"arm": arms, "seed": [0, 1, 2] * 2, "value": [1, 2, 3, 1.1, 2.2, 3.2]})
    assert judge(frame, baseline).verdict == "worse"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "", "NA"])
def test_a_value_that_is_not_finite_is_a_run_that_diverged(value, rows_of):
    rows = ROWS + "a,3,1.4\nb,3,1.3\n"
    assert judge(rows_of(rows)).verdict == "better"
    (contrast,) = judged(rows_of(rows.replace("1.02", value)), None, None, False).contrasts
    assert (contrast.verdict, contrast.undecided_by, contrast.diverged) == ("undecided", "survivors", {"b": [1]})
    lost = judged(rows_of(f"{rows}b,4,{value}\n"), None, None, False).contrasts[0]
    assert (lost.verdict, lost.diverged) == ("undecided", {"b": [4]}), "it counts without a pair"
    started_again = f"a,0,1\na,1,1.1\na,2,1.2\nb,0,{value}\nb,1,{value}\nb,2,{value}\nb,3,0.9\n"
    answer = judge(rows_of(f"arm,seed,value\n{started_again}"))
    assert (answer.verdict, "no run of b trained" in answer.sentence) == ("undecided", False), "b trained at seed 3"


def test_rows_without_a_pair_are_left_out_and_told(rows_of):
    lost = rows_of(ROWS + "a,7,1\na,8,2\nb,3,1.5\nc,0,2.0\nc,1,2.2\nd,0,nan\nd,1,nan\nd,2,nan\n")
    table = result_table(judged(lost, "a", 0.01, False))
    for told in (
        "3 of 14 rows have no pair: a seed 7, 8, b seed 3.",
        "Pairs are missing: c has 2 of 3.",
        "There are only 3 seeds.",
        "d is worse than a: no run of d trained",
    ):
        assert told in table


def test_a_file_gets_a_table_a_page_and_json(command, tmp_path):
    path, folder = tmp_path / "x.csv", tmp_path / "out"
    path.write_text(ROWS)
    code, table, said = command("report", f"rows={path}", f"output_dir={folder}")
    assert code == 0, said
    printed = json.loads(command("report", f"rows={path}", f"output_dir={folder}", "json=true")[1])
    assert printed == numbers(folder)
    sentence = numbers(folder)["answers"][0]["sentence"]
    assert sentence == "b is better than a: -0.0967 in value (95 % CI -0.1346 to -0.0587, 3 seeds)."
    for text in (table, (folder / "report.md").read_text(), Page(folder).text):
        assert sentence.partition(":")[2] in text.replace("\xa0", " ")
        assert not {"nats", "tokens", "perplexity", "±"} & {*text.split()}
    assert command("report", f"rows={path}", f"output_dir={folder}")[0] == 0, "its own report is replaced"


@pytest.mark.parametrize(
    ("content", "words", "verdict", "code"),
    [
        (ROWS, [], "better", 0),
        (ROWS, ["baseline=b"], "worse", 10),
        (ROWS.replace("b,", "null,"), ["baseline=null"], "worse", 10),
        (ROWS, ["margin=0.5"], "equivalent", 11),
        (ROWS.replace("b,0,0.9", "b,0,1.2"), [], "undecided", 12),
    ],
)
def test_the_exit_code_tells_the_verdict(content, words, verdict, code, command, tmp_path):
    (tmp_path / "x.csv").write_text(content)
    left, out, _ = command("report", f"rows={tmp_path}/x.csv", "json=true", "exit_code=verdict", *words)
    assert (left, json.loads(out)["contrasts"][0]["verdict"]) == (code, verdict)


def test_a_report_of_rows_overwrites_nothing_of_others(command, tmp_path):
    (tmp_path / "x.csv").write_text(ROWS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.md").write_text("my own report\n")
    for folder in (tmp_path / "mine", ROOT / "docs/studies/tying/longer"):
        code, out, said = command("report", f"rows={tmp_path}/x.csv", f"output_dir={folder}")
        assert (code, out, said.count("\n"), f"output_dir={folder}: expected" in said) == (2, "", 1, True), said
    assert (tmp_path / "mine/report.md").read_text() == "my own report\n"


LINES = {  # a line behind the others, and what its mistake names
    "b,3,1,02": "has 4 fields",
    "b,3": "has 2 fields",
    "b,3,low": "value=low",
    "b,1.0,1": "arm=b seed=1.0: is there",
    "b,x,1": "seed=x",
    "b,1.5,1": "seed=1.5",
    "b,nan,1": "seed=nan",
    "b,-1,1": "seed=-1",
    ",3,1": "arm=: expected",
}
FILES = {ROWS + line: f"x.csv: line 8: {named}" for line, named in LINES.items()} | {
    "": "x.csv: has the columns none",
    ROWS.replace("value", "loss"): "x.csv: has the columns arm, seed, loss",
    "arm,seed,value,value\n": "each once",
    "arm;seed;value\na;0;0,51\n": "x.csv: its fields end in semicolons",
    "arm\tseed\tvalue\na\t0\t0.51\n": "x.csv: its fields end in tabs",
    ROWS + 'b,3,"1': "x.csv: .*CSV",
}


@pytest.mark.parametrize("content", FILES)
def test_a_mistake_in_a_file_is_named_by_its_line(content, rows_of):
    with refused(FILES[content]):
        rows_of(content)


ARMS = {"a": [1.0, 2.0], "b": [2.0, 3.5]}
MISTAKES = [
    ({"a": []}, {}, "frame: column arm: has no value"),
    ({"a": [1.0], "b": [1.0]}, {}, "frame: column seed: a and another arm have 1 of the seeds in common"),
    (ARMS | {"c": [1.0]}, {}, "frame: baseline: not given: expected one of a, b, c"),
    (ARMS, {"baseline": "d"}, "frame: baseline=d: no such arm: expected one of a, b"),
    (ARMS, {"margin": np.nan}, "frame: margin=nan"),
    (ARMS, {"margin": True}, "frame: margin=True: expected a number"),
]


@pytest.mark.parametrize(("values", "given", "named"), MISTAKES)
def test_a_mistake_in_a_call_is_named(values, given, named):
    rows = [(arm, seed, value) for arm, own in values.items() for seed, value in enumerate(own)]
    with refused(named):
        judge(pd.DataFrame(rows, columns=["arm", "seed", "value"]), **given)


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + ROWS.replace("\n", "\r\n"),
        ROWS.replace(",", ", ").replace("\na", '\n"a"').replace(" 0,", " 0.0,"),
        "\n".join(f'"x;\n",{line.replace(",", ",y,")}' for line in ROWS.splitlines()),
    ],
)
def test_rows_are_read_however_their_file_is_written(content, rows_of):
    pd.testing.assert_frame_equal(rows_of(content), rows_of(ROWS))
