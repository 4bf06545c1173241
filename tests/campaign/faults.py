"""kill -9 of commands, drivers and workers; file operations that fail."""

import os
import random
import shutil
import signal
import socket
import time
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import psutil

from lm.system.files import read_json
from tests.inject import KINDS, Injection

from .case import ABLATE, COMMANDS, HERE, MADE, OPERATIONS, SECONDS, Case, check, copy, none_partial
from .program import LIMIT, Command, Failed, end_all, run, start_cold

SAID = ("No space left", "Input/output error", "Permission denied")
ENGINES = ["local", *["ray"] * bool(find_spec("ray") and os.environ.get("RAY_ADDRESS"))]
ENGINES += ["slurm"] * bool(find_spec("submitit") and shutil.which("sinfo"))


def cold(case: Case) -> None:
    """Kill a training command, as a user starts it, at up to three random moments; then it ends as if undisturbed."""
    copy("text.txt")
    moments = [case.rng.uniform(0, SECONDS["cold"]) for _ in range(case.rng.randint(1, 3))]
    case.tried = sum(start_cold(HERE).end(signal.SIGKILL, one).code == -signal.SIGKILL for one in moments)
    check("train", run(HERE).proper(0))


def kills(case: Case) -> None:
    faults(case, {"kill": "clrw"})


def faults(case: Case, kinds: dict[str, str] = KINDS) -> None:
    """A fault at a file operation: the command ends well or says what failed; then it can be run again."""
    every = [
        (name, at, kind)
        for name, letters in sorted(OPERATIONS.items())
        for at, letter in enumerate(letters, 1)
        for kind, where in kinds.items()
        if letter in where
    ]
    shuffled = random.Random(case.seed).sample(every, len(every))  # successive cases try each once
    name, at, kind = shuffled[case.number % len(every)]
    case.about, (words, needs, _) = f"{name} with {kind} at operation {at}", COMMANDS[name]
    copy(*needs.split())
    command = run(words, Injection(kind, at))
    if not (killed := command.code == -signal.SIGKILL):
        none_partial()
    if killed or command.proper().code:
        check(name, run(words).proper(0))
    else:
        check(name, command, SAID)
    case.tried = int(killed or kind != "kill")  # else it had fewer operations


def scores(folder: Path) -> str:
    """The rows of an ablation without what a clock or an interruption decides."""
    columns = ["run_dir", "status", "val_loss", "val_top1", "config_hash"]
    return pd.read_csv(folder / "study/results.csv", usecols=columns, dtype=str).sort_values("run_dir").to_csv()


def processes_of(case: Case, driver: Command) -> list[psutil.Process]:
    """The children of the driver of an ablation; on Ray and Slurm, once there are any, the processes that make runs."""
    time.sleep(case.rng.uniform(0, SECONDS["ablate"]))
    if case.about == "local":
        return psutil.Process(driver.pid).children(recursive=True)
    places: list[Path] = []
    while driver.is_alive() and not places:
        time.sleep(0.01)
        places = [*Path().glob("study/cells/*.where")]
    time.sleep(case.rng.uniform(0, 3))
    found = []
    for path in places:
        where = read_json(path)
        if where["host"] == socket.gethostname():
            process = psutil.Process(where["pid"])
            if process.create_time() < path.stat().st_mtime:  # else the pid was reused
                found.append(process)
    return found


def drivers(case: Case) -> None:
    """Kill the driver of an ablation at a random moment, or in every third case one of its processes; run it again."""
    copy("text.txt")
    case.about = ENGINES[case.number % len(ENGINES)]
    words = [*ABLATE, f"executor={case.about}"]
    driver = Command(words, limit=5 * LIMIT)
    if case.number // len(ENGINES) % 3 == 2:
        try:
            case.rng.choice(processes_of(case, driver)).kill()
        except (IndexError, psutil.NoSuchProcess, FileNotFoundError):  # none is there yet, or it has ended
            case.tried = 0
        if driver.end().code not in (0, 1) or "Traceback" in driver.err:
            driver.proper()
    else:
        moment = case.rng.uniform(0, SECONDS["ablate"])
        case.tried = int(driver.end(signal.SIGKILL, moment).code == -signal.SIGKILL)
    if left := end_all(30):
        raise Failed(f"{left} processes outlive the driver")
    if (again := run(words, limit=5 * LIMIT)).code:
        raise Failed(f"again: exit code {again.code}: {again.err.strip()[-200:]}")
    run(COMMANDS["report"][0]).proper(0)
    if scores(Path()) != scores(MADE):
        raise Failed("silent: another results.csv")
