"""Words of a command line before Hydra reads them: a text, its recipe, everyday names, mistakes."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TEXT, Outcome

from lm.cli.arguments import MIN_BYTES, for_hydra, hydra_words, is_folder, is_setting, is_text, kinds_of, recipe_for
from lm.cli.compose import compose
from lm.cli.evaluate import parse_arguments
from lm.config import RECIPES, RunConfig, recipe_of
from lm.errors import UserError
from lm.lab.ablation.question import AblateConfig
from tests.helpers.ablation_folder import write_run_dir

KINDS = kinds_of(RunConfig)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with texts, tables, a question, a run, and a config.yaml of another program."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.txt", "my text.txt", "a,b.txt", "books/one.txt", "a=b.txt", "site/one.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT * 4)
    (tmp_path / "site/config.yaml").write_text("title: mine\n")
    row = '{"text": "' + "To be, or not to be. " * 20 + '"}\n'
    for name in ("rows.jsonl", "rows.ndjson", "rows.jl"):
        (tmp_path / name).write_text(row * 10)
    write_run_dir(tmp_path / "runs/young", RunConfig())
    return tmp_path


@pytest.mark.parametrize("word", ["my text.txt", "a,b.txt", "a=b.txt", "books", "site", "*.txt"])
def test_an_existing_path_by_itself_is_the_text(word: str) -> None:
    words, notes = hydra_words([word, "seed=1"], KINDS)
    assert words == [notes[word].rpartition(" ")[2], "data=text", f"data.path='{word}'", "seed=1"]
    assert compose("train", words, RunConfig).data.path == word


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.jl"])
def test_the_ending_of_a_file_tells_a_table(name: str) -> None:
    words, _ = hydra_words([name], KINDS)
    assert words[1:] == ["data=json", f"data.path='{name}'"]


def test_the_size_of_a_text_chooses_its_recipe(folder: Path) -> None:
    for most, name in RECIPES.items():
        (folder / "text").write_bytes(b"a" * most)
        assert recipe_for(["data=text", "data.path=text"])[0] == name
    assert recipe_of(max(RECIPES) + 1) == "none"
    text = ["data=text", "data.path=my.txt"]
    for typed in ("experiment=chars", "model=medium", "tokenizer=bpe", "optim=adamw", "init_from=x"):
        assert recipe_for([*text, typed]) == (None, {})
    for typed in ("head=tied", "trainer=cpu", "logger=none", "seed=1"):
        assert recipe_for([*text, typed])[0] == recipe_of(len(TEXT) * 4)
    assert recipe_for([*text, "data.max_bytes=20000"])[0] == recipe_of(min(20_000, len(TEXT) * 4))
    assert recipe_for([*text, "data.max_bytes=2_000"])[0] == recipe_of(2_000)
    with pytest.raises(UserError, match="different recipes"):
        recipe_for([*text, "data.max_bytes=2000,100000"], is_sweep=True)
    assert recipe_for(["data=stdlib"]) == (None, {})
    (folder / "short.txt").write_text("a" * (MIN_BYTES - 1))
    with pytest.raises(UserError, match=r"data\.path=short\.txt: has 1,999 bytes.*experiment=none"):
        recipe_for(["data=text", "data.path=short.txt"])


def test_the_page_has_the_table_of_recipes() -> None:
    page = (ROOT / "docs/own-text.md").read_text()
    for most, name in RECIPES.items():
        assert f"| up to {most:,} | `experiment={name}`" in page


@pytest.mark.parametrize("recipe", ["chars_10k", "chars_30k", "chars_100k", "chars"])
def test_a_recipe_has_the_learning_rates_of_both_heads(recipe: str) -> None:
    """The products with optim.adam_lr are the rates of the study of tying, whatever the recipe's own head."""

    def rates(*words: str) -> tuple[float, float]:
        run = compose("train", [f"experiment={recipe}", "data=text", "data.path=my.txt", *words], RunConfig)
        adam_lr = run.optim.adam_lr or 0.0
        return adam_lr * run.head.embedding_lr_multiplier, adam_lr * (run.head.head_lr_multiplier or 0.0)

    assert rates() == pytest.approx((0.102, 0.012))
    assert rates("head=untied") == pytest.approx((0.102, 0.012))
    assert rates("head=tied")[0] == pytest.approx(0.0255)
    assert rates("head=tied", "head.embedding_lr_multiplier=1")[0] == pytest.approx(0.012)


ANSWERS = {  # what is typed -> what the one line about it says to type
    "train --data my.txt": "data=text data.path=my.txt",
    "train dataset=my.txt": "data=text data.path=my.txt",
    "train my.txt a,b.txt": "data.val_path=FILE",
    "train mine.yaml": "no such file",
    "train runs/young": "run_dir=runs/young",
    "train my.tx": "my.txt",
    "train my.txt steps=100": "trainer.max_steps=100",
    "train --max-iters=100 my.txt": "trainer.max_steps=100",
    "train my.txt epochs=3": "trainer.max_epochs=3",
    "train my.txt minutes=4": "max_minutes=4",
    "train --lr 0.01 my.txt": "optim.lr=0.01",
    "train my.txt learning_rate=0.1": "optim.lr=0.1",
    "train my.txt batch_size=4": "data.batch_size=4",
    "train my.txt block_size=64": "data.seq_len=64",
    "train my.txt n_layer=2": "model.n_layers=2",
    "train my.txt n_embd=64": "model.d_model=64",
    "train my.txt dropout=0.1": "model.dropout=0.1",
    "train my.txt vocab=500": "tokenizer.vocab_size=500",
    "train my.txt device=cpu": "trainer.accelerator=cpu",
    "train my.txt out_dir=x": "run_dir=x",
    "train model.layers=3": "model.n_layers=3",
    "train model=smal": "model=small",
    "train my.txt untied": "head=untied",
    "train my.txt model.d_ff=2k": "expected a whole number",
    "train my.txt trainer.max_steps=1e4": "expected a whole number",
    "generate --temp 0.8 hello": "temperature=0.8",
    "generate hello top-k=5": "top_k=5",
    "evaluate my.txt books/one.txt": "texts=[my.txt,books/one.txt]",
    "ablate my.txt model.d_ff=64": "head=tied,untied my.txt",
    "ablate head=tied,untied my.txt seed=3,4": "several settings",
    "trian my.txt": "lm-lab train my.txt",
}


@pytest.mark.parametrize("line", ANSWERS)
def test_a_first_try_is_answered_by_a_line_to_paste(line: str, lab: Any, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    answer: Outcome = lab(*shlex.split(line))
    code, out, error = answer
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert ANSWERS[line] in error.replace("'", "")
    assert sorted(folder.rglob("*")) == before


def test_digits_of_a_name_stay_as_typed(folder: Path) -> None:
    for name in ("2024_01", "2024_02", "202401"):
        (folder / name).write_text(TEXT * 4)
    words, _ = hydra_words(["-m", "data=text", "data.path=2024_01,2024_02", "run_dir=2024_11"], KINDS)
    assert words[2:] == ["data=text", "data.path='2024_01','2024_02'", "run_dir='2024_11'"]
    assert for_hydra("prompts=[3.10, 1_000]", KINDS) == "prompts=['3.10','1_000']"
    assert compose("train", ["prompts=['3.10','1_000']"], RunConfig).prompts == ["3.10", "1_000"]


def test_the_text_of_a_run_may_be_gone(folder: Path) -> None:
    config = folder / "runs/young/config.yaml"
    content = yaml.safe_load(config.read_text())
    content["data"] |= {"source": "text", "path": "gone.txt"}
    config.write_text(yaml.safe_dump(content))
    assert hydra_words(["gone.txt", "run_dir=runs/young"], KINDS)[0][0] == "data=text"
    with pytest.raises(UserError, match=r"gone\.txt: no such file"):
        hydra_words(["gone.txt"], KINDS)


def test_a_glob_ends_where_links_lead_to_the_folders_above(folder: Path) -> None:
    """Each of two links would double the paths of a level."""
    for name in ("a", "b"):
        (folder / "books" / name).symlink_to(".")
    with pytest.raises(UserError, match="no such file"):
        hydra_words(["books/**/*.xyz"], KINDS)
    for word in ("books/**/none", "books/**.xyz"):  # the second is no glob
        assert not is_text(word)
        assert not is_folder(word)
    assert not is_folder("/**none"), "a prompt may begin so"


def test_a_damaged_run_beside_a_text_is_named(folder: Path) -> None:
    (folder / "runs/young/config.yaml").write_text("config_hash: x\ndata: [\n")
    with pytest.raises(UserError, match=r"^runs/young/config\.yaml: "):
        hydra_words(["gone.txt", "run_dir=runs/young"], KINDS)


def test_an_address_is_downloaded_into_the_cache_that_is_typed(folder: Path) -> None:
    (folder / "pool.txt").write_text(TEXT * 4)
    recipe_for(["data=text", f"data.path=file://{folder}/pool.txt", f"data.cache_dir={folder}/pool"])
    assert len([*(folder / "pool/downloads").iterdir()]) == 1


def test_what_is_quoted_for_hydra_stays_as_typed(folder: Path) -> None:
    prompts = 'prompts=["To be, or not", "x"]'
    assert for_hydra(prompts, KINDS) == prompts
    assert compose("train", [for_hydra(prompts, KINDS)], RunConfig).prompts == ["To be, or not", "x"]
    quoted, plain = (["data=text", f"data.path={path}"] for path in ("'my text.txt'", "my text.txt"))
    assert recipe_for(quoted) == recipe_for(plain)
    for choices in ("choice(my.txt,books)", "glob(*)", "${head.name}.txt"):
        assert recipe_for(["data=text", f"data.path={choices}"], is_sweep=True) == (None, {})


def test_commas_part_the_texts_of_a_sweep_alone() -> None:
    sweep = ["data=text", "data.path=my.txt,books"]
    assert recipe_for(sweep, is_sweep=True)[0] == recipe_of(len(TEXT) * 4)
    with pytest.raises(UserError, match=r"^data\.path=my\.txt,books: "):
        recipe_for(sweep)


def test_an_arm_of_a_question_is_a_setting() -> None:
    arm = "ablation.arms.untied=[head=untied]"
    assert is_setting(arm, kinds_of(AblateConfig))
    assert not is_setting("model.arms.untied=[head=untied]", kinds_of(AblateConfig) | KINDS)


def test_a_home_that_does_not_exist_is_no_fault_of_the_program() -> None:
    with pytest.raises(UserError, match=r"^gone\.txt: no such file"):
        hydra_words(["gone.txt", "run_dir=~nobody-at-all/x"], KINDS)


def test_the_text_to_score_is_read_as_it_is_typed(folder: Path) -> None:
    (folder / "a (1).txt").write_text(TEXT)
    config = parse_arguments(["a (1).txt"])
    assert config.data is not None
    assert config.data.path == "a (1).txt"
