"""Whose folder a run directory is, which code made a run, and that the same command shows a finished run."""

import signal
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TEXT

from lm.config import RunConfig
from lm.errors import UserError
from lm.folder import is_run
from lm.system.code import code_of
from lm.training.train import train
from tests.helpers.runs import change, finish, result, short_run, signal_at


@pytest.mark.parametrize(
    "content", ["baseURL: https://x/\ntitle: My site\n", "model: {n_layers: 3}\ndata: {path: a}\n"]
)
@pytest.mark.parametrize("words", [[], ["experiment=none"], ["experiment=chars"]])
def test_a_folder_with_a_config_of_another_program_is_refused(
    content: str, words: list[str], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(content)
    (tmp_path / "my.txt").write_text(TEXT * 4)
    code, _, error = command(
        "train", "my.txt", "run_dir=.", "trainer.max_steps=2", "validation.every=1", "threads=1", *words
    )
    assert (code, "run_dir=.: holds other files" in error) == (2, True), error
    assert (tmp_path / "config.yaml").read_text() == content
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "my.txt"}
    assert not is_run(tmp_path)


def test_a_run_says_which_code_made_it_and_other_code_does_not_continue_it(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = short_run(text_file, tmp_path / "run")
    assert finish(run, partial(signal_at, 12, signal.SIGKILL)) == -signal.SIGKILL
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


def test_comments_docstrings_and_layout_are_no_code() -> None:
    plain = "def f(x):\n    return 2 * x\n"
    same = '"""A module."""\n\n# a comment\ndef f(\n    x\n):\n    """Double."""\n    return 2 * x  # twice\n'
    assert code_of(plain) == code_of(same).replace("( x )", "( x )")
    assert code_of(plain) != code_of(plain.replace("2", "3"))


def asides() -> list[tuple[str, Any]]:
    """Return the settings that decide no number, each with another value than the default."""
    values = dict[str, Any]()
    for group in (None, *(item.name for item in fields(RunConfig) if is_dataclass(item.type))):
        schema = RunConfig if group is None else next(i.type for i in fields(RunConfig) if i.name == group)
        for item in fields(schema):  # type: ignore[arg-type]
            if not item.metadata.get("decides", True) and isinstance(item.default, bool | int):
                values[f"{group}.{item.name}" if group else item.name] = item.default
    skipped = {"data.val_max_bytes", "tokenizer.vocab_size"}  # decide the text or the tokenizer
    return [
        (key, not value if isinstance(value, bool) else value + 1)
        for key, value in values.items()
        if key not in skipped
    ]


@pytest.mark.parametrize(("key", "value"), asides())
def test_a_finished_run_is_shown_whatever_does_not_decide_it(
    key: str, value: Any, finished_run: tuple[RunConfig, dict[str, Any]]
) -> None:
    run, scores = finished_run
    group, _, name = key.rpartition(".")
    other = (
        replace(run, **{group: replace(getattr(run, group), **{name: value})})
        if group
        else replace(run, **{name: value})
    )
    assert train(other)[1] == scores


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT * 4)
    run = change(short_run(folder / "text.txt", folder / "run"), max_steps=2)
    return run, train(run)[1]
