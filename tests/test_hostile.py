"""Files and words of strangers, and files that fail: one line for each, no hang, nothing that steers a terminal."""

import errno
import json
import logging
import os
import pty
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.cli.errors import complain, report
from lm.cli.launch import Visible
from lm.cli.words import not_utf8
from lm.config import BadInput
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.data.vocabulary import byte_tokenizer
from lm.system import streams
from lm.system.files import read_yaml, sha256, sync_folder
from lm.system.table import csv_text

# --- errors


def raised(work: Callable[[], object]) -> OSError:
    with pytest.raises(OSError, match="error") as caught:
        work()
    return caught.value


@pytest.mark.parametrize("work", [Path.read_bytes, sha256])
def test_an_error_of_reading_names_the_file(work: Callable[[Path], object], capsys: pytest.CaptureFixture[str]) -> None:
    """/proc/self/mem gives EIO at its beginning; as any failed read, without the name of the file."""
    error = raised(lambda: work(Path("/proc/self/mem")))
    assert error.filename is None
    assert report(error) == 1
    assert capsys.readouterr().err == f"error: /proc/self/mem: {os.strerror(errno.EIO)}\n"


def test_an_error_of_syncing_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    assert raised(lambda: sync_folder(tmp_path)).filename == str(tmp_path)


# --- terminals, spreadsheets, names


def test_messages_do_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    complain("a\x1b[31m", 2)
    assert capsys.readouterr().err == "error: a\\x1b[31m\n"
    record = logging.LogRecord("lm", logging.INFO, "", 0, "%s\nb", ("\x1b]0;title\x07",), None)
    assert Visible("%(message)s").format(record) == "\\x1b]0;title\\x07\nb"


def test_what_is_printed_does_not_steer_a_terminal_and_a_pipe_gets_it_as_it_is() -> None:
    piped, terminal = os.pipe(), pty.openpty()
    for (reading, writing), seen in ((piped, b"a\x1b[2J"), (terminal, b"a\\x1b[2J")):
        kept = os.dup(1)
        os.dup2(writing, 1)
        try:
            stream = streams.stream(1, None, False)
            stream.write("a\x1b[2J")
            stream.flush()
        finally:
            os.dup2(kept, 1)
        assert os.read(reading, 99) == seen
        for descriptor in (reading, writing, kept):
            os.close(descriptor)


def test_a_table_for_spreadsheets_holds_no_formula() -> None:
    rows = [{"run": "=1+1", "@x": "-0.5", "loss": -0.5, "note": "-x"}]
    assert csv_text(["run"], rows) == "run,'@x,loss,note\n'=1+1,-0.5,-0.5,'-x\n"


def test_words_that_are_not_utf8_are_refused_but_for_a_prompt() -> None:
    assert not_utf8(["run_dir=é", "prompt=\udcff"]) is None
    assert not_utf8(["run_dir=é", "run_dir=\udcff"]) == "run_dir=\udcff: not UTF-8; rename the file"


# --- settings of a run


@pytest.mark.parametrize(
    "text", ["a: &a [x, x]\nb: *a", "a: &a [*a]", "a: &a {<<: *a}", "[1, 2]", "5", "a: !!python/name:os.system"]
)
def test_settings_that_no_program_has_written_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises((ValueError, yaml.YAMLError)):
        read_yaml(tmp_path / "config.yaml")


def test_a_bomb_of_aliases_is_refused_at_once(tmp_path: Path) -> None:
    """Nine levels of ten are a billion values; a text with a star that is no alias is read."""
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    (tmp_path / "config.yaml").write_text("\n".join(["a0: &a0 [x]", *levels]))
    with pytest.raises(ValueError, match="holds an alias"):
        read_yaml(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("path: 'texts/*.txt'")
    assert read_yaml(tmp_path / "config.yaml") == {"path": "texts/*.txt"}


# --- tokenizers

Step = dict[str, Any]
TWICE: Step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG: Step = {"type": "Replace", "pattern": {"Regex": "."}, "content": "b" * 1000}
SLOW: Step = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
MARK: Step = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, {**TWICE, "content": "b"}]}


def with_step(folder: Path, **steps: Step) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(byte_tokenizer().to_json()) | steps))
    return path


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [TWICE] * 30}},
        {"normalizer": {"type": "Prepend", "prepend": "b" * 1000}},
        {"normalizer": LONG},
        {"decoder": {"type": "Sequence", "decoders": [TWICE] * 30}},
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(steps: dict[str, Step], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(steps))}: makes up to .* characters of one, expected at most 100"):
        load_tokenizer(with_step(tmp_path, **steps))


def test_a_tokenizer_that_marks_the_beginning_of_a_text_is_read(tmp_path: Path) -> None:
    assert load_tokenizer(with_step(tmp_path, normalizer=MARK)).encode("a") == byte_tokenizer().encode("_b")


def test_a_panic_of_the_tokenizer_is_bad_input(tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(with_step(tmp_path, normalizer=SLOW))
    with pytest.raises(BadInput, match="tokenizer: its library gives up on this text"):
        tokenizer.encode("a" * 40 + "!")
