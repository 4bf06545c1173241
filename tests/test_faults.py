"""The fault campaign finds no defect, and it finds one where a mechanism is missing."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from tests.faults.campaign import ERROR, KILL_AT_OPERATION, SEVERAL, Case, prepared


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["commands=train,resume", "case=0,1,2,3,4,5"], marks=pytest.mark.slow),
        pytest.param(["minutes=5"], marks=pytest.mark.nightly),
    ],
)
def test_the_campaign_finds_no_defect(words: list[str]) -> None:
    command = [sys.executable, "-m", "tests.faults", *words]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def write_in_place(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def in_place(path: Path) -> Iterator[Any]:
        with open(path, "wb") as file:
            yield file

    for name, module in list(sys.modules.items()):
        if name.startswith("lm.") and hasattr(module, "atomic_file"):
            patch.setattr(module, "atomic_file", in_place)


def keep_temporary_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)


def forget_the_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.optim.Optimizer.load_state_dict", lambda self, content: None)


def take_no_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("filelock.BaseFileLock.acquire", lambda self, **options: nullcontext())


CONTROLS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (write_in_place, "train", ERROR),
    (keep_temporary_files, "train", ERROR),
    (forget_the_optimizer, "resume", KILL_AT_OPERATION),
    (take_no_lock, "resume", SEVERAL),
]


def try_controls(defects: Any) -> None:
    """Send for each control the first defect that is there without the mechanism and not there with it."""
    os.chdir(ROOT)
    with prepared(["train", "resume"]) as fixtures:
        for break_mechanism, command, fault in CONTROLS:
            for number in range(50):
                with pytest.MonkeyPatch.context() as patch:
                    break_mechanism(patch)
                    case = Case(number, 0, (command,), (fault,)).run(*fixtures)
                if case.defect:
                    break
            intact = Case(number, 0, (command,), (fault,)).run(*fixtures)
            defects.send((break_mechanism.__name__, case.defect, intact.defect))


@pytest.mark.nightly
def test_a_missing_mechanism_is_noticed() -> None:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=try_controls, args=(sender,))
    process.start()
    sender.close()
    for break_mechanism, _, _ in CONTROLS:
        name, without, intact = receiver.recv()
        assert name == break_mechanism.__name__
        assert without, f"{name}: not noticed"
        assert not intact, f"{name}: {intact}"
    process.join()
