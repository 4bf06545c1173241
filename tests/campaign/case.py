"""What all cases copy from: tiny runs, finished and half done, an ablation, texts; and what is right."""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tests.inject import SEEN, Injection

from .program import LIMIT, Command, Failed, run, start_cold

SIZES = [
    *("data.cache_dir=cache", "data.seq_len=16", "data.batch_size=2", "tokenizer=byte", "tokenizer.vocab_size=null"),
    *("model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "trainer.max_steps=6", "threads=1"),
    *("trainer.log_every_n_steps=1", "checkpoint.every=2", "validation.every=3", "validation.batches=1"),
]
TEXT = ["data=text", "data.path=text.txt"]
TRAIN, ROWS = ["train", "trainer=cpu", *SIZES, *TEXT], ["train", "trainer=cpu", *SIZES, "run_dir=b", "prompts=[]"]
ABLATE = ["ablate", "ablation=smoke", "output_dir=study", "workers=2", *SIZES, *TEXT]
HERE = [*TRAIN, "run_dir=run", "prompts=[def]"]
GENERATE = ["generate", "prompt=def f", "max_new_tokens=8", "threads=1"]
COMMANDS = {  # its words, what it reads, the files that it writes
    "train": (HERE, "text.txt", "run/result.json run/*.csv run/*.jsonl run/model/*"),
    "resume": (
        ["train", "run_dir=half"],
        "text.txt cache half",
        "half/result.json half/*.csv half/*.jsonl half/model/*",
    ),
    "json": ([*ROWS, "data=json", "data.path=rows.jsonl"], "rows.jsonl", "b/result.json"),
    "csv": ([*ROWS, "data=csv", "data.path=rows.csv"], "rows.csv", "b/result.json"),
    "parquet": ([*ROWS, "data=parquet", "data.path=rows.parquet"], "rows.parquet", "b/result.json"),
    "generate": ([*GENERATE, "run_dir=run"], "run", ""),
    "foreign": ([*GENERATE, "run_dir=out"], "out", ""),
    "evaluate": (["evaluate", "run_dir=run", "texts=other.txt", "threads=1"], "run other.txt", ""),
    "export": (["export", "run_dir=run", "output_dir=out"], "run", "out/*"),
    "runs": (["runs", "folder=.", "csv=-"], "run half", ""),
    "show": (["train", "run_dir=run"], "text.txt cache run", ""),
    "page": (["report", "run_dir=run"], "run", "run/report.html"),
    "report": (["report", "output_dir=study"], "study", "study/report.json study/report.md study/results.csv"),
    "rows": (["report", "output_dir=rows"], "rows", "rows/report.json rows/report.md rows/*.csv"),
    "overview": (["report", "output_dir=."], "study rows", "results.csv overview.md"),
}
CLOCK = rb'"(seconds|tokens_per_second|begun|ended|resumed_from)": ("[^"]*"|\[[^]]*\]|[^,\s}]*)'
MADE = Path("../../made")  # from the folder of a case
FACTS: dict[str, dict[str, Any]] = {}  # by command, what it says and writes undisturbed
OPERATIONS: dict[str, str] = {}  # by command, a letter for each of its file operations
SECONDS: dict[str, float] = {}  # by command


def prepare(work: Path) -> None:
    """Make the folder that cases copy from, and run each command undisturbed."""
    os.makedirs(work / "made")
    os.chdir(work / "made")
    Path("text.txt").write_text(text(120))
    Path("other.txt").write_text(text(60)[::-1])
    rows = pd.DataFrame({"text": text(120).splitlines()})
    rows.to_json("rows.jsonl", orient="records", lines=True)
    rows.to_csv("rows.csv"), rows.to_parquet("rows.parquet")
    for name, words in ("cold", [*HERE, "run_dir=cold"]), ("train", HERE), ("ablate", ABLATE), ("export", []):
        begun = time.monotonic()
        (start_cold if name == "cold" else Command)(words or COMMANDS[name][0], limit=5 * LIMIT).end().proper(0)
        SECONDS[name] = time.monotonic() - begun
    if run([*HERE, "run_dir=half"], killed_at_step_5).code != -signal.SIGKILL:
        raise Failed("the half run was not killed")
    shutil.copytree("study", "rows", ignore=shutil.ignore_patterns("cells", "trials"))
    for name, (words, needs, _) in COMMANDS.items():
        os.makedirs(work / "right" / name)
        os.chdir(work / "right" / name)
        copy(*needs.split())
        FACTS[name] = facts(name, run(words, Injection()).proper(0))
        OPERATIONS[name] = SEEN[:].rstrip(b"\0").decode()


def copy(*names: str) -> None:
    """Copy files and folders to the working directory."""
    for name in names:
        (shutil.copytree if (MADE / name).is_dir() else shutil.copy)(MADE / name, name)


def facts(name: str, command: Command) -> dict[str, Any]:
    """What a command has found, but for what a clock decides."""
    files = [path for pattern in COMMANDS[name][2].split() for path in Path().glob(pattern)]
    found = {str(path): re.sub(CLOCK, b"", path.read_bytes()) for path in files}
    return found if name in ("train", "resume", "json", "csv", "parquet") else found | {"output": command.out}


def check(name: str, command: Command, unless: Iterable[str] = ()) -> None:
    """Raise Failed unless a command has found what is right, or says one of the words `unless` about a file."""
    found, right = facts(name, command), FACTS[name]
    differing = [key for key in right if found.get(key) != right[key]]
    here, usual = command.err + str(found), str(right)
    if differing and not any(here.count(word) > usual.count(word) for word in unless):
        raise Failed(f"silent: another {', '.join(differing)}")
    if name in ("train", "resume"):
        none_partial()


def none_partial() -> None:
    """Raise Failed if a temporary file is left beside the file that it was to become."""
    for path in Path().rglob(".partial*"):
        if path.parent.name != "sources":  # there by their age
            raise Failed(f"{path} is left behind")


@dataclass
class Case:
    """The n-th case of a part of the campaign. `about`: words about it for a failure."""

    part: str
    number: int
    seed: int
    tried: int = 1
    about: str = ""
    failure: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.part} {self.number} {self.seed}")

    def copy(self, name: str, pattern: str) -> Path:
        """Copy what a command reads. Any file in it that the pattern means."""
        copy(*COMMANDS[name][1].split())
        return self.rng.choice(sorted(path for path in Path().glob(pattern.lstrip("!?")) if path.is_file()))


def text(n: int) -> str:
    return "".join(f"def f{i}(x, y):\n    return x * {i * 7 % 31} + y  # {i:x}\n" for i in range(n))


def killed_at_step_5() -> None:
    from lm.training.callbacks import TrainingCallback as Callback

    end = Callback.on_train_batch_end

    def then(self: Any, trainer: Any, *args: Any) -> None:
        end(self, trainer, *args)
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    Callback.on_train_batch_end = then
