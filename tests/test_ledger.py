"""A series of questions: its ledger, its false discovery rate, and a confirmation on fresh seeds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lm.config import UserError
from lm.lab.ablation.executors import EXECUTORS
from lm.lab.ablation.ledger import COLUMNS, asked_before, read_ledger, series, series_table
from lm.lab.ablation.record import read_record
from lm.lab.ablation.report import results_frame
from lm.lab.ablation.results import Results, RunReader, read_results
from lm.lab.ablation.statistics import ALPHA
from lm.lab.ablation.warnings import report_warnings
from lm.lab.commands.question import confirmation
from tests.conftest import Outcome
from tests.helpers.ablations import SHORT, Lab, instant, losses, plan_in_a_moment
from tests.test_compare import TINY


@pytest.fixture
def small(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    losses = {"tied": 3.0, "untied": 2.5, "scaled": 3.0}
    made = instant(lambda spec: losses[spec.arm] + spec.seed % 7 * 1e-3 * (1 + (spec.arm == "tied")))
    monkeypatch.setitem(EXECUTORS, "local", made)
    plan_in_a_moment(monkeypatch)
    monkeypatch.setattr("lm.lab.ablation.ablate.write_report", write_rows)
    return Lab(tmp_path, corpus, SHORT)


def write_rows(results: Results) -> None:
    """Of a report what a ledger and a later call read: its pages take half of the time."""
    results_frame(results).to_csv(results.folder / "results.csv", index=False, lineterminator="\n")


def events(small: Lab) -> list[tuple[str, str, str]]:
    return [(row["event"], row["folder"], row["verdict"]) for row in read_ledger(small.root / "ledger.csv")]


@pytest.mark.slow
def test_a_ledger_has_what_was_asked_and_its_outcome_whatever_is_deleted(
    small: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    small.run(seeds=[0, 1, 2])
    assert small.run(seeds=[0, 1, 2]).record.asked_before == ""
    assert events(small) == [("asked", "out", ""), ("ended", "out", "better")]
    small.run(plan_only=True, folder="other", seeds=[0, 1, 2])
    assert len(events(small)) == 2
    shutil.rmtree(small.out)
    assert small.run(seeds=[0, 1, 2]).record.asked_before == "1 time, last in out"
    assert len(series(read_ledger(small.root / "ledger.csv"))) == 1, "the same runs say the same again"
    capsys.readouterr()
    assert small.run(folder="other", seeds=[0, 1]).record.asked_before == "1 time, last in out"
    said = capsys.readouterr().err
    assert ("4 finished runs of the series taken over" in said, " of 4, " in said) == (True, False)
    assert losses(read_results(small.root / "other")).items() <= losses(read_results(small.out)).items()
    assert small.run("model.d_ff=32", folder="narrow", seeds=[0, 1]).record.asked_before == ""
    small.run(seeds=[0, 1, 2, 3])  # a further look takes a place of its own
    frame = series(read_ledger(small.root / "ledger.csv"))
    assert [*frame["folder"]] == ["out", "other", "narrow", "out"]
    assert [*frame["seeds"].map(len)] == [*frame["pairs"]] == [3, 2, 2, 4]


def test_a_question_is_known_on_other_seeds_and_in_another_ledger(small: Lab) -> None:
    small.run(seeds=[0, 1])
    (small.root / "ledger.csv").rename(small.root / "other.csv")
    small.run(seeds=[0, 1])
    assert events(small) == [("asked", "out", ""), ("ended", "out", "better")], "it had ended before"
    assert small.run(folder="fresh", seeds=[10, 11]).record.asked_before == "1 time, last in out"
    plan, ledger = small.plan(folder="again", seeds=[20, 21]), small.root / "ledger.csv"
    assert asked_before(ledger, plan, is_new=True) == "2 times, last in fresh"
    assert asked_before(ledger, plan, is_new=True, confirmed="fresh") == "", "on seeds that nobody has seen"


def test_another_analysis_of_the_same_runs_makes_no_p_smaller(small: Lab) -> None:
    p = []
    for looks in ([2, 3], []):
        small.run(seeds=[0, 1, 2], looks=looks)
        p += series(read_ledger(small.root / "ledger.csv"))["p"].tolist()
    assert p[1] >= p[0] > 0


@pytest.mark.slow
def test_a_comparison_has_one_place_in_the_series_by_its_runs(small: Lab) -> None:
    """Whatever its budgets, its folder, its spelling and its neighbours are; other code makes other runs."""
    arms = {"tied": ["head=tied"], "untied": ["head=untied"]}
    more = arms | {"scaled": ["head=tied_scaled"]}
    small.run(arms=arms, primary=[], budgets=["tokens", "flops"])
    assert small.run(arms=more, primary=[]).record.asked_before == ""
    spelt = small.run("model.d_model=32.0", arms=more, primary=["untied"], folder="spelt")
    assert spelt.record.asked_before == "1 time, last in out"
    assert "asked before: 1 time" in " ".join(map(str, report_warnings(spelt)))
    small.run(arms=arms, seeds=[1, 0], baseline="untied", primary=[], folder="swapped")
    small.run(arms=arms, contrasts={"same": {"tied": -2, "untied": 2}}, folder="sum")
    frame = series(read_ledger(small.root / "ledger.csv"))
    assert ([*frame["arm"]], [*frame["folder"]]) == (["untied", "scaled"], ["sum", "out"])
    sums = {"both": {"untied": 1, "tied": -2, "scaled": 1}, "half": {"untied": 2, "tied": -1, "scaled": -1}}
    small.run(arms=more, primary=["untied"], contrasts=sums)
    frame = series(read_ledger(small.root / "ledger.csv"))
    assert [*frame["arm"]] == ["untied", "scaled", "both", "half"]
    assert "half: 2 untied - tied - scaled" in series_table(frame)
    assert frame["difference"][3] == pytest.approx(2 * frame["difference"][0] - frame["difference"][1])


def test_the_latest_verdict_counts_also_where_it_is_an_earlier_one_again(
    small: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    for margin, verdict in ((0.02, "better"), (9.0, "equivalent"), (0.02, "better")):
        small.run(seeds=[0, 1, 2], equivalence_margin=margin)
        (row,) = series(read_ledger(small.root / "ledger.csv")).to_dict("records")
        assert row["verdict"] == verdict
    capsys.readouterr()
    small.run(arms={"tied": ["head=tied"], "renamed": ["head=untied"]}, primary=["renamed"], seeds=[0, 1, 2])
    assert "3 finished runs of the series taken over" in capsys.readouterr().err, "its runs have their names by a hash"


def test_a_file_that_was_cut_is_named_with_its_line(small: Lab) -> None:
    small.run(seeds=[0, 1])
    for path in (small.out / "results.csv", small.root / "ledger.csv"):
        whole = path.read_text()
        for n_bytes in (len(whole) - 1, len(whole) - 20, len(whole) // 2):
            path.write_text(whole[:n_bytes])
            with pytest.raises(UserError, match=rf"{path.name}: .*row \d broke off"):
                small.run(seeds=[0, 1, 2])
        path.write_text(whole)


@pytest.mark.slow
def test_fewer_pairs_of_the_same_runs_take_no_verdict_back(small: Lab) -> None:
    question: dict[str, Any] = {"baseline": "untied", "primary": []}
    for folder, futility in (("stopped", 1), ("whole", None), ("stopped too", 1)):
        small.run(folder=folder, futility=futility, seeds=[0, 1, 2], **question)
        (row,) = series(read_ledger(small.root / "ledger.csv")).to_dict("records")
        expected = (1, "undecided") if folder == "stopped" else (3, "worse")
        assert (row["pairs"], row["verdict"]) == expected


def test_a_look_that_decides_ends_its_comparison_and_can_be_confirmed(small: Lab) -> None:
    results = small.run(seeds=[0, 1, 2, 3], looks=[3, 4])
    (row,) = series(read_ledger(small.root / "ledger.csv")).to_dict("records")
    assert (row["verdict"], row["pairs"], row["seeds"]) == ("better", 3, [0, 1, 2, 3])
    assert row["p"] == pytest.approx(2 * results.contrasts[0].p), "at one of two looks"
    asked = confirmation(small.out, read_ledger(small.root / "ledger.csv"), small.root / "again")
    assert (asked["looks"], asked["seeds"], asked["name"]) == ([], [100, 101, 102], "test-confirm")


@pytest.mark.parametrize("broken", ["record_ended", "write_report"])
def test_a_call_that_is_killed_at_its_end_leaves_a_ledger_that_the_next_one_completes(
    broken: str, small: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"lm.lab.ablation.ablate.{broken}", die)
        with pytest.raises(KeyboardInterrupt):
            small.run()
    with monkeypatch.context() as patch:
        patch.setattr("lm.lab.ablation.ablate.write_record", die)
        with pytest.raises(KeyboardInterrupt):
            small.run()
    small.run()
    assert events(small) == [("asked", "out", ""), ("ended", "out", "better")]


def test_a_comparison_that_has_not_ended_takes_its_place(small: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(spec: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(EXECUTORS, "local", instant(stop))
        with pytest.raises(KeyboardInterrupt):
            small.run(folder="stopped", seeds=[0, 1, 2])
        small.run(seeds=[3, 4], plan_only=True)
    small.run(seeds=[3, 4])
    with monkeypatch.context() as patch:
        patch.setitem(EXECUTORS, "local", instant(stop))
        with pytest.raises(KeyboardInterrupt):
            small.run(seeds=[5, 6], folder="later")
    frame = series(read_ledger(small.root / "ledger.csv"))
    assert [*frame["verdict"]] == [None, "better", None]
    assert [*frame["level"]] == pytest.approx([level(1, 0), level(2, 0), level(3, 1)])


def level(i: int, discoveries: int) -> float:
    return ALPHA * i**-1.6 / 2.2857656656801293 * (discoveries + 1)  # Riemann's zeta of 1.6


def row(i: int, verdict: str, p: float, event: str = "ended") -> dict[str, str]:
    content = {"event": event, "comparison": str(i), "arm": "a", "pairs": "7", "verdict": verdict, "p": str(p)}
    return dict.fromkeys(COLUMNS, "") | content | {"question": str(i)}


def test_the_levels_of_a_series_sum_to_alpha_and_grow_with_each_discovery() -> None:
    assert sum(level(i, 0) for i in range(1, 100_000)) == pytest.approx(ALPHA, rel=2e-3)
    ps = [1e-6, 0.04, 1e-6, 0.5]
    verdicts = ["better", "worse", "better", "undecided"]
    rows = [row(i, "", 0.0, "asked") for i in range(4)]
    rows += [row(i, verdict, p) for i, (verdict, p) in enumerate(zip(verdicts, ps, strict=True))]
    frame = series(rows)
    assert [*frame["series_verdict"]] == ["better", "undecided", "better", "undecided"]
    assert [*frame["level"]] == pytest.approx([level(1, 0), level(2, 1), level(3, 1), level(4, 2)])
    frame = series([own | {"question": ""} for own in rows])
    assert [*frame["level"]] == pytest.approx([level(1, 0), level(2, 1), level(3, 1), level(4, 1)]), "discovered once"


def test_a_twentieth_of_the_discoveries_is_false_at_most() -> None:
    """Series of forty questions of seven seeds, three quarters of them useless; the others are worth three sd."""
    generator, false, found, plain_false, plain_found = np.random.default_rng(0), [], 0, [], 0
    for _ in range(300):
        useful = generator.random(40) < 0.25
        ps = stats.ttest_1samp(generator.normal(3.0 * useful[:, None], 1, (40, 7)), 0, axis=1).pvalue
        rows = [row(i, "", 0.0, "asked") for i in range(40)]
        rows += [row(i, "better" if p < ALPHA else "undecided", p) for i, p in enumerate(ps)]
        called = (series(rows)["series_verdict"] == "better").to_numpy()
        for calls, shares in ((called, false), (ps < ALPHA, plain_false)):
            shares.append((calls & ~useful).sum() / max(1, calls.sum()))
        found += (called & useful).sum()
        plain_found += (ps < ALPHA)[useful].sum()
    assert np.mean(false) < 0.05 < np.mean(plain_false)
    assert 0.7 * plain_found < found


def test_a_confirmation_takes_the_primary_arms_and_seeds_that_nobody_has_used(small: Lab) -> None:
    arms = {"tied": ["head=tied"], "untied": ["head=untied"], "scaled": ["head=tied_scaled"]}
    offsets = {"scaled": 1}
    with pytest.raises(UserError, match=r"out: holds no ablation\.json"):
        confirmation(small.out, [], small.root / "again")
    small.run(seeds=[100, 102], arms=arms | {"scaled": ["head=tied"]}, seed_offsets=offsets)
    assert confirmation(small.out, [], small.root / "again")["seeds"] == [104, 106], "by the folder alone"
    ledger = read_ledger(small.root / "ledger.csv")
    asked = confirmation(
        small.out, [*ledger, row(0, "", 0.0) | {"seeds": "104 105", "tuning_seeds": "106"}], small.root / "again"
    )
    assert (asked["arms"], asked["primary"]) == ({"tied": ["head=tied"], "untied": ["head=untied"]}, ["untied"])
    assert asked["seeds"] == [107, 109], "108 and 110 are those of the offset"
    assert asked["name"] == "test-confirm"
    with pytest.raises(UserError, match="too few seeds of 100 to 999"):
        confirmation(
            small.out, [row(0, "", 0.0) | {"seeds": " ".join(map(str, range(103, 1000)))}], small.root / "again"
        )
    assert [word for word in asked["overrides"] if word.startswith("data.path")] == [f"data.path={small.text}"]
    for seeds, confirmed in (([5, 7], [5, 7]), ([5, 7, 9], [104, 106])):  # as many, of the same arms, or not
        small.run(folder="again", seeds=seeds)
        assert confirmation(small.out, [], small.root / "again")["seeds"] == confirmed


@pytest.mark.slow
def test_a_confirmation_is_asked_resumed_and_shown(small: Lab, lab: Callable[..., Outcome]) -> None:
    code, shown, _ = lab("ablate", "head=tied,untied", str(small.text), "seeds=3", *TINY)
    (asked,) = Path("ablations").glob("head-*")
    assert (code, "untied is better than tied" in shown) == (0, True)
    for _ in range(2):
        code, shown, error = lab("ablate", f"confirm={asked}")
        assert (code, "3 seeds" in shown, "asked before" in error) == (0, True, False), "its seeds are fresh"
    record = read_record(Path(f"ablations/{asked.name}-confirm"))
    assert (record.seeds, len(read_ledger(Path("ablations/ledger.csv")))) == ([100, 101, 102], 4)
    code, shown, _ = lab("report", "ledger=true")
    assert (code, "of 2 comparisons 2 are called better or worse" in shown) == (0, True)
    code, shown, _ = lab("report", "ledger=ablations/ledger.csv", "json=true")
    rows = json.loads(shown)
    assert [row["series_verdict"] for row in rows] == ["better", "better"]
    assert ([row["seeds"] for row in rows], rows[0]["pairs"]) == ([[0, 1, 2], [100, 101, 102]], 3)
    assert {type(row["p"]) for row in rows} == {float}
    assert Path(rows[0]["folder"]) == asked


@pytest.mark.slow
def test_a_run_that_was_half_taken_over_is_in_no_folder(small: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(source: Path, target: Path, **options: object) -> None:
        target.mkdir()
        shutil.copy(source / "result.json", target)
        raise KeyboardInterrupt

    small.run()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", copy)
        with pytest.raises(KeyboardInterrupt):
            small.run(folder="killed")
    assert RunReader(small.root / "killed").finished() == []
    shutil.rmtree(small.out)
    small.run(folder="third")
    assert small.results(folder="killed") == {}
    assert len(small.results(folder="third")) == 4
    assert [*small.run(folder="killed").counts().values()] == [4, 0, 0, 0]


def test_a_ledger_that_is_none_is_refused(tmp_path: Path, lab: Callable[..., Outcome]) -> None:
    (tmp_path / "ledger.csv").write_text("a,b\n1,2\n")
    code, _, error = lab("report", f"ledger={tmp_path}/ledger.csv")
    assert (code, "the columns a, b" in error, error.count("\n")) == (2, True, 1)
