"""python -m tests.controls [seed=0] [only=[PART,...]] [without=MECHANISM]

Switches each mechanism off in turn, or one of them: some case of the reliability campaign must then fail that ends well
with the mechanism. Prints a row for each, exit code 1 if one stays unnoticed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.campaign.case import Case
from tests.campaign.run import PARTS, prepared, run

PATIENCE = 1000  # cases within which the campaign must fail


def put(place: str, make: Callable[[Any], Any]) -> None:
    """Replace what is at module:name or module:class.name by what `make` makes of it."""
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    setattr(owner, name, make(getattr(owner, name)))


def value(given: Any) -> Callable[[Any], Any]:
    """A function that does nothing but return this."""
    return lambda real: lambda *args, **options: given


def option(**changed: Any) -> Callable[[Any], Any]:
    return lambda real: lambda *args, **options: real(*args, **options | changed)


@contextmanager
def in_place(folder: Path, name: Any) -> Iterator[Any]:
    with open(folder / (name if isinstance(name, str) else "step-00000002-0000000000000000.ckpt"), "wb") as file:
        yield file


def atomic(real: Any) -> Any:
    for name, module in [*sys.modules.items()]:
        if name.startswith("lm.") and hasattr(module, "atomic_file"):
            put(f"{name}:atomic_file", lambda _: in_place)
    return in_place


def special_tokens(init: Any) -> Any:
    def then(self: Any, *args: Any) -> None:
        init(self, *args)
        self.backend.encode_special_tokens = False

    put("lm.data.tokenizer:Tokenizer.eot_in_text", value(False))
    return then


def raising(_: Any) -> Any:
    def report(error: Exception) -> int:
        raise error

    return report


def no_fingerprint(_: Any) -> Any:
    from lm.data.documents import Fingerprint

    return value(Fingerprint("", 0))(None)


CONTROLS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {  # the part that must fail, what is replaced, by what
    "atomic-files": ("faults", "lm.system.files:atomic_file", atomic),
    "place-in-the-data": ("kills", "lm.training.task:TrainingStream.__init__", option(start=0)),
    "removal-of-partial-files": ("kills", "lm.training.run_directory:remove_partial", value(None)),
    "removal-after-an-error": ("faults", "pathlib:Path.unlink", value(None)),
    "errors-in-one-line": ("faults", "lm.cli.main:report", raising),
    "another-server": (
        "drivers",
        "lm.ablation.run.executors.local:LocalExecutor.start",
        lambda _: lambda self, task: self.fork(task),
    ),
    "lock-of-a-run": ("limits", "filelock:BaseFileLock.acquire", value(nullcontext())),
    "state-of-a-source": ("limits", "lm.data.documents:Files.fingerprint", no_fingerprint),
    "whole-characters": (
        "prompts",
        "lm.data.tokenizer:Tokenizer.stream",
        lambda _: lambda self, ids: (self.decode([one]) for one in ids),
    ),
    "special-tokens-as-text": ("prompts", "lm.data.tokenizer:Tokenizer.__init__", special_tokens),
    "line-of-a-refusal": ("typos", "lm.cli.main:report", lambda _: lambda error, job="": 2),
    "exit-code-of-a-refusal": (
        "typos",
        "lm.cli.main:_describe",
        lambda describe: lambda error: (describe(error)[0], 0),
    ),
}


def noticed(seed: int, part: str, place: str, make: Callable[[Any], Any]) -> str:
    """The first case that fails without a mechanism and ends well with it, as two cells of a table."""
    for one in run((Case(part, n, seed) for n in range(PATIENCE)), first=partial(put, place, make)):
        if one.failure and "the case itself" not in one.failure:
            with_it = next(run([Case(part, one.number, seed)]))
            if not with_it.failure:
                return f"{one.number} | {one.failure.partition(' (only=')[0][-150:]}"
    return "- | nothing"


def main(words: list[str]) -> int:
    given = dict(word.partition("=")[::2] for word in words)
    only, seed = given.pop("only", ",".join(PARTS)).strip("[]").split(","), given.pop("seed", "0")
    names, unnoticed = [given.pop("without")] if "without" in given else [*CONTROLS], 0
    if given or not {*only} <= PARTS.keys() or not {*names} <= CONTROLS.keys() or not seed.isdecimal():
        print(f"error: {' '.join(words)}: not understood\n{__doc__}\nMECHANISM: {', '.join(CONTROLS)}", file=sys.stderr)
        return 2
    with prepared(only):
        print("| without | part | case | what fails |\n| --- | --- | ---: | --- |", flush=True)
        for name in names:
            if CONTROLS[name][0] in only:
                row = noticed(int(seed), *CONTROLS[name])
                print(f"| {name} | {CONTROLS[name][0]} | {row} |", flush=True)
                unnoticed += row[0] == "-"
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
