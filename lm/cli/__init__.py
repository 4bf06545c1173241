"""The command line: arguments to a dataclass of lm.config, exceptions to one line and an exit code.

In: the arguments of a command. Out: a call of one function of another package, then an exit code.
Imports every package of lm; torch and Lightning only after the settings have been checked.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

from lm.config.identity import is_verb

COMMANDS = {
    "train": "train one run, or with -m several; resume it, or show its result",
    "generate": "continue a prompt",
    "evaluate": "score a run on its validation text or on a text of your own",
    "ablate": "answer a question: plan, tune, run every arm at every seed, report",
    "report": "write the report of an ablation again, or compare several",
    "runs": "list runs with what differs between them, filter, sort and plot them",
    "look": "open a page in the browser: prompts, losses, attention and curves of runs",
    "export": "write a Hugging Face folder, a GGUF file, or a page that generates",
}
NAME = "lm-lab"


def _as_typed(program: str) -> str:
    """A program by its name where the shell finds it by that, as in an activated environment."""
    name = Path(program).name
    return name if shutil.which(name) == os.path.abspath(program) else program


def started_by() -> list[str]:
    """The words before the arguments of this process: a script, `python -m lm` or `lm-lab`."""
    started, python = Path(sys.argv[0]), _as_typed(sys.orig_argv[0])
    if started.name == "__main__.py":
        return [python, "-m", "lm"]
    if started.suffix == ".py" and started.stem in COMMANDS:
        return [python, sys.argv[0]]
    return [_as_typed(sys.argv[0]) if started.name == NAME else NAME]  # also for a program that imports lm


def command_line(command: str, *words: str) -> str:
    """A command as it is typed in a shell, in the same form."""
    *start, last = started_by()
    start += [str(Path(last).with_name(f"{command}.py"))] if last.endswith(".py") else [last, command]
    return shlex.join([*start, *words])


def this_command() -> str:
    """The command of this process, without what is asked of it alone, as it is typed in a shell."""
    return shlex.join([*started_by(), *(word for word in sys.argv[1:] if not is_verb(word))])
