"""A case: one command is disturbed once; then it is given again, if it has not ended well."""

import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.inject import KINDS, inject

from .commands import COMMANDS, Defect, Process, Undisturbed, copy_inputs, require, results

ORDER = ("train", "resume", "export", "train", "report of a run", "resume", "report", "ablate")
KILL_AT_OPERATION, KILL_AT_MOMENT, ERROR, SEVERAL = FAULTS = [
    *("kill at an operation", "kill at a moment", "failing operation", "several processes"),
]


@dataclass
class Case:
    """What a case does follows from its number and the seed, but for moments of time."""

    number: int
    seed: int = 0
    names: tuple[str, ...] = ORDER
    faults: tuple[str, ...] = (*FAULTS, ERROR)
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
        folder.mkdir()
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
        return process.exitcode == 0

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
        """Start the command three times. One trains; the others name the folder, or show its result."""
        (folder / "trained").touch()
        processes = [Process(self.words, folder, note_training) for _ in range(3)]
        for process in processes:
            process.join()
        codes = [process.wait(0, 2).exitcode for process in processes]
        trained = len((folder / "trained").read_text())
        require(trained == (self.words[0] == "train"), f"{trained} of three have trained")
        require(0 in codes, f"exit codes {codes}")
        return True


def note_training() -> None:
    from lightning import Trainer

    fit = Trainer.fit

    def noted(*args: object, **options: object) -> None:
        with open("trained", "a") as file:
            file.write("x")
        fit(*args, **options)  # type: ignore[arg-type]

    Trainer.fit = noted  # type: ignore[method-assign]


def require_no_temporary_file(folder: Path) -> None:
    """No temporary file is left, but in `sources`, where those older than ten minutes are removed."""
    left = [str(path.relative_to(folder)) for path in folder.rglob(".partial*") if path.parent.name != "sources"]
    require(not left, f"{', '.join(left)} is left behind")
