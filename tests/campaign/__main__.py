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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from pkgutil import walk_packages
from typing import NamedTuple, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from tqdm import tqdm

import lm

from .case import Failed, session
from .controls import CONTROLS, PATIENCE, put
from .damage import damage
from .fuzz import prompts, texts, typos
from .hostile import hostile
from .kills import drivers, faults, kills
from .limits import limits
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
NUMBERS = {"minutes": 60, "seed": 0, "case": -1, "cases": 0, "cores": 2}


class Case(NamedTuple):
    pid: int
    part: str
    number: int
    folder: Path
    begun: float


class Campaign:
    """Each case is a fork of this process, in a session and a folder of its own, which end with it."""

    def __init__(self, made: Made, seed: int, only: list[str], cores: int = 2, without: str = "") -> None:
        self.made, self.seed, self.only, self.cores, self.without = made, seed, only, cores, without
        self.tried, self.seconds, self.failures = Counter[str](), Counter[str](), list[str]()
        self.running: dict[int, Case] = {}  # by the pipe through which it says how it ended

    def run(self, cases: Iterable[tuple[str, int]]) -> "Campaign":
        try:
            for part, number in cases:
                self.begin(part, number)
                while len(self.running) >= self.cores:
                    self.wait()
            while self.running:
                self.wait()
        finally:
            for pipe in [*self.running]:
                self.end(pipe, "0")
        return self

    def until(self, seconds: float) -> Iterator[tuple[str, int]]:
        """Cases until the time is over: each part gets its share of it, and at least one case."""
        start, begun = time.monotonic(), Counter(dict.fromkeys(self.only, 0))
        with tqdm(total=round(seconds), unit="s", disable=None) as bar:
            while (now := time.monotonic() - start) < seconds or 0 in begun.values():
                bar.update(int(now) - bar.n)
                bar.set_description(f"{self.tried.total():,} tried, {len(self.failures)} failed")
                under_way = Counter(case.part for case in self.running.values())
                part = min(begun, key=lambda one: (self.seconds[one] + 5 * under_way[one]) / PARTS[one][0])
                yield part, begun[part]
                begun[part] += 1

    def begin(self, part: str, number: int) -> None:
        folder = self.made.folder.with_name(f"{part}-{number}")
        for name in ("here", "tmp"):
            (folder / name).mkdir(parents=True)
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            self.work(part, number, folder, writing)
        os.close(writing)
        self.running[reading] = Case(pid, part, number, folder, time.monotonic())

    def work(self, part: str, number: int, folder: Path, pipe: int) -> NoReturn:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        os.setsid()
        os.chdir(folder / "here")
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        rng = random.Random(f"{part} {number} {self.seed}")
        try:
            if self.without:
                put(*CONTROLS[self.without][1:])
            said = str(PARTS[part][1](self.made, number, rng, self.seed))
        except BaseException as error:
            said = f"1 {error}" if isinstance(error, Failed) else f"1 the case itself: {type(error).__name__}: {error}"
        os.write(pipe, ascii(" ".join(said.split()))[1:-1][:1000].encode())
        os._exit(0)

    def wait(self) -> None:
        """Wait for a case to end, at most a second."""
        ready = select.select([*self.running], [], [], 1)[0]
        for pipe, case in [*self.running.items()]:
            if pipe in ready:
                self.end(pipe, os.read(pipe, 4096).decode() or "1 died")
            elif time.monotonic() - case.begun > CASE_LIMIT:
                self.end(pipe, "1 hangs")

    def end(self, pipe: int, said: str) -> None:
        case = self.running.pop(pipe)
        for one in [case.pid, *session(case.pid)]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        os.waitpid(case.pid, 0)
        os.close(pipe)
        shutil.rmtree(case.folder, ignore_errors=True)
        n, _, failure = said.partition(" ")
        self.tried[case.part] += int(n)
        self.seconds[case.part] += time.monotonic() - case.begun
        if failure:
            again = f"only=[{case.part}] case={case.number} seed={self.seed}"
            again += f" without={self.without}" * bool(self.without)
            self.failures.append(f"{case.part}: {failure} ({again})")
            if not self.without:
                tqdm.write(self.failures[-1], sys.stderr)

    def table(self) -> str:
        rows = ["", "| part | tried | failed | seconds |", "| --- | ---: | ---: | ---: |"]
        for part in self.only:
            failed = sum(one.startswith(f"{part}:") for one in self.failures)
            rows.append(f"| {part} | {self.tried[part]:,} | {failed} | {self.seconds[part]:,.0f} |")
        return "\n".join([*rows, "", *(f"- {one}" for one in self.failures)])


def noticed(made: Made, seed: int, part: str, cores: int, without: str) -> str:
    """The first case that fails without a mechanism and ends well with it, as two cells of a table."""
    cases = iter(range(PATIENCE))
    while True:
        red = Campaign(made, seed, [part], cores, without)
        red.run((part, n) for n in takewhile(lambda _: not red.failures, cases))  # noqa: B023
        if not red.failures:
            return "- | nothing"
        what, _, again = red.failures[0].rpartition(f" (only=[{part}] case=")
        number = int(again.split()[0])
        if "the case itself" not in what and not Campaign(made, seed, [part]).run([(part, number)]).failures:
            return f"{number} | {what:.150}"


def try_controls(made: Made, seed: int, only: list[str], cores: int) -> int:
    """Switch off each mechanism. How many stay unnoticed."""
    unnoticed = 0
    print("| without | part | case | what fails |\n| --- | --- | ---: | --- |", flush=True)
    for without, (part, *_) in CONTROLS.items():
        if part in only:
            row = noticed(made, seed, part, cores, without)
            print(f"| {without} | {part} | {row} |", flush=True)
            unnoticed += row[0] == "-"
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
    given = dict(word.partition("=")[::2] for word in words)
    only, without = given.get("only", ",".join(PARTS)).strip("[]").split(","), given.get("without", "")
    unknown = {*given} - {*NUMBERS, "only", "without", "controls"} or {*only} - {*PARTS}
    numbers = all(given.get(key, "0").isdecimal() for key in NUMBERS)
    if unknown or not numbers or without not in ("", *CONTROLS):
        lists = f"PART: {', '.join(PARTS)}\nMECHANISM: {', '.join(CONTROLS)}"
        print(f"error: {' '.join(words)}: cannot be read\n{__doc__}\n{lists}", file=sys.stderr)
        return 2
    minutes, seed, case, cases, cores = (int(given.get(key, default)) for key, default in NUMBERS.items())
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        tempfile.tempdir = folder
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        os.environ |= {"PYTHONPATH": os.getcwd(), "TMPDIR": folder}
        preload()
        try:
            needed = {*only} - {"typos", "prompts"}
            made = prepare(Path(folder).resolve(), only) if needed else Made(Path(folder, "made"), {}, {}, {})
            if "controls" in given:
                return int(try_controls(made, seed, only, cores) > 0)
            campaign = Campaign(made, seed, only, max(1, cores), without)
            if case >= 0:
                campaign.run([(only[0], case)])
            elif cases:
                campaign.run((part, n) for n in range(cases) for part in only)
            else:
                with suppress(KeyboardInterrupt, SystemExit):  # the table counts what was done
                    campaign.run(campaign.until(60 * minutes))
        finally:
            os.chdir("/")
    print(campaign.table())
    return int(campaign.failures != [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
