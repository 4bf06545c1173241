"""kill -9 of commands, drivers and workers; file operations that fail."""

import csv
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from .case import LIMIT, Command, Failed, alone, cold, run, session
from .inject import KINDS, Injection
from .prepared import ABLATE, COMMANDS, TRAIN, Made


def kills(made: Made, case: int, rng: random.Random, seed: int) -> int:
    """Kill a cold training command at random moments, or a command at a file operation; then run it again."""
    if case % 3:
        return at_an_operation(made, case - case // 3 - 1, seed, {"kill": "clrw"})
    made.copy("text.txt")
    n = rng.randint(1, 3)
    for _ in range(n):
        cold([*TRAIN, "run_dir=run"]).end(rng.uniform(0, made.seconds["cold"]))
    made.check("train", run(COMMANDS["train"][0]).proper(0), "train killed")
    return n


def faults(made: Made, case: int, rng: random.Random, seed: int) -> int:
    return at_an_operation(made, case, seed, KINDS)


def at_an_operation(made: Made, case: int, seed: int, kinds: dict[str, str]) -> int:
    """A command with a fault ends well with the right result or says what failed; then it can be run again."""
    every = [
        (name, at, kind)
        for name, letters in sorted(made.operations.items())
        for at, letter in enumerate(letters, 1)
        for kind, where in kinds.items()
        if letter in where
    ]
    shuffled = random.Random(f"{len(every)} {seed}").sample(every, len(every))  # successive cases try each once
    name, at, kind = shuffled[case % len(every)]
    words, needs, _ = COMMANDS[name]
    made.copy(*needs.split())
    try:
        command = run(words, Injection(kind, at))
        if kind != "kill":
            command.proper()
        elif command.code != -signal.SIGKILL:  # it had fewer operations
            made.check(name, command.proper(0), "not killed")
            return 0
        if command.code == 0:
            made.check(name, command, "", [])
        else:
            made.check(name, run(words).proper(0), "again")
    except Failed as error:
        raise Failed(f"{name} with {kind} at operation {at} of {len(made.operations[name])}: {error}") from error
    return 1


def executors() -> list[str]:
    """Those that carry out runs on this machine."""
    ray = find_spec("ray") and os.environ.get("RAY_ADDRESS")
    slurm = find_spec("submitit") and shutil.which("sinfo")
    return ["local", *["ray"] * bool(ray), *["slurm"] * bool(slurm)]


def scores(folder: Path) -> list[list[str]]:
    """The rows of the study without what a clock or an interruption decides."""
    with open(folder / "study/results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return sorted([row[key] for key in ("run_dir", "status", "val_loss", "val_top1", "config_hash")] for row in rows)


def drivers(made: Made, case: int, rng: random.Random, seed: int) -> int:
    """Kill the driver of an ablation at a random moment, in every third case one of its workers; then run it again."""
    made.copy("text.txt")
    there = executors()
    words = [*ABLATE, f"executor={there[case % len(there)]}"]
    driver, victim = Command(words), case // len(there) % 3 == 2
    time.sleep(rng.uniform(0, made.seconds["ablate"]))
    if victim:
        with suppress(ProcessLookupError):
            below = [pid for pid in session(os.getsid(0)) if pid != driver.pid]
            os.kill(rng.choice(below or [driver.pid]), signal.SIGKILL)
    driver.end(5 * LIMIT if victim else 0)
    if victim and (driver.code not in (0, 1, -signal.SIGKILL) or "Traceback" in driver.err):
        driver.proper()
    alone()
    again = run(words, seconds=5 * LIMIT)
    if again.code:
        raise Failed(f"ablate again: exit code {again.code}: {again.err.strip()[-200:]}")
    run(COMMANDS["report"][0]).proper(0)
    if scores(Path()) != scores(made.folder):
        raise Failed("silent: the study: another results.csv")
    return 1
