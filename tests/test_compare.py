"""A comparison in one line: its question, its file and its sentence."""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from lm import compare
from lm.cli.compose import compose
from lm.config import RunConfig
from lm.errors import UserError
from lm.lab.ablation.ask import question_in_a_line, write_question
from lm.lab.commands.ablate import hydra_words

TEXT = "To be, or not to be: that is the question.\n" * 100
TINY = [
    *("experiment=none", "tokenizer=byte", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"),
    *("data.seq_len=16", "data.batch_size=2", "trainer.max_steps=4", "validation.every=0", "trainer=cpu", "threads=1"),
]


def test_the_values_become_arms_and_the_first_is_the_baseline() -> None:
    settings = ["ablation.seeds=[0,1,2]", "ablation.equivalence_margin=0.02"]
    question = question_in_a_line("model.dropout=0,0.2,0.5", ["optim.lr=0.01"], settings)
    assert question["arms"] == {f"dropout-{value}": [f"model.dropout={value}"] for value in ("0", "0.2", "0.5")}
    asked = [question[key] for key in ("baseline", "seeds", "overrides")]
    assert asked == ["dropout-0", [0, 1, 2], ["optim.lr=0.01"]]
    assert question["name"] != question_in_a_line("model.dropout=0,0.2,0.5", [], settings)["name"]
    grown = question_in_a_line("model.dropout=0,0.2,0.5", ["optim.lr=0.01"], ["ablation.seeds=[0,1,2,3]"])
    assert question["name"] == grown["name"], "seeds are added in the folder that is there"
    assert list(question_in_a_line("head=tied,untied", [])["arms"]) == ["tied", "untied"]
    names = {question_in_a_line("head=tied,untied", words)["name"] for words in (["a=1", "b=2"], ["b=2", "a=1"])}
    assert len(names) == 1, "the order of words is no other question"
    assert question_in_a_line("tokenizer=byte,char", [])["metric"] == "val_bpb"
    assert [*question_in_a_line(f"data.path=/a/{'x' * 40},/b/{'x' * 40}", [])["arms"]] == ["path-0", "path-1"]
    for change in ("model.dropout=0.1", "model.dropout=0.1,0.1"):
        with pytest.raises(UserError, match=r"model\.dropout"):
            question_in_a_line(change, [])


def test_an_arm_of_another_optimizer_leaves_the_learning_rate_of_the_recipe() -> None:
    arms = question_in_a_line("optim=muon_chars,adamw", ["experiment=chars"])["arms"]
    run = compose("train", ["experiment=chars", *arms["adamw"]], RunConfig)
    assert run.optim == compose("train", ["optim=adamw"], RunConfig).optim


def test_what_is_typed_of_the_question_is_in_its_file(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(TEXT)
    typed = ["tune=true", "margin=0.5", "folds=false", "seeds=3"]
    code, shown, said = command(
        "ablate", "model.d_ff=16,32", "my.txt", *typed, "data.cache_dir=${run_dir}", "--cfg", "job"
    )
    assert code == 0, said
    asked = yaml.safe_load(shown)["ablation"]
    assert [asked[key] for key in ("tune", "equivalence_margin", "folds", "seeds")] == [
        "learning_rate",
        0.5,
        False,
        [0, 1, 2],
    ]
    _, question, _ = hydra_words(["model.d_ff=16,32", "my.txt", *typed, "data.cache_dir=${run_dir}"])
    assert question is not None
    path = write_question(question, tmp_path)
    code, again, said = command("ablate", str(path), "--cfg", "job")
    assert code == 0, said
    assert yaml.safe_load(again) == yaml.safe_load(shown)
    for word, named in (("ablation.tune=a,b", "tune"), ("ablation.tun=true", "ablation.tune=true")):
        code, _, said = command("ablate", "model.d_ff=16,32", "my.txt", word)
        assert (code, named in said) == (2, True), said


QUESTION = """question: Does dropout help on my text?
arms: {without: , dropout: model.dropout=0.1}
baseline: witout
seeds: 4
looks: [7]
tune: learning_rate
margin: 0.1
overrides: trainer.max_steps=4
"""


def test_a_mistake_in_a_file_is_told_in_its_words(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    right = QUESTION.replace("witout", "without").replace("7", "3, 4")
    mistakes = {
        QUESTION: "baseline=witout",
        QUESTION.replace("witout", "without"): "looks=[7]",
        right.replace("margin", "metirc"): "metirc: no such key",
        right.replace("seeds: 4\n", ""): "seeds: is missing",
        right + "equivalence_margin: 0.2\n": "margin: is equivalence_margin",
        right.replace("margin: 0.1", "margin: x"): "equivalence_margin",
        "- a": "mine.yaml: expected keys",
    }
    for content, named in mistakes.items():
        path.write_text(content)
        code, _, said = command("ablate", str(path), "--cfg", "job")
        assert (code, said.count("\n"), "ablation." in said, named in said) == (2, 1, False, True), said
    path.write_text(right)
    code, shown, said = command("ablate", str(path), "--cfg", "job")
    assert code == 0, said
    asked = yaml.safe_load(shown)["ablation"]
    assert (asked["arms"], asked["seeds"]) == ({"without": [], "dropout": ["model.dropout=0.1"]}, [0, 1, 2, 3])
    assert (asked["overrides"], asked["equivalence_margin"]) == (["trainer.max_steps=4"], 0.1)
    assert asked["tune"] == "learning_rate"


@pytest.mark.slow
def test_a_line_ends_in_a_sentence_and_leaves_its_question_as_a_file(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(TEXT)
    code, shown, said = command("ablate", "model.d_ff=16,32", "my.txt", "seeds=3", "margin=0.5", *TINY)
    assert code == 0, said
    pointer = shown.splitlines()[-1]
    (sentence,) = re.findall("^d_ff=32 .*", shown, re.M)
    ends = r"[-+]\d+\.\d % to [-+]\d+\.\d %, 3 seeds and validation texts\)"
    form = (
        rf"d_ff=32 .*16.*: (\d+\.\d % (lower|higher)|the same) perplexity \(9[05] % CI {ends}, at the config's learning"
    )
    form += r" rates, not tuned; [\d.]+ % more parameters, [\d.]+ % more FLOPs per token; "
    assert re.match(form, sentence), sentence
    assert sentence.endswith("tune=true tunes them, in 30 runs or more.")
    assert "scored: each pair holds out a part of its own" in shown
    path = Path(pointer.rpartition(" ")[2])
    assert yaml.safe_load(path.read_text())["equivalence_margin"] == 0.5
    answer = compare("model.d_ff=16,32", text="my.txt", seeds=3, margin=0.5, overrides=TINY)
    assert answer.sentence == sentence  # the same question, whose runs are there
    assert isinstance(answer.contrasts, pd.DataFrame)
    assert answer.verdict == answer.contrasts["verdict"].iloc[0]
    code, shown, said = command("ablate", str(path))
    assert code == 0, said
    assert "6 done" in shown
    assert re.findall("^d_ff=32 .*", shown, re.M) == [sentence], "the file asks the same question"
    path.write_text(path.read_text() + "# mine\n")
    few = compare("model.d_ff=16,32", text="my.txt", seeds=3, margin=0.5, overrides=TINY)
    assert path.read_text().endswith("# mine\n"), "what was edited stays"
    assert few.folder == answer.folder
    assert write_question(yaml.safe_load(path.read_text()) | {"name": path.stem, "seeds": [7]}, path.parent) != path
    one = compare("model.d_ff=16,32", text="my.txt", seeds=1, margin=0.5, overrides=TINY)
    assert (one.verdict, "FLOPs" in one.sentence) == ("undecided", True), "one pair has no interval"
