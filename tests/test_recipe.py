"""The recipe that the size of a text chooses, what typed groups replace in it, and the plan of a run."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from lm.cli.recipe import notes, text_size, with_recipe

from lm.cli.compose import compose, quoted
from lm.config import RECIPES, RunConfig, recipe_of
from lm.errors import UserError

TEXT = "To be, or not to be: that is the question.\n" * 100


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "my.txt"
    path.write_text(TEXT)
    return str(path)


@cache
def composed(*overrides: str) -> RunConfig:
    return compose("train", overrides, RunConfig)


def words(text: str, *typed: str) -> list[str]:
    return ["data=text", f"data.path='{text}'", *typed]


def test_sizes_of_recipes_rise() -> None:
    assert all(low < high for (low, _), (high, _) in pairwise(RECIPES))
    assert recipe_of(RECIPES[-1][0] + 1) == "none"
    assert compose("train", ["experiment=none"], RunConfig) == compose("train", [], RunConfig)


@pytest.mark.parametrize(
    "typed",
    [
        "experiment=none",
        "experiment=null",
        "experiment=chars",
        "init_from=x",
        "data.overfit_batches=1",
        "trainer=debug",
    ],
)
def test_a_command_that_decides_how_to_train_gets_no_recipe(text: str, typed: str) -> None:
    assert with_recipe(words(text, typed)) == words(text, typed)


def test_a_choice_in_a_folder_of_the_user_s_own_replaces_that_of_the_recipe(text: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("n_layers: 7\nd_model: 64\n")
    added = with_recipe(words(text, "model=mine"), str(tmp_path))
    assert {"model.n_layers=7", "model.d_model=64"} <= {*added}


def test_texts_of_other_kinds_get_no_recipe(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for typed in (["head=glob(*)"], ["data=text", "data.path='${x}'"], words(text, "data.max_bytes=abc")):
        assert with_recipe(typed) == typed
    (tmp_path / "my.txt").write_text(TEXT)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_recipe(["data=text", "data.path='~/my.txt'"])[0] == f"experiment={recipe_of(len(TEXT))}"
    assert with_recipe(["data=text", f"data.path='{text}','{text}'"])[0] == f"experiment={recipe_of(len(TEXT))}"
    for typed in ([], ["data=stdlib"], ["data=hub", "data.path=a/b"], ["run_dir=runs/x"], ["data.path=x"]):
        assert with_recipe(typed) == typed


@pytest.mark.parametrize(
    ("typed", "kept", "recipe"),
    [
        ("model=medium", ["model"], None),
        ("model=medium", ["model"], "chars"),
        ("optim=adamw", ["optim"], None),
        ("head=tied_scaled", ["head"], None),
        ("tokenizer=bpe", ["tokenizer", "optim", "head"], None),
        ("tokenizer=byte", ["tokenizer", "optim", "head"], "chars"),
        ("tokenizer=char", [], None),  # the recipe's own choice
        ("model={d_ff: 48}", [], None),  # no choice
    ],
)
def test_a_typed_group_replaces_that_of_the_recipe(text: str, typed: str, kept: list[str], recipe: str | None) -> None:
    asked = words(text, typed, *([f"experiment={recipe}"] if recipe else []))
    run = compose("train", with_recipe(asked), RunConfig)
    plain = composed(*words(text, typed))
    whole = composed(*words(text, f"experiment={recipe or recipe_of(len(TEXT))}"))
    if "{" in typed:
        whole = replace(whole, model=replace(whole.model, d_ff=run.model.d_ff))
    for group in ("model", "head", "optim", "tokenizer", "data", "trainer"):
        assert getattr(run, group) == getattr(plain if group in kept else whole, group)


def test_a_typed_setting_wins_and_a_trainer_keeps_the_length(text: str) -> None:
    run = compose("train", with_recipe(words(text, "model.n_layers=5", "trainer=cpu", "model=medium")), RunConfig)
    assert (run.model.n_layers, run.model.d_model) == (5, 384)
    assert run.trainer.max_steps == composed(*words(text, f"experiment={recipe_of(len(TEXT))}")).trainer.max_steps


def test_sweeps(text: str, tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_bytes(b"a" * (RECIPES[-1][0] + 1))
    with pytest.raises(UserError, match=r"my.txt experiment=\w+, .*large.txt experiment=none"):
        with_recipe(["data=text", f"data.path={text},{tmp_path}/large.txt"])
    with pytest.raises(UserError, match="model=small,medium"):
        with_recipe(words(text, "model=small,medium"))
    assert with_recipe(words(text, "head=tied,untied"))[1:] == words(text, "head=tied,untied")


def test_the_bytes_that_count_are_decompressed_and_below_max_bytes(text: str, tmp_path: Path) -> None:
    import gzip

    (tmp_path / "my.txt").write_text(TEXT)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode() * 3))
    assert text_size(str(tmp_path / "a.txt.gz"), "text")[0] == 3 * len(TEXT)
    assert text_size(str(tmp_path), "text")[0] == 4 * len(TEXT)
    (tmp_path / "large.txt").write_bytes(b"a" * (RECIPES[-1][0] + 1))
    asked = ["data=text", f"data.path={tmp_path}/large.txt", "data.max_bytes=5000"]
    assert with_recipe(asked)[0] == f"experiment={recipe_of(5000)}"


def test_a_run_that_exists_and_no_experiment_get_no_recipe(text: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    for typed in (words(text, f"run_dir={tmp_path}/run"), words(text, "experiment=null")):
        assert with_recipe([quoted(word, {}) for word in typed])[-len(typed) :] == [quoted(word, {}) for word in typed]
        assert not notes
    assert composed(*words(text, "experiment=null")) == composed(*words(text, "experiment=none"))


@pytest.mark.parametrize("typed", [[], ["tokenizer=bpe"], ["tokenizer=char"]])
def test_of_a_recipe_by_characters_it_is_said_what_an_export_to_gguf_needs(typed: list[str], tmp_path: Path) -> None:
    for size in (*(most for most, _ in RECIPES), RECIPES[-1][0] + 1):
        (tmp_path / "my.txt").write_bytes(b"a" * size)
        added = with_recipe(words(str(tmp_path / "my.txt"), *typed))
        kind = typed[0] if typed else f"tokenizer={compose('train', added, RunConfig).tokenizer.kind}"
        assert ("GGUF" in notes[0]) == (kind == "tokenizer=char")
        assert len(notes[0].replace(str(tmp_path), "")) < 80


def test_it_is_said_what_typed_groups_replace(text: str) -> None:
    for typed, replaced in (("head=tied", "head"), ("model=medium", "model.d_ff, model.d_model, model.dropout, ")):
        with_recipe(words(text, typed))
        assert f"what is typed replaces {replaced}" in notes[1]
    with_recipe(words(text, "optim.lr=0.1"))
    assert len(notes) == 1


def test_a_text_of_less_than_a_page_is_refused(tmp_path: Path) -> None:
    for text, length in ((TEXT[:1500], "1,500"), ("語" * 1999, "1,999")):
        (tmp_path / "short.txt").write_text(text)
        with pytest.raises(UserError, match=f"{length} characters, expected 2,000 or more.*experiment=none"):
            with_recipe(words(str(tmp_path / "short.txt")))
    (tmp_path / "short.txt").write_text("語" * 2000)
    assert with_recipe(words(str(tmp_path / "short.txt")))[0] == f"experiment={RECIPES[0][1]}"


def test_the_command_line_chooses_a_recipe(
    command: Callable[..., tuple[int, str, str]], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, shown, said = command("train", text, "--cfg", "job")
    recipe = composed(*words(text, f"experiment={recipe_of(len(TEXT))}"))
    assert (code, said) == (0, "")
    assert yaml.safe_load(shown)["trainer"]["max_steps"] == recipe.trainer.max_steps


def test_the_page_has_the_table_of_recipes() -> None:
    rows = re.findall(
        r"^\| (?:up to ([\d,]+)|above) \| `experiment=(\w+)` ", (ROOT / "docs/own-text.md").read_text(), re.M
    )
    assert [(int(most.replace(",", "")), name) for most, name in rows[:-1]] == [*RECIPES]
    assert rows[-1][1] == "none"
