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
from lm.lab.commands.ablate import hydra_words
from lm.lab.commands.question import question_in_a_line, write_question

TEXT = "To be, or not to be: that is the question.\n" * 100
TINY = [
    *("experiment=none", "tokenizer=byte", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"),
    *("data.seq_len=16", "data.batch_size=2", "trainer.max_steps=4", "validation.every=0", "trainer=cpu", "threads=1"),
]


def test_the_values_become_arms_and_the_first_is_the_baseline() -> None:
    question = question_in_a_line("model.dropout=0,0.2,0.5", ["optim.lr=0.01"], seeds=3, margin=0.02)
    assert question["arms"] == {f"dropout-{value}": [f"model.dropout={value}"] for value in ("0", "0.2", "0.5")}
    asked = [question[key] for key in ("baseline", "seeds", "overrides")]
    assert asked == ["dropout-0", [0, 1, 2], ["optim.lr=0.01"]]
    assert question["name"] != question_in_a_line("model.dropout=0,0.2,0.5", [], seeds=3, margin=0.02)["name"]
    assert list(question_in_a_line("head=tied,untied", [])["arms"]) == ["tied", "untied"]
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
    typed = ["ablation.tune.trials=3", "ablation.tune.hyperparameters=[optim.lr]", "ablation.equivalence_margin=0.5"]
    code, shown, said = command(
        "ablate", "model.d_ff=16,32", "my.txt", *typed, "data.cache_dir=${run_dir}", "--cfg", "job"
    )
    assert code == 0, said
    assert yaml.safe_load(shown)["ablation"]["tune"]["trials"] == 3
    _, question, _ = hydra_words(["model.d_ff=16,32", "my.txt", *typed, "data.cache_dir=${run_dir}"])
    assert question is not None
    path = write_question(question, tmp_path)
    code, again, said = command("ablate", str(path), "--cfg", "job")
    assert code == 0, said
    assert yaml.safe_load(again) == yaml.safe_load(shown)
    for word, named in (("ablation.tune.trials=3,6", "trials"), ("ablation.tune.trails=3", "ablation.tune.trials=3")):
        code, _, said = command("ablate", "model.d_ff=16,32", "my.txt", word)
        assert (code, named in said) == (2, True), said


QUESTION = """question: Does dropout help on my text?
arms: {without: , dropout: model.dropout=0.1}
baseline: witout
seeds: 2
looks: [7]
tune: {hyperparameters: optim.lr, trials: 3}
margin: 0.1
overrides: trainer.max_steps=4
"""


def test_of_a_file_all_mistakes_are_told_in_its_words(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    mistakes = {
        QUESTION: ["baseline=witout"],
        QUESTION.replace("witout", "without"): ["looks=[7]"],
        QUESTION.replace("margin", "metirc").replace("3}", "x}"): ["metric?", "tune.trials", "margin: is missing; 0"],
        "- a": ["mine.yaml: expected keys"],
    }
    for content, named in mistakes.items():
        path.write_text(content)
        code, _, said = command("ablate", str(path), "--cfg", "job")
        assert (code, said.count("\n"), "ablation." in said) == (2, 1, False)
        assert [word for word in named if word not in said] == [], said
    path.write_text(QUESTION.replace("witout", "without").replace("7", "2"))
    code, shown, said = command("ablate", str(path), "--cfg", "job")
    assert code == 0, said
    asked = yaml.safe_load(shown)["ablation"]
    assert (asked["arms"], asked["seeds"]) == ({"without": [], "dropout": ["model.dropout=0.1"]}, [0, 1])
    assert (asked["overrides"], asked["equivalence_margin"]) == (["trainer.max_steps=4"], 0.1)
    assert asked["tune"]["hyperparameters"] == ["optim.lr"]


@pytest.mark.slow
def test_a_line_ends_in_a_sentence_and_leaves_its_question_as_a_file(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(TEXT)
    code, shown, said = command("ablate", "model.d_ff=16,32", "my.txt", "seeds=2", "margin=0.5", *TINY)
    assert code == 0, said
    pointer = shown.splitlines()[-1]
    (sentence,) = re.findall(".*nats per token.*", shown)
    number = r"[-+]\d+\.\d+"
    form = rf"d_ff=32 .*16.*: \d+\.\d % (lower|higher) perplexity \({number} nats per token, 95 % CI {number} to"
    form += rf" {number}, 2 seeds\); [\d.]+ % more parameters, [\d.]+ % more FLOPs per token(;|\.$)"
    assert re.match(form, sentence)
    path = Path(pointer.rpartition(" ")[2])
    assert yaml.safe_load(path.read_text())["equivalence_margin"] == 0.5
    answer = compare("model.d_ff=16,32", text="my.txt", seeds=2, margin=0.5, overrides=TINY)
    assert answer.sentence == sentence  # the same question, whose runs are there
    assert isinstance(answer.contrasts, pd.DataFrame)
    assert answer.verdict == answer.contrasts["verdict"].iloc[0]
    code, shown, said = command("ablate", str(path))
    assert code == 0, said
    assert "4 done" in shown
    assert re.findall(".*nats per token.*", shown) == [sentence], "the file asks the same question"
    path.write_text(path.read_text() + "# mine\n")
    few = compare("model.d_ff=16,32", text="my.txt", seeds=2, margin=0.5, overrides=TINY)
    assert path.read_text().endswith("# mine\n"), "what was edited stays"
    assert few.folder == answer.folder
    one = compare("model.d_ff=16,32", text="my.txt", seeds=1, margin=0.5, overrides=TINY)
    assert (one.verdict, "FLOPs" in one.sentence) == ("undecided", True), "one pair has no interval"
