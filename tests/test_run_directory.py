"""Whose folder a run directory is, and which code made a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import TEXT

from lm.errors import UserError
from lm.folder import is_run
from lm.system.code import code_of
from lm.training.train import train
from tests.helpers.runs import composed, files, result, short_run, stop


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
