"""A confirmation asks the primary arms of an ablation again, on fresh seeds."""

from pathlib import Path

import pytest
from conftest import ROOT

from lm.errors import UserError
from lm.lab.ablation.ask import confirmation
from lm.lab.ablation.execute import ENGINES
from lm.lab.ablation.folder import AblationRecord, ArmRecord, Run, RunFiles, read_record, write_record
from tests.helpers.ablation_folder import question
from tests.helpers.ablations import SMALL, draw_nothing, instant, plan_in_a_moment

ARMS = {"tied": ["head=tied"], "untied": ["head=untied"], "scaled": ["head=tied"], "far": ["head=untied"]}


@pytest.fixture
def asked(tmp_path):
    """An ablation with these changes, all of whose runs have ended."""

    def asked(made=None, **changes):
        own = question(**{"arms": ARMS} | changes)
        arms = {arm: ArmRecord(overrides=ARMS[arm], settings={"data.val_fraction": 0.1}) for arm in own.arms}
        runs = [
            Run(arm=arm, seed=seed, run_dir=f"runs/{arm}-seed{seed}-0") for arm in arms for seed in own.seeds[:made]
        ]
        write_record(AblationRecord(question=own, arms=arms, runs=runs, overrides=["data.path=a.txt"]), tmp_path)
        (tmp_path / "runs").mkdir()
        for run in runs:
            RunFiles(tmp_path / run.run_dir).write_status("diverged", "nan")
        return tmp_path

    return asked


def test_a_confirmation_takes_the_primary_arms_fresh_seeds_and_other_parts_of_the_text(asked):
    folder = asked(seeds=[100, 102], seed_offsets={"scaled": 1}, folds=True)
    again = confirmation(folder)
    assert (again["arms"], again["primary"]) == ({"tied": ["head=tied"], "untied": ["head=untied"]}, ["untied"])
    assert again["seeds"] == [204, 206], "none of 100 to 103, which the first ablation has used"
    assert (again["name"], again["first_fold"]) == ("test-confirm", 2.0), "two of ten parts have been used"
    assert again["overrides"] == [f"data.path='{folder}/a.txt'"]
    record = read_record(folder)
    record.seeds = [200, 204, *record.seeds]  # that were left out since; their runs are there
    write_record(record, folder)
    again = confirmation(folder)
    assert (again["seeds"], again["first_fold"]) == ([306, 308], 4.0), "neither a seed nor a part that was ever used"
    run = RunFiles(folder / "runs/tied-seed100-0")
    for end in (lambda: run.status.unlink(), lambda: run.write_status("killed", "by signal 9")):
        end()
        with pytest.raises(UserError, match="has not ended"):
            confirmation(folder)


OTHERS = {"primary": ["far"], "baselines": {"far": "scaled"}}


@pytest.mark.parametrize(
    ("changes", "arms"),
    [
        (OTHERS | {"baseline": "scaled", "baselines": {}}, ["scaled", "far"]),
        (OTHERS | {"match_parameters": {"scaled": "model.d_ff"}}, ["tied", "scaled", "far"]),  # which decides its size
        (OTHERS | {"budget": "flops"}, ["tied", "scaled", "far"]),  # which decides how long both train
    ],
)
def test_a_confirmation_has_the_arms_that_its_comparisons_need(changes, arms, asked):
    again = confirmation(asked(**changes))
    assert ([*again["arms"]], again["baseline"]) == (arms, arms[0])
    assert again["baselines"] == ({} if len(arms) == 2 else {"far": "scaled"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"folds": True, "seeds": [*range(10)]}, ([*range(100, 109)], 0.5, [])),  # half a part further is one less
        ({"seeds": [0, 1, 2, 3], "looks": [3, 4]}, ([100, 101, 102, 103], 0.0, [])),
        # A look has decided after three seeds, so the other parts have not been used.
        ({"folds": True, "seeds": [*range(6)], "looks": [3, 6], "made": 3}, ([*range(100, 106)], 3.0, [])),
    ],
)
def test_a_confirmation_is_of_as_many_seeds_as_fresh_parts_of_the_text_allow(changes, expected, asked):
    again = confirmation(asked(**changes))
    assert (again["seeds"], again["first_fold"], again["looks"]) == expected


def test_a_base_for_each_seed_stays_so_and_the_first_answer_is_not_overwritten(asked, command):
    folder = asked()
    record = read_record(folder)
    record.overrides = ["init_from=bases/seed{seed}"]
    write_record(record, folder)
    assert confirmation(folder)["overrides"] == record.overrides
    code, _, said = command("ablate", f"confirm={folder}", f"output_dir={folder}/runs/..")
    assert (code, "holds the ablation that is to be confirmed" in said) == (2, True)


@pytest.mark.slow
def test_a_confirmation_is_asked_resumed_and_shown(corpus, lab, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    plan_in_a_moment(monkeypatch)
    draw_nothing(monkeypatch)
    engine = instant(lambda spec: 3.0 + spec.seed % 7 * 1e-3 - 0.5 * (spec.arm == "untied") * (1 + spec.seed % 5 / 99))
    monkeypatch.setitem(ENGINES, "local", engine)
    code, shown, _ = lab("ablate", "head=tied,untied", corpus.name, "seeds=3", "experiment=none", *SMALL[1:])
    (folder,) = Path("ablations").glob("head-*")
    assert (code, "untied is better than tied" in shown) == (0, True)
    for _ in range(2):
        code, shown, error = lab("ablate", f"confirm={folder}")
        assert (code, "3 seeds" in shown) == (0, True), error
    assert read_record(Path(f"ablations/{folder.name}-confirm")).question.seeds == [100, 101, 102]


def test_a_frozen_study_cannot_be_confirmed():
    folder = ROOT / "docs/studies/tying/main"
    with pytest.raises(UserError, match=f"^confirm={folder}: is a study that is frozen as published"):
        confirmation(folder)
