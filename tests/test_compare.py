"""A comparison in one line: its question, its file, its sentence, and its confirmation on fresh seeds."""

import re
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import yaml

from lm import UserError, compare, run_config, train
from lm.cli.compose import compose
from lm.config import RunConfig
from lm.lab.ablation.ask import (
    choose,
    compose_question,
    confirmation,
    question_in_a_line,
    question_words,
    write_question,
)
from lm.lab.ablation.execute import EXECUTORS
from lm.lab.ablation.folder import AblationRecord, ArmRecord, Run, RunFiles, folder_of, read_record, write_record
from lm.lab.ablation.question import AblateConfig
from tests.helpers.ablation_folder import question
from tests.helpers.ablations import SMALL, draw_nothing, instant, plan_in_a_moment
from tests.helpers.refusals import refused

TEXT = "To be, or not to be: that is the question.\n" * 100
TINY = [
    *("experiment=none", "tokenizer=byte", "model.n_layers=1", "model.d_model=16", "model.n_heads=2"),
    *("data.seq_len=16", "data.batch_size=2", "trainer.max_steps=4", "validation.every=0", "trainer=cpu", "threads=1"),
]


def asked_by(*words):
    """What a command line asks."""
    return compose("ablate", question_words(words)[0], AblateConfig)


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A folder in which commands are called, with a text."""
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(TEXT)


def test_the_values_become_arms_and_the_first_is_the_baseline():
    question = question_in_a_line("model.dropout=0,0.2,0.5")
    assert question["arms"] == {f"dropout-{value}": [f"model.dropout={value}"] for value in ("0", "0.2", "0.5")}
    asked = [question[key] for key in ("name", "baseline", "seeds")]
    assert asked == ["dropout-0-0.2-0.5", "dropout-0", 5]
    assert list(question_in_a_line("head=tied,untied")["arms"]) == ["tied", "untied"]
    assert question_in_a_line("tokenizer=byte,char")["metric"] == "val_bpb"
    assert [*question_in_a_line(f"data.path=/a/{'x' * 40},/b/{'x' * 40}")["arms"]] == ["path-0", "path-1"]


def test_python_configures_a_run_as_the_command_does_also_in_a_hydra_application(at_home):
    Path("conf").mkdir()
    Path("conf/config.yaml").write_text("own: 1")
    with hydra.initialize_config_dir(str(Path("conf").resolve()), version_base="1.3"):
        run = run_config(Path("my.txt"), "head=untied")
        assert hydra.compose("config").own == 1, "the application has its own configs again"
        with refused("^sead: no such key"):
            run_config("my.txt", "sead=1")
    assert (run.data.path, run.head.name, run.tokenizer.kind) == ("my.txt", "untied", "char")
    assert run == run_config("my.txt", "experiment=chars_10k", "head=untied")
    with refused("^-m: expected a text and settings"):
        run_config("-m", "my.txt", "seed=0,1")
    with refused(r"^run='my.txt': expected the configuration that lm.run_config\('my.txt'\) returns"):
        train("my.txt")


def test_digits_of_a_path_stay_as_typed_in_an_arm(at_home):
    for name in ("2024_01", "3.10"):
        Path(name).write_text(TEXT)
    Path("q.yaml").write_text(
        "question: a or b\narms: {a: data.path=2024_01, b: data.path=3.10}\nbaseline: a\nseeds: 3"
    )
    all_arms = ("data=text", "data.val_path=my.txt")
    for words in (("data.path=2024_01,3.10", *all_arms), ("q.yaml", *all_arms)):
        _, runs = compose_question(asked_by(*words))
        assert [run.data.path for run in runs.values()] == ["2024_01", "3.10"]


def test_a_question_may_have_any_name_that_a_folder_has():
    assert choose({}, "größe")[1] == "ablation.name='größe'"


def test_a_question_has_one_folder_whatever_decides_nothing(at_home):
    """Seeds are added in the folder that is there."""

    def folder(*words):
        config = asked_by("head=tied,untied", *words)
        return str(folder_of(*compose_question(config)))

    words = ["my.txt", *TINY]
    assert folder() == folder("checkpoint.every=2", "logger=tensorboard") == "ablations/head-tied-untied"
    path = folder(*words)
    assert re.fullmatch(r"ablations/head-tied-untied-\w{8}", path)
    assert path == folder(*TINY[::-1], "./my.txt", "seeds=4", "checkpoint.every=2", "logger=tensorboard")
    assert len({path, folder(*words, "optim.lr=0.5"), folder(*words, "max_tokens=999")}) == 3


def test_an_arm_of_another_optimizer_leaves_the_learning_rate_of_the_recipe():
    arms = question_in_a_line("optim=muon_chars,adamw")["arms"]
    run = compose("train", ["experiment=chars", *arms["adamw"]], RunConfig)
    assert run.optim == compose("train", ["optim=adamw"], RunConfig).optim


QUESTION = """question: Does dropout help on my text?
arms: {without: , dropout: model.dropout=0.1}
baseline: without
seeds: 4
looks: [3, 4]
tune: learning_rate
margin: 0.1
overrides: trainer.max_steps=4
"""
# what stands in a question -> what stands there instead -> what the line of error names
MISTAKES = r"""
    baseline: without -> baseline: witout -> ablation.baseline=witout
    [3, 4] -> [7] -> ablation.looks=[7]
    [3, 4] -> 3 -> mine.yaml: looks: expected a list
    [3, 4] -> [[3], 4] -> mine.yaml: looks[0]: Value '[3]'
    margin: 0.1 -> metirc: val_bpb -> mine.yaml: metirc: no such key; did you mean metric=VALUE?
    tune: -> primary: {a: b} # -> mine.yaml: primary: expected a list
    baseline: without -> baseline: [without] -> mine.yaml: baseline: Cannot convert
    margin: 0.1 -> margin: x -> mine.yaml: equivalence_margin: Value 'x'
    seeds: 4 -> seeds: 4.5 -> ablation.seeds=4.5: expected how many
    seeds: 4 -> question: again -> mine.yaml: not a question in YAML
    Does dropout help -> a: b -> mine.yaml: not a question in YAML
    seeds: 4 -> # -> mine.yaml: seeds: is missing
    tune: -> folds: 5 # -> ablation.folds=5: expected true or false
    model.dropout=0.1 -> {model.dropout: 0.1} -> ablation.arms.dropout: {'model.dropout': 0.1}: expected key=value
    model.dropout=0.1 -> [optim.betas=0.9,0.95] -> ablation.arms.dropout: 0.95: expected key=value
    trainer.max_steps=4 -> [model=tiny,small] -> ablation.overrides: small: expected key=value
    {without -> [without -> mine.yaml: not a question in YAML
    {without: , dropout: model.dropout=0.1} -> [without, dropout] -> mine.yaml: arms: expected a name for each arm
    tune: -> metric: ${x} # -> ablation.metric: Interpolation key
"""


@pytest.mark.parametrize("row", [row.strip() for row in MISTAKES.strip().splitlines()])
def test_a_mistake_in_a_file_is_one_line_in_its_words(row, tmp_path):
    old, new, named = row.split(" -> ")
    path = tmp_path / "mine.yaml"
    path.write_text(QUESTION.replace(old, new))
    with refused(re.escape(named)):
        asked_by(str(path))


def test_in_a_file_a_word_is_a_list_of_one_and_a_number_of_seeds_their_list(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(QUESTION)
    asked = asked_by(str(path)).ablation
    path.write_text("- a")
    with refused(r"mine\.yaml: its content: expected keys"):
        asked_by(str(path))
    assert (asked.arms, asked.seeds) == ({"without": [], "dropout": ["model.dropout=0.1"]}, [0, 1, 2, 3])
    assert (asked.overrides, asked.equivalence_margin) == (["trainer.max_steps=4"], 0.1)


@pytest.mark.slow
def test_a_line_ends_in_a_sentence_and_leaves_its_question_as_a_file(command, at_home):
    code, shown, said = command("ablate", "model.d_ff=16,32", "my.txt", "seeds=3", "margin=0.5", *TINY)
    assert code == 0, said
    (sentence,) = re.findall("^d_ff=32 .*16.* perplexity .*", shown, re.M)
    *_, path, other = shown.splitlines()[-1].split()
    path = Path(path)
    assert other == f"output_dir={path.parent}-edited"
    assert yaml.safe_load(path.read_text())["equivalence_margin"] == 0.5
    answer = compare("model.d_ff=16,32", text="my.txt", seeds=3, margin=0.5, overrides=TINY)
    assert answer.sentence == sentence, "the same question, whose runs are there"
    assert answer.verdict == answer.contrasts["verdict"].iloc[0]
    code, shown, said = command("ablate", str(path), f"output_dir={path.parent}")
    assert code == 0, said
    assert re.findall("^d_ff=32 .*", shown, re.M) == [sentence], "the file asks the same question"
    path.write_text(path.read_text() + "# mine\n")
    assert compare(str(path), overrides=[f"output_dir={path.parent}"]).rows["seed"].nunique() == 3, "as the file says"
    again = compare("model.d_ff=16,32", text="my.txt", seeds=range(1), margin=0.5, overrides=TINY)
    assert (again.folder, again.verdict) == (answer.folder, "undecided"), "one pair has no interval"
    assert path.read_text().endswith("# mine\n"), "what was edited stays"
    assert write_question(replace(asked_by("model.d_ff=16,32").ablation, name=path.stem), [], path.parent) != path


@pytest.mark.parametrize("seeds", ["5", 3.0, [0.5, 1.7]])
def test_a_mistake_in_the_seeds_is_named(seeds):
    with pytest.raises(UserError, match=r"seeds=.* expected"):
        compare("head=tied,untied", seeds=seeds)


# --- a confirmation asks the primary arms of an ablation again, on fresh seeds

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
        write_record(AblationRecord(question=own, arms=arms, runs=runs, overrides=["data.path=2024_01"]), tmp_path)
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
    assert again["seed_offsets"] == {}, "scaled is not asked again"
    assert (again["name"], again["first_fold"]) == ("test-confirm", 2.0), "two of ten parts have been used"
    assert again["overrides"] == [f"data.path='{folder}/2024_01'"]
    record = read_record(folder)
    record.seeds = [200, 204, *record.seeds]  # that were left out since; their runs are there
    write_record(record, folder)
    again = confirmation(folder)
    assert (again["seeds"], again["first_fold"]) == ([306, 308], 4.0), "neither a seed nor a part that was ever used"
    run = RunFiles(folder / "runs/tied-seed100-0")
    for end in (lambda: run.status.unlink(), lambda: run.write_status("killed", "by signal 9")):
        end()
        with refused("has not ended"):
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
    monkeypatch.setitem(EXECUTORS, "local", engine)
    code, shown, _ = lab("ablate", "head=tied,untied", corpus.name, "seeds=3", "experiment=none", *SMALL[1:])
    (folder,) = Path("ablations").glob("head-*")
    assert (code, "untied is better than tied" in shown) == (0, True)
    for _ in range(2):
        code, shown, error = lab("ablate", f"confirm={folder}")
        assert (code, "3 seeds" in shown) == (0, True), error
    assert read_record(Path(f"ablations/{folder.name}-confirm")).question.seeds == [100, 101, 102]
    code, _, error = lab("ablate", f"confirm={folder}", "output_dir=elsewhere/again")
    assert code == 0, error
    with monkeypatch.context() as patched:
        patched.setattr("lm.lab.ablation.arms.code_hash", lambda classes: "other")
        code, _, error = lab("ablate", f"confirm={folder}", "output_dir=new")
        assert (code, f"confirm={folder}: the arm tied has changed (of other code" in error) == (2, True), error
    whole = corpus.read_text()
    try:
        corpus.write_text(whole[::-1])
        code, _, error = lab("ablate", f"confirm={folder}", "output_dir=new")
    finally:
        corpus.write_text(whole)
    assert (code, "the arm tied has changed (the text is another)" in error) == (2, True), error
    assert not Path("new").exists()
