"""How long a command takes before it does anything: CPU seconds of fresh processes."""

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from lm.benchmark.measure import Figure
from lm.benchmark.shapes import DEFAULT
from lm.data.tokenizer import byte_tokenizer
from lm.exchange.portable import save_model

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMANDS = {  # what -> (words, exit code, CPU seconds that it may take)
    "train.py --help": (["train.py", "--help"], 0, 2.5),
    "a misspelt key": (["train.py", "model.d_modle=3"], 2, 1.5),
    "an impossible value": (["train.py", "model.n_heads=3"], 2, 1.5),
    "a text that is not there": (["train.py", "data=text", "data.path=no/such/text"], 2, 1.5),
    "a mistake in an ablation": (["ablate.py", "ablation=smoke", "model.d_modle=3"], 2, 1.5),
    "the first token": (["generate.py", "prompt=def", "max_new_tokens=1"], 0, 4.0),
}


def starts(device: str, seconds: float) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = byte_tokenizer()
        save_model(DEFAULT._replace(vocab_size=tokenizer.vocab_size).model(), tokenizer, Path(folder) / "model")
        for what, (words, code, allowed) in COMMANDS.items():
            more = [f"run_dir={folder}"] if words[0] == "generate.py" else []
            found = median(cpu_seconds([*words, *more], code) for _ in range(3))
            yield Figure("starts", what, found, "CPU s", "allowed", allowed)


def cpu_seconds(words: list[str], code: int) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run([sys.executable, SCRIPTS / words[0], *words[1:]], capture_output=True)
    assert ran.returncode == code, ran.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
