"""An interaction: a difference of two differences, paired by seed and judged like any other."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.ablation_folder import Page, make, numbers
from test_plan import question
from test_record import arm
from test_study import row, study

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.power import Tuning
from lm.ablation.judge.regret import Regret, together
from lm.ablation.judge.statistics import judge
from lm.ablation.judge.study import Row, Study
from lm.ablation.report_input import read_results
from lm.ablation.summary import result_table
from lm.config import BadInput
from lm.config.ablation import interaction

FORMULA = "(c - b) - (b - a)"  # the curvature of a over b to c, say
LOSSES = {  # by arm, of eight seeds
    "a": [1.00, 1.10, 1.20, 1.30, 1.05, 1.15, 1.25, 1.35],
    "b": [0.95, 1.06, 1.14, 1.26, 1.01, 1.10, 1.20, 1.31],
    "c": [0.80, 0.91, 0.98, 1.12, 0.85, 0.95, 1.06, 1.15],
}


def asked(rows: list[Row], **changes: Any) -> Study:
    contrasts = {"b": "a", "c": "b"}
    settings = {"contrasts": contrasts, "primary": ["b"], "seeds": list(range(8)), "interactions": {"bend": FORMULA}}
    return study(rows, ("tokens",), arms={name: arm() for name in "abc"}, **(settings | changes))


def whole(broken: dict[tuple[str, int], str] | None = None) -> list[Row]:
    """Every run; of some, by arm and seed, the status that is not done."""
    found = []
    for name, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            status = (broken or {}).get((name, seed), "done")
            result = row("a", 0, []).result | {"val_loss": loss} if status == "done" else {}
            found.append(Row(name, seed, ["tokens"], f"cells/{name}-{seed}", 10, status, "", result))
    return found


def only(found: Study) -> Contrast:
    (one,) = found.interactions()
    return one


def test_it_is_the_difference_of_the_differences_by_seed_and_judged_as_such() -> None:
    found = asked(whole())
    b, c = (dict(zip(one.seeds, one.differences, strict=True)) for one in found.contrasts())
    one = only(found)
    assert one.differences == pytest.approx([c[seed] - b[seed] for seed in one.seeds])
    assert one.comparison == judge({"it": one.differences}, 0.001)["it"]
    assert one.comparison.verdict == "better"
    assert found.say(one).startswith("c - b is better than b - a: -0.10")
    assert one.tuning is None


def test_the_other_comparisons_are_what_they_were() -> None:
    assert [asdict(one) for one in asked(whole(), interactions={}).contrasts()] == [
        asdict(one) for one in asked(whole()).contrasts()
    ]


def test_a_seed_that_one_of_the_arms_lacks_is_left_out() -> None:
    one = only(asked(whole({("a", 3): "missing"})))
    assert (one.seeds, one.lost) == ([0, 1, 2, 4, 5, 6, 7], [3])


@pytest.mark.parametrize(
    ("name", "formula", "expected"),
    [
        ("c", FORMULA, "undecided"),  # praised: c - b is better
        ("a", FORMULA, "undecided"),  # a low `a` makes it better too
        ("b", FORMULA, "better"),
        ("b", "(b - a) - (c - b)", "worse"),
        ("a", "(b - a) - (c - b)", "undecided"),
    ],
)
def test_an_arm_that_diverged_is_not_praised(name: str, formula: str, expected: str) -> None:
    found = asked(whole({(name, 7): "diverged"}), interactions={"bend": formula})
    assert only(found).comparison.verdict == expected
    assert f"{name} on 1 of 8" in found.say(only(found)).replace(" diverged", "")


def test_the_noise_of_tuning_counts_each_arm_by_its_net_weight() -> None:
    _, weights = interaction(FORMULA)
    assert weights == {"c": 1, "b": -2, "a": 1}
    known = {"a": Regret(0.1, 1.0, 5), "b": Regret(0.3, 2.0, 5), "c": Regret(0.2, 4.0, 5)}
    assert together(weights, known) == Tuning(pytest.approx(1 + 4 * 2 + 4 + (0.1 - 0.6 + 0.2) ** 2), 5)
    _, same = interaction("(c - a) - (b - a)")
    assert together(same, known) == together({"c": 1, "b": -1}, known)  # what both sides share drops out
    assert together(weights, {name: known[name] for name in "ab"}) is None


REFUSED = {
    "untied - tied": "expected (arm - baseline) - (arm - baseline)",
    "(untied - tied) - (untied - tide)": "expected two different comparisons of untied - tied",
    "(untied - tied) - (tied - untied)": "expected two different comparisons",
    "(untied - tied) - (untied - tied)": "expected two different comparisons",
}


@pytest.mark.parametrize("formula", REFUSED)
def test_what_is_no_difference_of_two_comparisons_is_refused(formula: str) -> None:
    with pytest.raises(BadInput) as error:
        question(interactions={"it": formula})
    assert str(error.value).startswith(f"ablation.interactions.it={formula}: {REFUSED[formula]}")


def test_it_has_its_row_in_report_numbers_and_terminal(tmp_path: Path) -> None:
    formula = "(untied - tied) - (untied_matched - tied)"
    path = make(tmp_path, budgets=("tokens",), interactions={"shape": formula})
    (row,), contrasts = numbers(path)["interactions"], {one["arm"]: one for one in numbers(path)["contrasts"]}
    sides = zip(contrasts["untied"]["differences"], contrasts["untied_matched"]["differences"], strict=True)
    assert row["differences"] == pytest.approx([first - second for first, second in sides])
    assert (row["name"], row["formula"], row["family"]) == ("shape", formula, "interaction")
    page = Page(path)
    assert ["shape", formula, f"{row['mean_difference']:+.4f}"] in [cells[:3] for cells in page.tables[1]]
    assert row["sentence"] in page.text
    assert f"{row['sentence']}\n" in result_table(read_results(path))
