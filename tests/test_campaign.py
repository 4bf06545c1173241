"""The short form of the reliability campaign: it finds nothing, and it notices mechanisms that are switched off."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from conftest import ROOT

from tests import controls
from tests.campaign.__main__ import main
from tests.campaign.program import Command, Failed


def call(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.{module}", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_short_form_finds_nothing() -> None:
    found = call("campaign", "cases=2", "only=[cold,kills,faults,typos,prompts,texts,limits]")
    assert found.returncode == 0, found.stdout + found.stderr
    for part in ("kills", "faults", "typos", "texts"):
        assert f"| {part} | 2 | 0 |" in found.stdout
    assert re.search(r"\| cold \| [1-4] \| 0 \|", found.stdout), "of four kills some may come too late"
    assert re.search(r"\| limits \| [12] \| 0 \|", found.stdout), "and one of two signals"
    assert "| prompts | 1,998 | 0 |" in found.stdout


@pytest.mark.slow
def test_it_notices_mechanisms_that_are_switched_off_and_repeats_a_case() -> None:
    found = call("controls", "only=[prompts,typos]")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("\n| ") == 5
    assert "nothing" not in found.stdout
    assert "is not their text" in call("controls", "without=whole-characters").stdout


@pytest.mark.parametrize("word", ["mniutes=1", "only=[kill]", "without=nothing", "seed=x"])
@pytest.mark.parametrize("command", [main, controls.main])
def test_a_word_that_it_does_not_know_is_refused(
    command: Callable[[list[str]], int], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([word]) == 2
    assert capsys.readouterr().err.startswith(f"error: {word}: not understood")


def test_a_mechanism_that_no_case_notices_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "PATIENCE", 3)
    monkeypatch.setattr(controls, "run", lambda cases, **options: cases)
    assert controls.noticed(0, "faults", "os.path:sep", str) == "- | nothing"


@pytest.mark.parametrize(
    ("said", "code", "ends_well"),
    [("a word\nerror: x\n", 2, True), ("", 2, False), ("error: x\nmore\n", 2, False), ("error: x", 0, False)],
)
def test_a_command_that_fails_ends_in_one_line(said: str, code: int, ends_well: bool) -> None:
    command = Command.__new__(Command)
    command.words, command.err, command.code = ["train"], said, code
    with nullcontext() if ends_well else pytest.raises(Failed):
        command.proper()
