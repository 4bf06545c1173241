"""How many cores and threads there are, and how threads wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.config import UserError
from lm.system import device


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_wait_as_measured_unless_the_user_decides(variables: dict[str, str], expected: str) -> None:
    inherited = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import lm, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=inherited | variables
    ).stdout
    assert output.split() == [expected, "False"]


@pytest.mark.parametrize(("quota", "expected"), [("150000 100000", 2), ("max 100000", 64), ("", 64)])
def test_cores_are_limited_by_the_quota_of_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(64)}, raising=False)
    monkeypatch.setattr(device, "CPU_QUOTA", tmp_path / "cpu.max")
    assert device.cores() == expected


@pytest.mark.parametrize("wanted", ["0", "two", "100000"])
def test_a_wrong_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    with pytest.raises(UserError, match=f"^OMP_NUM_THREADS={wanted}: "):
        device.count_threads(None)
    assert device.count_threads(1) == 1
