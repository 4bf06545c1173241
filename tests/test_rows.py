"""The verdict on rows of any program: that of an ablation on the same values, what is left out, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, Outcome

from lm import judge
from lm.errors import UserError
from lm.lab.ablation.results import read_results
from lm.lab.ablation.rows import judged, rows_table
from tests.helpers.ablation_folder import Page

Command = Callable[..., tuple[int, str, str]]
ROWS = "arm,seed,value\na,0,1.0\na,1,1.1\na,2,1.3\nb,2,1.19\nb,0,0.9\nb,1,1.02\n"


@pytest.mark.parametrize("name", ["tying/longer", "tying_diagnostics", "cs336/lr"])
def test_values_of_an_untuned_study_have_its_verdicts_and_intervals(name: str) -> None:
    """Which are those of scipy: tests/test_published.py."""
    study = read_results(ROOT / "docs/studies" / name)
    rows = study.reported[["arm", "seed", "val_loss"]].rename(columns={"val_loss": "value"})
    baseline = study.question.baseline
    answer = judge(rows.sort_values("seed", kind="stable"), baseline, study.question.equivalence_margin)
    more, less = (judge(rows, baseline, higher=higher).contrasts for higher in (True, False))
    for i, row in enumerate(study.contrasts):
        again = answer.contrasts.loc[i]
        assert again.verdict == row.verdict
        numbers = ["ci_low", "ci_high", "p", "mean_difference", "sd", "p_adjusted", "p_equivalent_adjusted"]
        expected = pytest.approx(np.array([getattr(row, key) for key in numbers], float), abs=1e-9, nan_ok=True)
        assert [*again[numbers]] == expected
        opposite = {"better": "worse", "worse": "better"}.get(less.verdict[i], "undecided")
        assert row.diverged or more.verdict[i] == opposite
    assert less["p_equivalent"].isna().all(), "there is no margin"
    assert answer.interval == judge(answer.rows, baseline).interval


def test_an_arm_is_called_as_it_is_named() -> None:
    values = {"seed": [0, 1, 2] * 2, "value": [1, 2, 3, 1.1, 2.2, 3.2]}
    for names in ((0, 1), (False, True), ("None", "true"), ("null", "nan ")):
        arms = [name for name in names for _ in range(3)]
        assert judge(pd.DataFrame(values | {"arm": arms}), str(names[0])).verdict == "worse", names


def test_a_value_without_a_pair_counts_where_it_diverged_and_a_lost_seed_is_told(tmp_path: Path) -> None:
    rows = [("a", seed, 1 + seed / 10) for seed in range(5)] + [("b", seed, 0.5 + seed / 9) for seed in range(5)]
    frame = pd.DataFrame(rows, columns=["arm", "seed", "value"])
    lost = pd.DataFrame([("b", seed, np.nan) for seed in (5, 6)], columns=frame.columns)
    assert judge(frame).verdict == "better"
    answer = judge(pd.concat([frame, lost]))
    assert (answer.verdict, answer.contrasts["undecided_by"][0]) == ("undecided", "survivors")
    more = pd.DataFrame([("c", seed, 2 + seed / 8) for seed in range(2, 5)], columns=frame.columns)
    results = judged(pd.concat([frame, more]), "a", None, False)
    assert "Pairs are missing: c has 3 of 5." in rows_table(results, None)


def test_a_file_gets_a_table_a_page_and_json(command: Command, tmp_path: Path) -> None:
    path, folder = tmp_path / "x.csv", tmp_path / "out"
    path.write_text(ROWS + "a,7,1\na,8,2\nb,3,1.5\n")
    code, table, said = command("report", f"rows={path}", f"output_dir={folder}")
    assert (code, "3 of 9 rows have no pair: a seed 7, 8, b seed 3." in table) == (0, True), said
    code, shown, _ = command("report", f"rows={path}", "json=true", "exit_code=verdict", "baseline=b")
    assert (code, json.loads(shown)["contrasts"][0]["verdict"]) == (10, "worse")
    sentence = json.loads((folder / "report.json").read_text())["answers"][0]["sentence"]
    assert sentence == "b is better than a: -0.0967 in value (95 % CI -0.1346 to -0.0587, 3 seeds)."
    page = Page(folder)
    assert page.headings == ["Which is better, a or b?", "Comparisons", "How to reproduce this"]
    for text in (table, (folder / "report.md").read_text(), page.text):
        assert sentence.partition(":")[2] in text.replace("\xa0", " ")
        assert not {"nats", "tokens", "perplexity", "±"} & {*text.split()}
    assert "equivalent within 0.5 in value" in command("report", f"rows={path}", "margin=0.5")[1]


def test_a_value_that_is_not_finite_is_a_run_that_diverged(command: Command, tmp_path: Path) -> None:
    for value in ("nan", "inf", "-inf", ""):
        (tmp_path / "x.csv").write_text(ROWS.replace("b,1,1.02", f"b,1,{value}") + "a,3,1.4\nb,3,1.3\n")
        _, table, _ = command("report", f"rows={tmp_path}/x.csv")
        assert "; b diverged at 1 of 4 seeds; an arm lost some seeds, and the others" in table, "they are no evidence"
    frame = pd.DataFrame({"arm": list("abab"), "seed": [0.0, 0, 1, 1], "value": np.float32([1, np.nan, 2, 3])})
    assert judge(frame).contrasts["n_seeds"].tolist() == [1]
    with pytest.raises(UserError, match="frame: row 2: arm=a seed=0"):
        judge(frame.assign(seed=0))


def test_a_comparison_of_few_pairs_says_so_and_a_baseline_may_be_a_number(command: Command, tmp_path: Path) -> None:
    rows = "".join(f"{arm},{seed},{seed % 3 + arm}\n" for arm in (1, 2) for seed in range(8))
    (tmp_path / "x.csv").write_text(f"arm,seed,value\n{rows}3,0,4.5\n3,1,5.6\n")
    _, table, _ = command("report", f"rows={tmp_path}/x.csv", "baseline=1")
    assert "Some comparisons have fewer seeds: 3 - 1: 2." in table
    frame = pd.read_csv(tmp_path / "x.csv")
    assert judge(frame, baseline=2).contrasts["baseline"].tolist() == ["2", "2"]  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"margin='0\.1': expected a number"):
        judge(frame, baseline="1", margin="0.1")  # type: ignore[arg-type]


LINES = [  # a line behind the others, and what its mistake names
    *("b,3,1,02 > has 4 fields", "b,3 > has 2 fields", "b,3,low > value=low", "b,1.0,1 > arm=b seed=1.0: is there"),
    *("b,x,1 > seed=x", "b,1.5,1 > seed=1.5", "b,nan,1 > seed=nan", "b,-1,1 > seed=-1", ",3,1 > arm=: expected"),
]
MISTAKES = {
    **{ROWS + line.partition(" > ")[0]: f"line 8: {line.partition(' > ')[2]}" for line in LINES},
    "": "has the columns none: expected arm, seed, value with commas",
    "arm,seed,value\n": "column arm: has no value",
    ROWS.replace("value", "loss"): "has the columns arm, seed, loss",
    ROWS.replace(",", ";"): "its fields end in semicolons; expected commas, and a point in decimals",
    "arm;seed;value\na;0;0,51\n": "its fields end in semicolons",
    "arm,seed,value,value\n": "each once",
    ROWS + 'b,3,"1': "CSV",
    "arm,seed,value\na,0,1\nb,0,1\n": "column seed: 1 of a",
    ROWS + "c,0,1": "baseline: not given: expected one of a, b, c",
    "baseline=d": "baseline=d: no such arm: expected one of a, b",
    "margin=nan": "margin=nan",
    f"output_dir={ROOT}/docs/studies/tying/longer": "expected a new folder",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(given: str, command: Command, tmp_path: Path) -> None:
    is_word = "=" in given
    (tmp_path / "x.csv").write_text(ROWS if is_word else given)
    code, out, said = command("report", f"rows={tmp_path}/x.csv", *([given] if is_word else []))
    assert (code, out, said.count("\n"), MISTAKES[given] in said) == (2, "", 1, True), said


def test_rows_are_read_however_their_file_is_written(command: Command, tmp_path: Path) -> None:
    spaced = ROWS.replace(",", ", ").replace("\na", '\n"a"').replace(" 0,", " 0.0,")
    wide = "\n".join(f'"x;\n",{line.replace(",", ",y,")}' for line in ROWS.splitlines())
    for given in ("\ufeff" + ROWS.replace("\n", "\r\n"), spaced, wide, ROWS + "c,0,1"):
        (tmp_path / "x.csv").write_bytes(given.encode())
        table = command("report", f"rows={tmp_path}/x.csv", "baseline=a")[1]
        assert "b is better than a: -0.0967 in value" in table or "c against a is undecided" in table


def test_na_is_a_run_that_diverged_and_a_letter_is_one_however_it_is_stored() -> None:
    frame = pd.DataFrame([(arm, seed, value) for arm in ("ré", "b") for seed, value in enumerate((1.0, 1.2, 1.1))])
    frame = frame.set_axis(["arm", "seed", "value"], axis=1).astype({"value": object})
    frame.loc[1, "arm"] = "re\u0301"
    frame.loc[5, "value"] = "NA"
    answer = judge(frame, baseline="re\u0301")
    assert answer.contrasts["arm"].tolist() == ["b"]
    assert answer.contrasts["n_seeds"].tolist() == [2]
    assert "b diverged at 1 of 3 seeds" in answer.sentence


def test_a_report_of_rows_overwrites_nothing_of_others(command: Callable[..., Outcome], tmp_path: Path) -> None:
    path, folder = tmp_path / "rows.csv", tmp_path / "mine"
    path.write_text("arm,seed,value\na,0,1\na,1,2\nb,0,2\nb,1,3.5\n")
    folder.mkdir()
    (folder / "report.md").write_text("my own report\n")
    code, _, said = command("report", f"rows={path}", f"output_dir={folder}")
    assert (code, f"output_dir={folder}: expected" in said) == (2, True)
    assert (folder / "report.md").read_text() == "my own report\n"
    for _ in range(2):  # its own report is written again
        assert command("report", f"rows={path}", f"output_dir={tmp_path}/new")[0] == 0
