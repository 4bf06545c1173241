"""The fault campaign finds no defect."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["commands=train,resume", "case=0,1,2"], marks=pytest.mark.slow),
        pytest.param(["minutes=5"], marks=pytest.mark.nightly),
    ],
)
def test_the_campaign_finds_no_defect(words: list[str]) -> None:
    command = [sys.executable, "-m", "tests.faults", *words]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert answer.returncode == 0, answer.stdout + answer.stderr
