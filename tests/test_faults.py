"""The fault campaign finds no defect."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.nightly
def test_the_campaign_finds_no_defect():
    command = [sys.executable, "-m", "tests.faults", "minutes=5"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert answer.returncode == 0, answer.stdout + answer.stderr
