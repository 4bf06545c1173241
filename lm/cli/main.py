"""The console command: lm-lab COMMAND [group=choice] [key=value ...]"""

import difflib
import os
import sys
from importlib import import_module

import lm
from lm.cli.errors import complain
from lm.cli.program import NAME
from lm.cli.words import COMPLETION, has
from lm.system.streams import protect

COMMANDS = {
    "train": "train one run, or with -m several; resume it, or show its result",
    "generate": "continue a prompt",
    "evaluate": "score a run on its validation text or on a text of your own",
    "ablate": "answer a question: plan, tune, run every arm at every seed, report",
    "report": "write the report of an ablation again, or compare several",
    "runs": "list runs with what differs between them, filter, sort and plot them",
    "export": "write a Hugging Face folder",
    "benchmark": "measure how fast it is on this machine",
}


def main() -> None:
    line = sys.argv[1:]
    if not (line and line[0] in COMMANDS):  # which does it itself
        protect(output_is_the_result=False)
    if has(line[:1], COMPLETION):
        complete(line)
    elif not line or line[0] in ("-h", "--help", "help"):
        print(usage())
    elif line[0] == "--version":
        print(f"{NAME} {lm.__version__}")
    elif line[0] in COMMANDS:
        run(line[0], line[1:])
    else:
        close = difflib.get_close_matches(line[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
        sys.exit(complain(f"{line[0]}: no such command; {hint}", 2))


def run(name: str, line: list[str]) -> None:
    import_module(f"lm.cli.{name}").main(line)


def usage() -> str:
    lines = [f"  {name:10} {what}" for name, what in COMMANDS.items()]
    more = f"{NAME} COMMAND --help lists the groups and settings of a command."
    return "\n".join([f"usage: {NAME} COMMAND [group=choice] [key=value ...]", "", *lines, "", more])


def complete(line: list[str]) -> None:
    """Shell completion by Hydra, which knows of no commands: they are taken off the line that is to be completed."""
    program, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    name, space, words = rest.lstrip().partition(" ")
    if "query" not in "".join(line):  # install and uninstall are the same for all commands
        run("train", line)
    elif space and name in COMMANDS:
        os.environ["COMP_LINE"] = f"{program} {words}"
        run(name, line)
    else:
        print(*COMMANDS)
