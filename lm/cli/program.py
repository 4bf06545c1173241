"""How this process was started, so that every command that it prints can be typed as it stands."""

import shlex
import shutil
import sys
from pathlib import Path

NAME = "lm-lab"


def start(name: str) -> list[str]:
    """The words that start the command `name`, in the form that was used: a script, `python -m lm` or `lm-lab`."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", "lm", name]
    return ["python", f"scripts/{name}.py"] if program.suffix == ".py" else [NAME, name]


def typed() -> str:
    """The command line of this process, quoted for a shell, with the interpreter and the paths as they were typed."""
    if Path(sys.argv[0]).suffix == ".py":
        return shlex.join(sys.orig_argv)
    program = NAME if shutil.which(NAME) == sys.argv[0] else sys.argv[0]
    return shlex.join([program, *sys.argv[1:]])
