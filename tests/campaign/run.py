"""Forks of this process work off the cases, each case in a folder of its own."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import lm

from .case import Case, prepare
from .faults import cold, drivers, faults, kills
from .fuzz import prompts, texts, typos
from .limits import limits
from .program import FORK, Failed, end_all, lead

PARTS: dict[str, tuple[int, Callable[[Case], None]]] = {  # how many cases of a round, which takes about a minute
    "cold": (1, cold),
    "kills": (2, kills),
    "drivers": (1, drivers),
    "faults": (7, faults),
    "typos": (6, typos),
    "prompts": (4, prompts),
    "texts": (2, texts),
    "limits": (1, limits),
}
TIDY = ("faults", "typos", "texts")  # where no command is killed, temporary files are removed


@contextmanager
def prepared(parts: list[str]) -> Iterator[None]:
    """A context with all that cases need, in a temporary folder."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        os.environ |= {"PYTHONPATH": os.getcwd(), "TMPDIR": folder}
        tempfile.tempdir = folder
        for name in ("datasets", "matplotlib.backends.backend_svg", *ours()):
            import_module(name)  # once, and not in each fork
        gc.freeze()
        try:
            if {*parts} - {"typos", "prompts"}:
                prepare(Path(folder).resolve())
            os.chdir(folder)
            yield
        finally:
            os.chdir("/")


def ours() -> list[str]:
    return [one.name for one in walk_packages(lm.__path__, "lm.") if one.name != "lm.__main__"]


def run(cases: Iterable[Case], cores: int = 2, first: Callable[[], object] = int) -> Iterator[Case]:
    """Work off cases, so many at a time. `first` is called in each fork: what is to be other there."""
    running = set()
    with ProcessPoolExecutor(cores, FORK, lead, (first,)) as pool:
        for case in cases:
            running.add(pool.submit(attempt, case))
            while len(running) >= cores:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        yield from (one.result() for one in wait(running).done)


def attempt(case: Case) -> Case:
    """A case, in a folder that is removed. No process may be left, nor a temporary file where none was killed."""
    begun, home = time.monotonic(), Path.cwd()
    folder = home / f"{case.part}-{case.number}"
    for name in ("here", "tmp"):
        os.makedirs(folder / name)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    os.chdir(folder / "here")
    try:
        PARTS[case.part][1](case)
        left = [f"{n} processes"] if (n := end_all(30)) else os.listdir(folder / "tmp") if case.part in TIDY else []
        if left:
            raise Failed(f"{', '.join(left)} left behind")
    except Exception as error:
        kind = "" if isinstance(error, Failed) else f"the case itself: {type(error).__name__}: "
        said = ascii(" ".join(f"{case.about}: {kind}{error}".split()))[1:-1]
        case.failure = f"{case.part}: {said:.1000} (only=[{case.part}] case={case.number} seed={case.seed})"
    end_all(0)
    os.chdir(home)
    shutil.rmtree(folder, ignore_errors=True)
    case.seconds = time.monotonic() - begun
    return case
