"""Start-up time of the commands: CPU seconds of fresh processes, beside the limit that is set for each."""

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from lm.benchmark.measure import Measurement
from lm.benchmark.shapes import DEFAULT
from lm.data.vocabulary import byte_tokenizer
from lm.exchange.portable import save_model

COMMANDS = {  # name -> (words, exit code, limit in CPU seconds)
    "train --help": (["train", "--help"], 0, 2.5),
    "train, misspelt key": (["train", "model.d_modle=3"], 2, 1.5),
    "train, invalid value": (["train", "model.n_heads=3"], 2, 1.5),
    "train, missing text": (["train", "data=text", "data.path=no/such/text"], 2, 1.5),
    "ablate, misspelt key": (["ablate", "ablation=smoke", "model.d_modle=3"], 2, 1.5),
    "generate, first token": (["generate", "prompt=def", "max_new_tokens=1"], 0, 4.0),
}


def startup(device: str, seconds: float) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = byte_tokenizer()
        save_model(DEFAULT._replace(vocab_size=tokenizer.vocab_size).build(), tokenizer, Path(folder) / "model")
        for name, (words, code, limit) in COMMANDS.items():
            more = [f"run_dir={folder}"] if words[0] == "generate" else []
            found = median(cpu_seconds([*words, *more], code) for _ in range(3))
            yield Measurement("startup", name, found, "CPU s", "limit", limit)


def cpu_seconds(words: list[str], code: int) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run([sys.executable, "-m", "lm", *words], capture_output=True)
    assert ran.returncode == code, ran.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
