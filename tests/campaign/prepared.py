"""The folder that all cases copy from: tiny runs, finished and half done, a study, texts; and what is right."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from .case import SAID, Command, Failed, cold, content, run
from .inject import SEEN, Injection

SIZES = [
    *("data=text", "data.path=text.txt", "data.cache_dir=cache", "data.seq_len=16", "data.batch_size=2"),
    *("tokenizer=byte", "tokenizer.vocab_size=null", "model.n_layers=1", "model.d_model=16", "model.n_heads=2"),
    *("model.d_ff=32", "trainer.max_steps=6", "trainer.log_every_n_steps=1", "threads=1", "checkpoint.every=2"),
    *("validation.every=3", "validation.batches=1", "prompts=[]"),
]
TRAIN, ABLATE = ["train", *SIZES, "trainer=cpu"], ["ablate", "ablation=smoke", "output_dir=study", "workers=2", *SIZES]
COMMANDS = {  # name -> its words, what it reads, the files that it writes
    "train": ([*TRAIN, "run_dir=run"], "text.txt", "run/result.json run/metrics.csv run/model/*"),
    "resume": (["train", "run_dir=half"], "text.txt cache half", "half/result.json half/metrics.csv half/model/*"),
    "generate": (["generate", "run_dir=run", "prompt=def f", "max_new_tokens=8", "threads=1"], "run", ""),
    "evaluate": (["evaluate", "run_dir=run", "texts=other.txt", "threads=1"], "run other.txt", ""),
    "export": (["export", "run_dir=run", "output_dir=out"], "run", "out/*"),
    "runs": (["runs", "folder=.", "csv=-"], "run half", ""),
    "show": (["train", "run_dir=run"], "text.txt cache run", ""),
    "page": (["report", "run_dir=run"], "run", "run/report.html"),
    "report": (["report", "output_dir=study"], "study", "study/report.json study/report.md study/results.csv"),
    "rows": (["report", "output_dir=rows"], "rows", "rows/report.json rows/report.md rows/*.csv"),
    "overview": (["report", "output_dir=."], "study rows", "results.csv overview.md"),
}


class Made(NamedTuple):
    folder: Path
    facts: dict[str, dict[str, Any]]  # by command, what is right
    operations: dict[str, str]  # by command, a letter for each
    seconds: dict[str, float]  # of a cold train and of an ablation

    def copy(self, *names: str) -> None:
        """Copy files and folders to the working directory."""
        for name in names:
            (shutil.copytree if (self.folder / name).is_dir() else shutil.copy)(self.folder / name, name)

    def check(self, name: str, command: Command, what: str, unless_said: list[str] | None = None) -> None:
        """Raise Failed unless a command has found what is right, or says of a file why not."""
        found, right = facts(name, command), self.facts[name]
        differing = [key for key in right if found.get(key) != right[key]]
        usual, here = str(right), command.err + str(found)
        words = [*SAID, *(unless_said or [])]
        if differing and (unless_said is None or all(here.count(word) <= usual.count(word) for word in words)):
            raise Failed(f"silent: {what}: another {', '.join(differing)}")
        left = [path for path in Path().rglob(".partial*") if path.parent.name != "sources"]  # there by their age
        if name in ("train", "resume") and left:
            raise Failed(f"{left[0]} is left behind")


def facts(name: str, command: Command) -> dict[str, Any]:
    """What a command has found, but for what a clock decides."""
    written = {str(path): content(path) for pattern in COMMANDS[name][2].split() for path in Path().glob(pattern)}
    return written if name in ("train", "resume") else written | {"output": command.out}


def text(n: int) -> str:
    return "".join(f"def f{i}(x, y):\n    return x * {i * 7 % 31} + y  # {i:x}\n" for i in range(n))


def killed_at_step_5() -> None:
    from lm.training.callbacks import TrainingCallback

    end = TrainingCallback.on_train_batch_end

    def then(self: Any, trainer: Any, *args: Any) -> None:
        end(self, trainer, *args)
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    TrainingCallback.on_train_batch_end = then  # type: ignore[method-assign]


def prepare(work: Path, parts: list[str]) -> Made:
    """Make the folder, and run each command undisturbed."""
    made = Made(work / "made", {}, {}, {})
    made.folder.mkdir()
    os.chdir(made.folder)
    Path("text.txt").write_text(text(120))
    Path("other.txt").write_text(text(60)[::-1])
    run(COMMANDS["train"][0]).proper(0)
    if run([*TRAIN, "run_dir=half"], killed_at_step_5).code != -signal.SIGKILL:
        raise Failed("the half run was not killed")
    for name, start, words in ("ablate", Command, ABLATE), ("cold", cold, [*TRAIN, "run_dir=cold"]):
        begun = time.monotonic()
        if name == "ablate" or "kills" in parts:
            start(words).end(600).proper(0)
        made.seconds[name] = time.monotonic() - begun
    shutil.copytree("study", "rows", ignore=shutil.ignore_patterns("cells", "trials"))
    for name, (words, needs, _) in COMMANDS.items():
        (work / "right" / name).mkdir(parents=True)
        os.chdir(work / "right" / name)
        made.copy(*needs.split())
        made.facts[name] = facts(name, run(words, Injection(), 600).proper(0))
        made.operations[name] = SEEN[:].rstrip(b"\0").decode()
    os.chdir(work)
    return made
