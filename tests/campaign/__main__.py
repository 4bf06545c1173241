"""python -m tests.campaign [minutes=60] [seed=0] [only=[PART,...]] [case=N] [cases=N] [without=MECHANISM] [controls]

One table at the end, exit code 1 if anything has failed, nothing left behind. `case` repeats one case of a part,
`cases` runs so many of each part, `without` switches a mechanism off. `controls` does so with each mechanism in turn:
all of them must make the campaign fail. `cores` cases run at a time, 2 by default.
"""

import gc
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import NamedTuple, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins

import lm

from .case import Failed, session
from .controls import CONTROLS, PATIENCE
from .damage import damage, kind
from .fuzz import prompts, texts, typos
from .hostile import hostile
from .kills import command, drivers, faults, kills
from .limits import limit, limits
from .prepared import Made, prepare

CASE_LIMIT = 900.0  # seconds of a case, which runs several commands
PARTS: dict[str, tuple[float, Callable[[Made, int, random.Random, int], int]]] = {  # its share of the time
    "kills": (0.14, kills),
    "drivers": (0.3, drivers),
    "faults": (0.11, faults),
    "damage": (0.31, damage),
    "hostile": (0.05, hostile),
    "typos": (0.035, typos),
    "prompts": (0.01, prompts),
    "texts": (0.015, texts),
    "limits": (0.03, limits),
}
ABOUT: dict[str, Callable[[int], str]] = {"kills": command, "damage": kind, "limits": lambda n: limit(n).__name__}


class Case(NamedTuple):
    part: str
    number: int
    folder: Path
    begun: float
    pipe: int


class Campaign:
    """Each case is a fork of this process, in a session and a folder of its own, which end with it."""

    def __init__(self, made: Made, seed: int, only: list[str], without: str = "", cores: int = 2) -> None:
        self.made, self.seed, self.without, self.cores = made, seed, without, cores
        self.begun, self.tried = dict.fromkeys(only, 0), dict.fromkeys(only, 0)
        self.seconds, self.running = dict.fromkeys(only, 0.0), dict[int, Case]()
        self.failures: list[str] = []
        self.cases = 1  # of each part at least

    def begin(self, name: str, number: int) -> None:
        folder = self.made.folder.with_name(f"{name}-{number}")
        (folder / "here").mkdir(parents=True)
        (folder / "tmp").mkdir()
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            self.work(name, number, folder, writing)
        os.close(writing)
        self.running[pid] = Case(name, number, folder, time.monotonic(), reading)
        self.begun[name] += 1

    def work(self, name: str, number: int, folder: Path, pipe: int) -> NoReturn:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        os.setsid()
        os.chdir(folder / "here")
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        try:
            if self.without:
                CONTROLS[self.without][1]()
            said = str(PARTS[name][1](self.made, number, random.Random(f"{name} {number} {self.seed}"), self.seed))
        except BaseException as error:
            said = f"1 {error}" if isinstance(error, Failed) else f"1 the case itself: {type(error).__name__}: {error}"
        os.write(pipe, ascii(" ".join(said.split()))[1:-1][:1000].encode())
        os._exit(0)

    def wait(self, seconds: float) -> None:
        """Wait for a case to end, at most so long."""
        ready, *_ = select.select([case.pipe for case in self.running.values()], [], [], seconds)
        for pid, case in [*self.running.items()]:
            late = time.monotonic() - case.begun > CASE_LIMIT
            if case.pipe in ready or late:
                self.end(pid, case, "1 hangs" if late else os.read(case.pipe, 4096).decode() or "1 died")

    def end(self, pid: int, case: Case, said: str) -> None:
        for one in [pid, *session(pid)]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(case.pipe)
        shutil.rmtree(case.folder, ignore_errors=True)
        del self.running[pid]
        n, _, failure = said.partition(" ")
        self.tried[case.part] += int(n)
        self.seconds[case.part] += time.monotonic() - case.begun
        if failure:
            without = f" without={self.without}" if self.without else ""
            self.failures.append(
                f"{case.part}: {failure} (only=[{case.part}] case={case.number} seed={self.seed}{without})"
            )
            if not self.without:
                print(self.failures[-1], file=sys.stderr)

    def go_on(self, seconds: float) -> "Campaign":
        """Begin cases until the time is over; each part gets its share of it, and at least one case."""
        deadline, shown = time.monotonic() + seconds, 0.0
        try:
            while (now := time.monotonic()) < deadline or min(self.begun.values()) < self.cases:
                if len(self.running) < self.cores:
                    under_way = {name: sum(case.part == name for case in self.running.values()) for name in self.begun}
                    spent = {name: (self.seconds[name] + 5 * n) / PARTS[name][0] for name, n in under_way.items()}
                    name = min(spent, key=lambda one: (self.begun[one] >= self.cases, spent[one]))
                    self.begin(name, self.begun[name])
                else:
                    self.wait(1)
                if now - shown > (1 if sys.stderr.isatty() else 60):
                    shown = now
                    self.show(max(0, int(deadline - now)))
            while self.running:
                self.wait(5)
        finally:
            for pid, case in [*self.running.items()]:
                self.end(pid, case, "0")
        return self

    def show(self, left: int) -> None:
        done = ", ".join(f"{name} {n}" for name, n in self.tried.items())
        start, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
        print(f"{start}{left // 60}:{left % 60:02} left; {done}; {len(self.failures)} failed", end=end, file=sys.stderr)
        sys.stderr.flush()

    def table(self) -> str:
        rows = ["| part | tried | failed | seconds |", "| --- | ---: | ---: | ---: |"]
        for name, n in self.tried.items():
            failed = sum(one.startswith(f"{name}:") for one in self.failures)
            rows.append(f"| {name} | {n:,} | {failed} | {self.seconds[name]:,.0f} |")
        return "\n".join(["", *rows, "", *(f"- {one}" for one in self.failures)])


def one_case(made: Made, seed: int, part: str, number: int, without: str = "") -> Campaign:
    campaign = Campaign(made, seed, [part], without)
    campaign.begin(part, number)
    return campaign.go_on(0)


def try_controls(made: Made, seed: int, only: list[str]) -> int:
    """Switch off each mechanism. How many stay unnoticed: no case fails without them that ends well with them."""
    unnoticed = 0
    print("| without | part | case | what fails |\n| --- | --- | ---: | --- |", flush=True)
    for without, (place, _) in CONTROLS.items():
        part, _, about = place.partition(" ")
        if part not in only:
            continue
        number, cases = 0, [n for n in range(100 * PATIENCE) if about in ABOUT.get(part, str)(n)]
        for number in cases[:PATIENCE]:
            failures = one_case(made, seed, part, number, without).failures
            if failures and "the case itself" not in failures[0] and not one_case(made, seed, part, number).failures:
                break
        else:
            failures, unnoticed = ["nothing" if cases else f"no case is about {about}"], unnoticed + 1
        print(
            f"| {without} | {part} | {number} | {failures[0].rpartition(' (only=')[0] or failures[0]:.150} |",
            flush=True,
        )
    return unnoticed


def preload() -> None:
    """Import once what the commands need, and fill the caches of Hydra."""
    ours = [one.name for one in walk_packages(lm.__path__, "lm.") if one.name != "lm.__main__"]
    for name in ("datasets", "matplotlib.backends.backend_svg", *ours):
        import_module(name)
    Plugins.instance()
    OverridesParser.create().parse_overrides(["a=1", "b=[c]"])
    gc.freeze()


def main(words: list[str]) -> int:
    names = ("minutes", "seed", "only", "case", "cases", "without", "cores", "controls")
    given = dict(word.partition("=")[::2] for word in words)
    only = [one for one in given.get("only", "").strip("[]").split(",") if one] or [*PARTS]
    without = given.get("without", "")
    if {*given} - {*names} or {*only} - {*PARTS} or without not in ("", *CONTROLS):
        lists = f"PART: {', '.join(PARTS)}\nMECHANISM: {', '.join(CONTROLS)}"
        print(f"error: {' '.join(words)}: cannot be read\n{__doc__}\n{lists}", file=sys.stderr)
        return 2
    minutes, cases = float(given.get("minutes", 60)), int(given.get("cases", 0))
    seed, cores = int(given.get("seed", 0)), int(given.get("cores", 2))
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        tempfile.tempdir = folder
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        os.environ |= {"PYTHONPATH": os.getcwd(), "TMPDIR": folder}
        preload()
        made = Made(Path(folder, "made"), {}, {}, {})
        try:
            if {*only} - {"typos", "prompts"}:
                cold = minutes > 2 and not cases and "controls" not in given and "kills" in only
                made = prepare(Path(folder).resolve(), cold)
            if "controls" in given:
                return min(1, try_controls(made, seed, only))
            if "case" in given:
                campaign = one_case(made, seed, only[0], int(given["case"]), without)
            else:
                campaign = Campaign(made, seed, only, without, cores)
                campaign.cases = max(1, cases)
                with suppress(KeyboardInterrupt, SystemExit):  # the table counts what was done
                    campaign.go_on(0 if cases else 60 * minutes)
        finally:
            os.chdir("/")
    print(campaign.table())
    return min(1, len(campaign.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
