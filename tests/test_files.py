"""Files that are whole or recognised as damaged."""

import multiprocessing
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from lm.ablation.run.folder import claim
from lm.system import files
from lm.system.files import ABANDONED, atomic_file, read_sealed, without_checksum, write_sealed
from lm.system.lines import read_sealed_lines, sealed_line
from tests.inject import KINDS, Injection


@dataclass(slots=True, kw_only=True)
class Seen:
    step: int


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["lm.system.files"])
CONTENT = {"format": 3, "theta": 10000.0, "betas": (0.9, 0.95), "by": {2: "two", 10: None}, "name": "é\u2028"}


def test_a_sealed_file_gives_back_what_was_written(tmp_path: Path) -> None:
    write_sealed(tmp_path / "a.json", CONTENT)
    assert read_sealed(tmp_path / "a.json") == CONTENT | {"betas": [0.9, 0.95], "by": {"2": "two", "10": None}}


def test_every_changed_digit_or_letter_of_a_sealed_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_sealed(path, CONTENT)
    text = path.read_text()
    for i, character in enumerate(text):
        if character.isalnum():
            path.write_text(text[:i] + ("1" if character == "0" else "0") + text[i + 1 :])
            with pytest.raises(ValueError, match=r"."):
                read_sealed(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, '{"checksum": null}', "\udcff"])
def test_what_was_never_sealed_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"."):
        read_sealed(tmp_path / "a.json")


def test_an_ablation_that_begins_leaves_what_a_report_is_writing(tmp_path: Path) -> None:
    (tmp_path / ".partial-old").write_text("half")
    os.utime(tmp_path / ".partial-old", (0, os.stat(tmp_path).st_mtime - 2 * ABANDONED))
    with atomic_file(tmp_path, "report.md") as file:
        file.write(b"whole")
        with claim(tmp_path):
            pass
    assert (tmp_path / "report.md").read_text() == "whole"
    assert not list(tmp_path.glob(".partial-*"))


def test_a_file_without_a_checksum_is_not_hashed_for_each_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[object] = []
    monkeypatch.setattr(files, "checksum", lambda content: hashed.append(content) or "")
    content = {f"{i}": "a" * 64 for i in range(100)}
    assert without_checksum(content) == content
    assert len(hashed) == 2


def test_lines_of_earlier_versions_may_break_off_anywhere() -> None:
    torn = b'{"step": 1\n{"step": 2}\n'
    assert [one.step for one in read_sealed_lines(torn, Seen)[0]] == [2]
    assert read_sealed_lines(torn, Seen)[1] == []
    assert read_sealed_lines(torn + sealed_line({"step": 3}).encode(), Seen)[1] == [1], "today's have a mark"


def write_with_faults(folder: Path, kind: str) -> None:
    os.chdir(folder)
    for at in count(1):
        write_sealed(folder / "a.json", {"old": 1})
        if not (pid := os.fork()):
            injection = Injection(kind, at)
            injection()
            with suppress(OSError):
                write_sealed(folder / "a.json", {"new": 2})
                os._exit(3 if injection.seen < at else 0)
            os._exit(1)
        code, found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), read_sealed(folder / "a.json")
        assert found == {"new": 2} if code in (0, 3) else found in ({"old": 1}, {"new": 2})
        assert kind == "kill" or os.listdir(folder) == ["a.json"]
        if code == 3:  # there are fewer operations
            sys.exit(at)


@pytest.mark.parametrize("kind", ["kill", *KINDS])
def test_whatever_fails_while_a_file_is_written_it_is_the_old_or_the_new_one(tmp_path: Path, kind: str) -> None:
    process = PROCESSES.Process(target=write_with_faults, args=(tmp_path, kind))
    process.start()
    process.join()
    assert process.exitcode is not None
    assert process.exitcode > 5, "file operations"
