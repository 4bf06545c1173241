"""How long a command takes before it does anything: CPU seconds of fresh processes."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from lm.benchmark.measure import Figure

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMANDS = {  # what -> (words, CPU seconds that it may take)
    "train.py --help": (["train.py", "--help"], 2.5),
    "a misspelt key": (["train.py", "model.d_modle=3"], 1.5),
    "an impossible value": (["train.py", "model.n_heads=3"], 1.5),
}


def starts(device: str, seconds: float) -> Iterator[Figure]:
    for what, (words, allowed) in COMMANDS.items():
        yield Figure("starts", what, median(cpu_seconds(words) for _ in range(3)), "CPU s", "allowed", allowed)


def cpu_seconds(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, SCRIPTS / words[0], *words[1:]], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
