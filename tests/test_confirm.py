"""A confirmation asks the primary arms of an ablation again, on fresh seeds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lm.errors import UserError
from lm.lab.ablation.ask import confirmation
from lm.lab.ablation.execute import ENGINES
from lm.lab.ablation.folder import COLUMNS, IN_MEMORY, read_record
from lm.lab.ablation.results import Results
from tests.conftest import Outcome
from tests.helpers.ablations import SHORT, Lab, instant, plan_in_a_moment
from tests.test_compare import TINY


@pytest.fixture
def small(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    losses = {"tied": 3.0, "untied": 2.5, "scaled": 3.0}
    made = instant(lambda spec: losses[spec.arm] + spec.seed % 7 * 1e-3 * (1 + (spec.arm == "tied")))
    monkeypatch.setitem(ENGINES, "local", made)
    plan_in_a_moment(monkeypatch)
    monkeypatch.setattr("lm.lab.ablation.ablate.write_report", write_rows)
    return Lab(tmp_path, corpus, SHORT)


def write_rows(results: Results, is_at_work: bool | None = None) -> None:
    """Write what a later call reads of a report: its pages take half of the time."""
    columns = [key for key in COLUMNS if key not in IN_MEMORY]
    results.runs[columns].to_csv(results.folder / "results.csv", index=False, lineterminator="\n")


def test_a_file_that_was_cut_is_named_with_its_line(small: Lab) -> None:
    small.run(seeds=[0, 1])
    path = small.out / "results.csv"
    whole = path.read_text()
    for n_bytes in (len(whole) - 1, len(whole) - 20, len(whole) // 2):
        path.write_text(whole[:n_bytes])
        with pytest.raises(UserError, match=r"results\.csv: .*row \d broke off"):
            small.run(seeds=[0, 1, 2])


@pytest.mark.parametrize("broken", ["results_of", "write_report"])
def test_a_call_that_is_killed_at_its_end_leaves_a_folder_that_the_next_one_completes(
    broken: str, small: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"lm.lab.ablation.ablate.{broken}", die)
        with pytest.raises(KeyboardInterrupt):
            small.run()
    assert small.run().record.ended
    assert read_record(small.out).ended


def test_a_look_that_decides_can_be_confirmed(small: Lab) -> None:
    results = small.run(seeds=[0, 1, 2, 3], looks=[3, 4])
    assert (results.contrasts[0].verdict, results.contrasts[0].n_seeds) == ("better", 3)
    asked = confirmation(small.out)
    assert (asked["looks"], asked["seeds"], asked["name"]) == ([], [100, 101, 102, 103], "test-confirm")


def test_a_confirmation_takes_the_primary_arms_fresh_seeds_and_other_parts_of_the_text(small: Lab) -> None:
    arms = {"tied": ["head=tied"], "untied": ["head=untied"], "scaled": ["head=tied"]}
    with pytest.raises(UserError, match=r"out: holds no ablation\.json"):
        confirmation(small.out)
    small.run(seeds=[100, 102], arms=arms, seed_offsets={"scaled": 1}, folds=True)
    asked = confirmation(small.out)
    assert (asked["arms"], asked["primary"]) == ({"tied": ["head=tied"], "untied": ["head=untied"]}, ["untied"])
    assert asked["seeds"] == [104, 106], "101, 103 and 105 are those of the offset"
    assert (asked["name"], asked["first_fold"]) == ("test-confirm", 2.0), "two of ten parts have been used"
    assert [word for word in asked["overrides"] if word.startswith("data.path")] == [f"data.path={small.text}"]
    small.run(folder="all", seeds=[*range(10)], folds=True)
    asked = confirmation(small.root / "all")
    assert (len(asked["seeds"]), asked["first_fold"]) == (9, 0.5), "half a part further there is one less"


@pytest.mark.slow
def test_a_confirmation_is_asked_resumed_and_shown(small: Lab, lab: Callable[..., Outcome]) -> None:
    code, shown, _ = lab("ablate", "head=tied,untied", str(small.text), "seeds=3", *TINY)
    (asked,) = Path("ablations").glob("head-*")
    assert (code, "untied is better than tied" in shown) == (0, True)
    for _ in range(2):
        code, shown, error = lab("ablate", f"confirm={asked}")
        assert (code, "3 seeds" in shown) == (0, True), error
    assert read_record(Path(f"ablations/{asked.name}-confirm")).question.seeds == [100, 101, 102]
