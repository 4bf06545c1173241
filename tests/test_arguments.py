"""Words of a command line before Hydra reads them: a text, its recipe, quoting for Hydra's grammar.

Mistakes, and the lines that answer them: tests/test_cli.py.
"""

import os

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lm.cli.arguments import (
    MIN_BYTES,
    for_hydra,
    hydra_words,
    kinds_of,
    recipe_for,
)
from lm.cli.evaluate import parse_arguments
from lm.config import RECIPES, RunConfig, recipe_of
from lm.lab.ablation.question import AblateConfig
from tests.helpers.ablation_folder import write_run_dir
from tests.helpers.refusals import refused
from tests.helpers.tiny import TEXT

KINDS = kinds_of(RunConfig)
MY_TEXT = ["data=text", "data.path=my.txt"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Enter a folder with texts, tables, a run, and a config.yaml of another program."""
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


def hydra_reads(override):
    """The value of an override as Hydra's grammar has it."""
    return OverridesParser.create().parse_override(override).value()


def test_an_existing_path_by_itself_is_the_text_and_its_ending_tells_a_table():
    kinds = dict.fromkeys(("my text.txt", "a,b.txt", "a=b.txt", "books", "site", "*.txt"), "text")
    kinds |= dict.fromkeys(("rows.jsonl", "rows.ndjson", "rows.jl"), "json")
    for word, kind in kinds.items():
        recipe, *words = hydra_words([word, "seed=1"], KINDS)
        assert words == [f"data={kind}", f"data.path='{word}'", "seed=1"]
        assert (recipe.partition("=")[0], hydra_reads(words[1])) == ("experiment", word)


ODD = ["a=b, (c) [d] {e}: 'f' \"g\".txt", "it's", "a b", "$HOME", "~/x", "null.txt", "% # @ !", "é\u2028x", "a\\"]


def test_a_path_arrives_as_typed_through_hydra():
    for key in ("data.path", "data.val_path", "run_dir", "init_from", "+data.cache_dir"):
        for path in ODD:
            assert hydra_reads(for_hydra(f"{key}={path}", KINDS)) == path


def test_the_text_to_score_is_read_as_it_is_typed(folder):
    (folder / "a (1).txt").write_text(TEXT)
    config = parse_arguments(["a (1).txt", "run_dir=[a,b c]", "details=true", "data.max_bytes=9"])
    assert (config.data.source, config.data.path, config.data.max_bytes) == ("text", "a (1).txt", 9)
    assert (config.run_dir, config.details) == ("[a,b c]", True)
    (folder / "runs/a/model").mkdir(parents=True)
    config = parse_arguments(["runs/a", "books"])
    assert (config.run_dir, config.data.path) == ("runs/a", "books"), "a folder without a model is a text"


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("run_dir=2024_11", "run_dir='2024_11'"),
        ("prompts=[3.10, 1_000]", "prompts=['3.10','1_000']"),
        ('prompts=["To be, or not", "x"]', 'prompts=["To be, or not","x"]'),
        ("data.path='my text.txt'", "data.path='my text.txt'"),
        ("data.path=glob(*)", "data.path=glob(*)"),
        ("prompts=[f(a,b), x]", "prompts=[f(a,b), x]"),
        ("head.name=${seed}", "head.name=${seed}"),
        ("slurm.parameters={qos: long}", "++slurm.parameters={qos: long}"),
        ("slurm.parameters.qos=long", "++slurm.parameters.qos=long"),
        ("+slurm.parameters.qos=long", "+slurm.parameters.qos=long"),
        ("data.column=true", "data.column='true'"),
        ("model.attention_bias=true", "model.attention_bias=true"),
        ("prompts=[true, null, 'a, b', c]", "prompts=['true','null','a, b',c]"),
    ],
)
def test_digits_of_a_name_stay_as_typed_and_what_is_quoted_is_left(typed, quoted):
    assert for_hydra(typed, KINDS | kinds_of(AblateConfig)) == quoted


def test_text_that_hydras_grammar_lacks_arrives_as_typed():
    for text in ("größe", "f(x)", "§§§", "###", "\n\n", "(end)", "a = b", "[SEP]", "First Citizen:", "{x}", "C:\\x\\"):
        assert hydra_reads(for_hydra(f"data.separator={text}", KINDS)) == text
        if text == text.strip("[]\n"):
            assert hydra_reads(for_hydra(f"prompts=[{text}, x]", KINDS)) == [text, "x"]
    assert hydra_reads(for_hydra("prompts=[It's me, don't, 'x']", KINDS)) == ["It's me", "don't", "x"]


def test_commas_part_the_texts_of_a_sweep_alone(folder):
    for name in ("2024_01", "2024_02", "202401"):
        (folder / name).write_text(TEXT * 4)
    sweep = ["data=text", "data.path=2024_01,2024_02"]
    words = hydra_words(["-m", *sweep], KINDS)
    assert words[2:] == ["data=text", "data.path='2024_01','2024_02'"]
    with refused(r"^data\.path=2024_01,2024_02: "):
        recipe_for(sweep)
    for each_its_own in ("run_dir=r/${seed}", "run_dir=null", "run_dir=a,b"):  # one directory for all is refused
        assert hydra_words(["-m", "seed=0,1", each_its_own], KINDS)


def test_a_run_that_is_to_overfit_gets_no_recipe_and_null_is_no_length_and_no_base(folder):
    (folder / "my.txt").write_text(TEXT * 4)
    assert hydra_words(["my.txt", "trainer=overfit"], KINDS)[0] == "data=text", "no recipe"
    assert hydra_words(["trainer.max_steps=5", "max_tokens=null"], KINDS)
    assert hydra_words(["init_from=null", "--cfg", "job"], KINDS)[:2] == ["--cfg", "job"]


# --- recipes


def test_the_size_of_a_text_chooses_its_recipe(folder):
    for most, name in RECIPES.items():
        (folder / "text").write_bytes(b"a" * most)
        assert recipe_for(["data=text", "data.path=text"]) == name
    assert recipe_of(max(RECIPES) + 1) == "none"
    (folder / "short.txt").write_text("a" * (MIN_BYTES - 1))
    with refused(r"data\.path=short\.txt: has 1,999 bytes.*experiment=none"):
        recipe_for(["data=text", "data.path=short.txt"])


def test_what_is_typed_may_choose_limit_or_leave_the_recipe(caplog):
    caplog.set_level("INFO")
    own = recipe_of(os.path.getsize("my.txt"))
    for typed, name in {
        **dict.fromkeys(("experiment=chars", "model=medium", "tokenizer=bpe", "optim=adamw", "init_from=x"), None),
        **dict.fromkeys(("head=tied", "trainer=cpu", "logger=none", "seed=1", "data.path='my text.txt'"), own),
        "data.max_bytes=2_000": recipe_of(2000),
        "data.max_bytes=999_999": own,
        "data=stdlib": None,
        "data.path=choice(my.txt,books)": None,
        "data.path=${head.name}.txt": None,
    }.items():
        assert recipe_for([*MY_TEXT, typed], is_sweep=True) == name, typed
    assert "my.txt gets no recipe, because optim= is typed" in caplog.messages
    assert recipe_for(["data=text", "optim=adamw"]) is None


def test_an_address_is_downloaded_into_the_cache_that_is_typed(folder):
    (folder / "pool.txt").write_text(TEXT * 4)
    recipe_for(["data=text", f"data.path=file://{folder}/pool.txt", f"data.cache_dir={folder}/pool"])
    assert len([*(folder / "pool/downloads").iterdir()]) == 1
