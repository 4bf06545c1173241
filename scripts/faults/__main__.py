"""python -m scripts.faults [minutes=60] [seed=0] [commands=NAME,NAME] [case=N,N]

Disturbs one command after the other until the time is over. Prints a table of what was tried; exit code 1 if anything
has failed. `case` repeats these cases alone.
"""

import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count, takewhile
from pathlib import Path
from pkgutil import walk_packages

import pandas as pd
import psutil

import lm

from .inject import KINDS, OPERATIONS, inject

FORK = multiprocessing.get_context("fork")
LIMIT = 300  # seconds after which SIGALRM ends a command; undisturbed it takes 1 to 20
FAULTS = ("kill at an operation", "kill at a moment", "failing operation", "several processes")
KILL_AT_OPERATION, KILL_AT_MOMENT, ERROR, SEVERAL = FAULTS

SETTINGS = [
    *("experiment=none", "data=text", "data.path=text.txt", "data.cache_dir=cache"),
    *("data.seq_len=16", "data.batch_size=2"),
    *("tokenizer=byte", "tokenizer.vocab_size=null", "trainer=cpu", "trainer.max_steps=6", "threads=1"),
    *("model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "optim.lr=0.01"),
    *("trainer.log_every_n_steps=1", "checkpoint.every=2", "validation.every=3", "validation.batches=1"),
]
TEXT = "".join(f"def f{i}(x, y):\n    return x * {i * 7 % 31} + y  # {i:x}\n" for i in range(120))


@dataclass(frozen=True)
class Command:
    words: list[str]
    inputs: list[str]  # what it reads: paths in the folder of fixtures
    outputs: list[str]  # patterns of the files that it writes


TRAIN = ["train", *SETTINGS, "run_dir=run", "prompts=[def]"]
RUN_FILES = ["run/result.json", "run/metrics.csv", "run/samples.jsonl", "run/model/*"]
STUDY_FILES = ["study/results.csv", "study/report.json"]
COMMANDS = {
    "train": Command(TRAIN, ["text.txt"], RUN_FILES),
    "resume": Command(TRAIN, ["text.txt", "half/cache", "half/run"], RUN_FILES),
    "export": Command(["export", "run_dir=run", "output_dir=out"], ["train/run"], ["out/*"]),
    "ablate": Command(
        ["ablate", "ablation=smoke", "output_dir=study", "workers=2", *SETTINGS], ["text.txt"], STUDY_FILES
    ),
    "report": Command(["report", "output_dir=study"], ["ablate/study"], STUDY_FILES),
    "evaluate": Command(
        ["evaluate", "run_dir=run", *SETTINGS[1:4], "details=true", "threads=1"],
        ["text.txt", "train/run"],
        [],
    ),
    "runs": Command(["runs", "folder=.", "csv=runs.csv", "plot=runs.svg"], ["train/run"], ["runs.*"]),
}


@dataclass(frozen=True)
class Undisturbed:
    """What a command does undisturbed."""

    results: dict[str, str]
    operations: str  # a letter for each file operation
    seconds: float


class Defect(Exception):
    """A command did what it must not do."""


def require(condition: bool, defect: str) -> None:
    if not condition:
        raise Defect(defect)


class Process(FORK.Process):  # type: ignore[name-defined]
    """`lm-lab WORDS` in a folder, as a fork of this process, which has imported what the command needs."""

    def __init__(self, words: list[str], folder: Path, hook: Callable[[], object] = int) -> None:
        super().__init__()
        self.words, self.folder, self.hook, self.file = words, folder, hook, os.memfd_create("stderr")
        self.start()

    def run(self) -> None:
        from lm.cli.main import main

        signal.alarm(LIMIT)  # ends it
        os.chdir(self.folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(self.file, 2)
        sys.argv = ["lm-lab", *self.words]
        self.hook()
        main()

    def wait(self, *codes: int) -> "Process":
        """Wait for its end: with an exit code of these, 1 and 2 with one line that says what is wrong."""
        self.join()
        stderr = os.pread(self.file, 1 << 20, 0).decode(errors="replace")
        os.close(self.file)
        errors = sum(line.startswith("error: ") for line in stderr.splitlines())
        right = self.exitcode in codes and errors == (self.exitcode > 0) and "Traceback" not in stderr
        require(right, f"exit code {self.exitcode}, {errors} errors: {stderr[-500:]}")
        return self


def results(name: str, folder: Path) -> dict[str, str]:
    """The files that a command has written, without what a clock or an interruption decides."""
    paths = [path for pattern in COMMANDS[name].outputs for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): _timeless(path) for path in paths}


def _timeless(path: Path) -> str:
    if path.name == "results.csv":
        columns = ["run_dir", "status", "val_loss", "val_top1", "config_hash"]
        return pd.read_csv(path, usecols=columns, dtype=str).sort_values("run_dir").to_csv()
    if path.name == "report.json":
        return str(json.loads(path.read_text())["contrasts"])
    pattern = r'"(seconds|tokens_per_second|resumed_from)": ("[^"]*"|\[[^]]*\]|[^,\s}]*)'
    return re.sub(pattern, "", path.read_bytes().decode("latin-1"))


def copy_inputs(name: str, fixtures: Path, folder: Path) -> None:
    folder.mkdir()
    for source in (fixtures / path for path in COMMANDS[name].inputs):
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / source.name)


@contextmanager
def prepared(names: Iterable[str]) -> Iterator[tuple[Path, dict[str, Undisturbed]]]:
    """A temporary folder of fixtures, and what each of the commands does undisturbed, train among them."""
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        os.environ |= {"PYTHONPATH": os.getcwd(), "TMPDIR": temporary}
        tempfile.tempdir = temporary
        modules = [module.name for module in walk_packages(lm.__path__, "lm.") if module.name != "lm.__main__"]
        modules = [name for name in modules if not name.startswith("lm.cli.")]  # they note which process imports them
        for name in ("datasets", "hydra", "matplotlib.backends.backend_svg", *modules):
            import_module(name)  # once, and not in each process
        gc.freeze()
        fixtures, undisturbed = Path(temporary).resolve() / "fixtures", dict[str, Undisturbed]()
        fixtures.mkdir()
        (fixtures / "text.txt").write_text(TEXT)
        for name in names:
            if name == "resume":
                copy_inputs("train", fixtures, half := fixtures / "half")
                at = len(undisturbed["train"].operations) * 2 // 3
                Process(TRAIN, half, partial(inject, "kill", at)).wait(-signal.SIGKILL)
                require(any(half.glob("run/checkpoints/*.ckpt")), "the killed run has no checkpoint")
            copy_inputs(name, fixtures, folder := fixtures / name)
            start = time.monotonic()
            Process(COMMANDS[name].words, folder, inject).wait(0)
            seconds, operations = time.monotonic() - start, OPERATIONS[:].rstrip(b"\0").decode()
            expected = undisturbed["train"].results if name == "resume" else results(name, folder)
            undisturbed[name] = Undisturbed(expected, operations, seconds)
        yield fixtures, undisturbed


@dataclass
class Case:
    """What a case does follows from its number and the seed, but for moments of time."""

    number: int
    seed: int = 0
    names: tuple[str, ...] = tuple(COMMANDS)
    faults: tuple[str, ...] = FAULTS
    about: str = ""
    happened: bool = True  # False if the command ended before it was to be killed
    defect: str = ""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.number} {self.seed}")
        self.name, self.fault = self.names[self.number % len(self.names)], self.rng.choice(self.faults)
        self.words = COMMANDS[self.name].words

    def run(self, fixtures: Path, undisturbed: dict[str, Undisturbed]) -> "Case":
        """Disturb the command in a folder of its own. What is wrong is noted in `defect`."""
        folder, expected = fixtures.with_name("case"), undisturbed[self.name]
        copy_inputs(self.name, fixtures, folder)
        try:
            done = self.disturb(folder, expected)
            living = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
            _, living = psutil.wait_procs(living, timeout=30)
            require(not living, f"{len(living)} processes outlive it")
            if not done:
                self.about += "; again"
                Process(self.words, folder).wait(0)
            differing = {path for path, _ in results(self.name, folder).items() ^ expected.results.items()}
            require(not differing, f"other results than undisturbed: {', '.join(sorted(differing))}")
            require_no_temporary_file(folder)
        except (Defect, ValueError) as defect:  # ValueError: a table or JSON file that is cut off
            about = f"{self.name}: {self.fault}{self.about}"
            self.defect = f"{about}: {' '.join(str(defect).split())} (case={self.number} seed={self.seed})"
        shutil.rmtree(folder)
        return self

    def disturb(self, folder: Path, expected: Undisturbed) -> bool:
        """Start the command and let the fault happen. Returns whether the command has ended well nevertheless."""
        if self.fault == SEVERAL:
            return self.start_several(folder)
        if self.fault == KILL_AT_MOMENT:
            return self.kill_at_moment(folder, expected.seconds)
        kinds = {"kill": "clrws"} if self.fault == KILL_AT_OPERATION else KINDS
        operations = enumerate(expected.operations, 1)
        places = [(kind, at) for at, letter in operations for kind in kinds if letter in kinds[kind]]
        kind, at = self.rng.choice(places)
        self.about = f" ({kind} at {at} of {len(expected.operations)})"
        process = Process(self.words, folder, partial(inject, kind, at))
        if kind == "kill":
            self.happened = process.wait(0, -signal.SIGKILL).exitcode != 0
        else:
            process.wait(0, 1, 2)
            require_no_temporary_file(folder)
        return process.exitcode == 0 and self.name != "runs"  # a list shows a run that it could not read as broken

    def kill_at_moment(self, folder: Path, seconds: float) -> bool:
        """Kill the command, or one time in three one of the processes that it has started."""
        process = Process(self.words, folder)
        time.sleep(self.rng.uniform(0, seconds))
        children = psutil.Process(process.pid).children(recursive=True)  # [] also if it has ended
        if children and self.rng.random() < 1 / 3:
            self.about = " (of a worker)"
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                self.rng.choice(children).kill()
            return process.wait(0, 1).exitcode == 0
        process.kill()
        self.happened = process.wait(0, -signal.SIGKILL).exitcode != 0
        return not self.happened

    def start_several(self, folder: Path) -> bool:
        """Start the command three times. One of them does it; the others name the folder, or show its result."""
        processes = [Process(self.words, folder) for _ in range(3)]
        for process in processes:
            process.join()
        codes = [process.wait(0, 2).exitcode for process in processes]
        require(0 in codes, f"exit codes {codes}")
        return True


def require_no_temporary_file(folder: Path) -> None:
    """No temporary file is left, except in the cache, which removes temporary files older than ten minutes."""
    places = [path.relative_to(folder) for path in folder.rglob(".partial*")]
    left = [str(path) for path in places if path.parts[0] != "cache"]
    require(not left, f"{', '.join(left)} is left behind")


def table(cases: list[Case]) -> str:
    tried = Counter((case.name, case.fault) for case in cases if case.happened)
    failed = Counter(case.name for case in cases if case.defect)
    rows = [["command", *FAULTS, "failed"], ["---", *["---:"] * (len(FAULTS) + 1)]]
    rows += [[name, *[str(tried[name, fault]) for fault in FAULTS], str(failed[name])] for name in COMMANDS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(minutes: str = "60", seed: str = "0", commands: str = ",".join(COMMANDS), case: str = "") -> int:
    names, cases = tuple(commands.split(",")), list[Case]()
    with prepared(names) as (fixtures, undisturbed):
        end = time.monotonic() + 60 * float(minutes)
        for number in map(int, case.split(",")) if case else takewhile(lambda _: time.monotonic() < end, count()):
            cases.append(Case(number, int(seed), names).run(fixtures, undisturbed))
            if cases[-1].defect:
                print(cases[-1].defect, file=sys.stderr, flush=True)
    print(table(cases))
    return int(any(case.defect for case in cases))


if __name__ == "__main__":
    sys.exit(main(**dict(word.split("=") for word in sys.argv[1:])))
