"""The command line: words to settings, settings to one call of a package, exceptions to one line."""

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

NAME = "lm-lab"


class Command(NamedTuple):
    module: str  # has `run(args) -> exit code`, `SCHEMA` and, as its docstring, the head of --help
    summary: str


# The commands of the lab are named as text: the core runs without them.
COMMANDS = {
    "train": Command("lm.cli.train", "train one run, or with -m several; resume it, or show it"),
    "generate": Command("lm.cli.generate", "continue a prompt"),
    "evaluate": Command("lm.cli.evaluate", "score a run on its validation text or on another text"),
    "ablate": Command("lm.lab.commands.ablate", "answer a question: run every arm at every seed"),
    "report": Command("lm.lab.commands.report", "write the report of an ablation or of a run again"),
    "runs": Command("lm.lab.commands.runs", "list runs with what differs between them"),
    "look": Command("lm.lab.commands.look", "open a page in the browser that shows what runs do"),
    "export": Command("lm.lab.commands.export", "write a Hugging Face folder, a GGUF file or a page"),
}
if find_spec("lm.lab") is None:
    COMMANDS = {name: row for name, row in COMMANDS.items() if row.module.startswith("lm.cli.")}


def _as_typed(program: str) -> str:
    """Return the name of a program if the shell finds the program by its name, else its path."""
    name = Path(program).name
    return name if shutil.which(name) == os.path.abspath(program) else program


def started_by() -> list[str]:
    """Return the words before the arguments of this process: a script, `python -m lm` or `lm-lab`."""
    started, python = Path(sys.argv[0]), _as_typed(sys.orig_argv[0])
    if started.name == "__main__.py":
        return [python, "-m", "lm"]
    if started.suffix == ".py" and started.stem in COMMANDS:
        return [python, sys.argv[0]]
    return [_as_typed(sys.argv[0]) if started.name == NAME else NAME]


def command_line(command: str, *words: str) -> str:
    """Return a command as a user types it in a shell to start it in the same way as this process."""
    *start, last = started_by()
    if last.endswith(".py"):
        start += [str(Path(last).with_name(f"{command}.py"))]
    else:
        start += [last, command]
    return shlex.join([*start, *words])
