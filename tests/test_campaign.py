"""The short form of the reliability campaign: it finds nothing, and it notices mechanisms that are switched off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def campaign(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.campaign", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_short_form_finds_nothing() -> None:
    found = campaign("cases=2", "cores=2", "only=[kills,faults,damage,hostile,typos,prompts,texts,limits]")
    assert found.returncode == 0, found.stdout
    assert found.stdout.count("| 2 | 0 |") == 6
    assert "| kills | 3 | 0 |" in found.stdout, "the first of them is one of two kills"
    assert "| prompts | 1,998 | 0 |" in found.stdout


@pytest.mark.slow
def test_it_notices_mechanisms_that_are_switched_off_and_repeats_a_case() -> None:
    found = campaign("controls", "only=[prompts,typos]")
    assert found.returncode == 0, found.stdout
    assert found.stdout.count("\n| ") == 4
    assert "nothing" not in found.stdout
    red = campaign("only=[prompts]", "case=0", "without=whole-characters")
    assert red.returncode == 1
    assert "is not their text (only=[prompts] case=0 seed=0 without=whole-characters)" in red.stdout


@pytest.mark.parametrize("word", ["mniutes=1", "only=[kill]", "without=nothing", "seed=x"])
def test_a_word_that_it_does_not_know_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from campaign.__main__ import main

    assert main([word]) == 2
    assert capsys.readouterr().err.startswith(f"error: {word}: cannot be read")


def test_a_mechanism_that_no_case_notices_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from campaign import __main__ as campaign

    monkeypatch.setattr(campaign, "CONTROLS", {"hash": ("damage", "os.path:sep", str)})
    monkeypatch.setattr(campaign, "PATIENCE", 3)
    monkeypatch.setitem(campaign.PARTS, "damage", (1.0, lambda *given: 1))
    assert campaign.try_controls(campaign.Made(tmp_path / "made", {}, {}, {}), 0, ["damage"], 2) == 1
    assert "| hash | damage | - | nothing |" in capsys.readouterr().out
