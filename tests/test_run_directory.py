"""Whose folder a run directory is, and which code made a run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import TEXT, TINY_RUN

from lm.errors import UserError
from lm.system.code import code_of
from lm.system.files import is_run
from lm.training.train import train
from tests.helpers.runs import change, composed, files, result, short_run, small_run, stop


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "baseURL: https://x/\ntitle: My site\n"),
        ("config.yaml", "model: {n_layers: 3}\ndata: {path: a}\n"),
        ("notes.txt", "mine"),
    ],
)
def test_what_lies_in_the_place_of_the_directory_is_refused_and_never_touched(name, content, tmp_path, monkeypatch):
    """A folder of another program or of a person, and the text itself."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    Path("my.txt").write_text(TEXT)
    before = files(tmp_path)
    for run_dir in (".", "my.txt"):
        with pytest.raises(UserError, match=f"^run_dir={run_dir}: "):
            train(composed("data=text", "data.path=my.txt", "tokenizer=byte", f"run_dir={run_dir}"))
    assert files(tmp_path) == before
    assert not is_run(tmp_path)


def test_a_run_says_which_code_made_it_and_other_code_does_not_continue_it(text_file, tmp_path, monkeypatch, caplog):
    run = short_run(text_file, tmp_path / "run")
    stop(run, 12)
    code = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["code"]
    other = {"version": "9.9.9", "hash": "0" * 64}
    for module in ("lm.training.run_directory", "lm.training.train"):
        monkeypatch.setattr(f"{module}.code_identity", lambda: other)
    with pytest.raises(UserError, match=r"was begun by other code.*checkpoint\.resume=false.*other_code=true"):
        train(run)
    train(replace(run, other_code=True))
    assert result(tmp_path / "run")["code"] == other != code
    monkeypatch.undo()
    assert train(run)[1]["code"] == other
    assert "was made by other code (version 9.9.9)" in caplog.text


def test_comments_docstrings_and_layout_are_no_code():
    plain = "def f(x):\n    return 2 * x\n"
    same = '"""A module."""\n\n# a comment\ndef f(\n    x\n):\n    """Double."""\n    return 2 * x  # twice\n'
    assert code_of(plain) == code_of(same).replace("( x )", "( x )")
    assert code_of(plain) != code_of(plain.replace("2", "3"))


def test_checkpoints_without_what_they_belong_to_are_refused_in_a_line(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "result.json").unlink()
    config = (run / "config.yaml").read_text()
    for content in ("", config[:900], None):
        (run / "config.yaml").unlink() if content is None else (run / "config.yaml").write_text(content)
        with pytest.raises(UserError, match=r"/run/config\.yaml: "):
            train(composed(*TINY_RUN, "data.path=t.txt", f"run_dir={run}"))


def test_settings_of_python_are_checked_as_those_of_a_file_are(text_file, tmp_path):
    run = small_run(text_file, tmp_path / "run")
    for wrong, key in (
        ({"max_steps": 2.5}, "trainer.max_steps"),
        ({"prompts": "Once"}, "prompts"),
        ({"seed": 1.5}, "seed"),
    ):
        with pytest.raises(UserError, match=f"^{key}: "):
            train(change(run, **wrong))
    optim = replace(run.optim, betas=(0.9, 0.95))
    first = train(change(run, optim=optim, max_steps=2))
    assert train(change(run, optim=optim, max_steps=2)) == first, "a tuple is a list"


def test_a_run_in_the_folder_of_its_text_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXT)
    words = [*TINY_RUN, "data.path=.", "data.cache_dir=cache/.x"]
    first = train(composed(*words, "run_dir=runs/a"))
    assert train(composed(*words, "run_dir=runs/a")) == first
    assert train(composed(*words, "run_dir=runs/b"))[1]["data_hash"] == first[1]["data_hash"]


def test_a_tokenizer_file_is_kept_with_a_run_that_stopped(finished_run, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(finished_run / "model/tokenizer.json", "own.json")
    tokenizer = ["tokenizer=file", "tokenizer.path=own.json"]
    words = [word for word in TINY_RUN if not word.startswith("tokenizer")]
    stop(composed(*words, *tokenizer, f"data.path={text_file}", "run_dir=run"), 6)
    Path("own.json").unlink()
    assert train(composed("run_dir=run"))[1]["resumed_from"] == [6]
