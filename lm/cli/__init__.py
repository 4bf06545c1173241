"""The command line: arguments to a dataclass of lm.config, exceptions to one line and an exit code.

In: the arguments of a command. Out: a call of one function of another package, then an exit code.
Imports every package of lm; torch and Lightning only after the settings have been checked.
"""

import shlex
import sys
from pathlib import Path

COMMANDS = {
    "train": "train one run, or with -m several; resume it, or show its result",
    "generate": "continue a prompt",
    "evaluate": "score a run on its validation text or on a text of your own",
    "ablate": "answer a question: plan, tune, run every arm at every seed, report",
    "report": "write the report of an ablation again, or compare several",
    "runs": "list runs with what differs between them, filter, sort and plot them",
    "look": "open a page in the browser: prompts, losses, embeddings and curves of runs",
    "export": "write a Hugging Face folder, a GGUF file, or a page that generates",
}
NAME = "lm-lab"


def command_prefix(command: str) -> list[str]:
    """The words that start a command in the form that was used: a script, `python -m lm` or `lm-lab`."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return ["python", "-m", "lm", command]
    return ["python", str(started.with_name(f"{command}.py"))] if started.suffix == ".py" else [NAME, command]


def command_line(command: str, *words: str) -> str:
    """A command as it is typed in a shell, in the form that was used."""
    return shlex.join([*command_prefix(command), *words])
