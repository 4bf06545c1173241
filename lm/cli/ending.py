"""What a run leaves on the terminal: its table, a text to read, and the lines to type next."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm.cli.mistakes import command_line
from lm.cli.tables import summary
from lm.config.run import TEMPERATURE
from lm.runs.find import newest_run
from lm.system.terminal import printable, wrapped

GREEDY_LINES = 4  # shown: what follows often repeats them
WORDS = 24  # characters of a prompt to paste


def ending(path: Path, result: dict[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a finished run, by its result.json and config.yaml: of its samples the first, or all of its own."""
    names, values = zip(*summary(result), strict=True)
    width = max(map(len, names)) + 2
    for name, value in zip(names, values, strict=True):
        yield wrapped(f"{name:{width}}{value}", rest=" " * width)
    for sample in result["samples"] if config.get("prompts") else result["samples"][:1]:
        for title, key in ((f"Drawn at temperature={TEMPERATURE}", "drawn"), ("Greedy", "continuation")):
            lines = wrapped(printable(sample["prompt"] + sample[key]), "  ", "  ", whole=False).split("\n")
            yield from ("", f"{title}:", "", *(lines[:GREEDY_LINES] if key == "continuation" else lines))
    if result.get("copied"):
        yield from ("", "The drawn text is copied from the text: more than 80 characters in a row stand there.")
    yield from ("", str(path), "")
    yield from (f"  {line}" for line in next_lines(path, result, config))


def next_lines(path: Path, result: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Commands to paste: they take the newest run by themselves."""
    run = [] if newest_run(Path("runs")) == path else [str(path)]
    prompt = result["samples"][0]["prompt"] if result["samples"] else "Once upon a time"
    yield command_line("generate", *run, _beginning(prompt), f"temperature={TEMPERATURE}")
    yield command_line("look", *run)
    if config["data"]["source"] in ("stdlib", "text") and not config["init_from"]:
        yield command_line("ablate", "head=tied,untied", *filter(None, [config["data"]["path"]]))


def _beginning(prompt: str) -> str:
    """The first words of a prompt, as a word that is no setting and no flag."""
    words = printable(prompt).splitlines()[0] if prompt.strip() else ""
    if len(words) > WORDS:
        words = words[:WORDS].rpartition(" ")[0] or words[:WORDS]
    return words if re.fullmatch(r"\w[\w ,.:;!?'()-]*", words) else f"prompt={words}"
