"""Files made to do harm: none may execute, write elsewhere, hang, steer a terminal or end in a traceback."""

import json
import os
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from .case import Failed, run
from .damage import FILES
from .inject import changes
from .prepared import COMMANDS, Made

DEEP = "@deep@"  # stands for 100,000 nested lists
EVIL: list[Any] = [None, True, -1, 0, 1, 10**9, 10**30, 1e308, float("nan"), "x", "../../x", "", [], {}, [[]], DEEP]
EVIL += ["\x1b]0;x\x07", "<script>alert(1)</script>", "=1+1", {"_target_": "os.system", "command": "touch x"}]
EVIL += ["a" * 10**6, {"/dev/zero": "x"}, "os.system", "evil.Evil", ["\x1b[2J"], "!!python/name:os.system"]
OURS = [one for one in FILES if "!" not in one and "text.txt" not in one]
OURS += ["report study/verdicts.jsonl", "report study/cells/*.where", "show run/result.json", "page run/config.yaml"]
TREES = [one for one in OURS if one.endswith((".json", ".jsonl", ".where", ".yaml"))]
SETTINGS = [one for one in OURS if one.endswith(".yaml")]
OUR_OWN = ("/dev/", "/proc/", os.path.expanduser("~/.cache/"), os.path.expanduser("~/.config/matplotlib"))
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQR"
BOMB = "a: &a {x: 0, y: 0}\n" + "".join(f"{b}: &{b} {{x: *{a}, y: *{a}}}\n" for a, b in pairwise(LETTERS))
TEXTS = [BOMB, "!!python/object/apply:os.system ['touch ../EXECUTED']"]
DOUBLE = {"type": "Replace", "pattern": {"String": "f"}, "content": "ff"}
TOKENIZERS: list[dict[str, Any]] = [
    {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(f+)+$"}, "behavior": "Isolated", "invert": False}},
]


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch ../EXECUTED",)


def guard(root: str) -> None:
    """Note what starts a process, connects, or writes outside of `root`."""

    def note(event: str, args: tuple[Any, ...]) -> None:
        outside = changes(event, args) and isinstance(args[0], str)
        outside = outside and not os.path.realpath(args[0]).startswith((root, *OUR_OWN))
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect") or outside:
            os.close(os.open(f"{root}/EXECUTED", os.O_CREAT | os.O_WRONLY))

    sys.addaudithook(note)


def changed(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """A JSON value with something evil in a random place, and where."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.15:
        evil = rng.choice(EVIL)
        return evil, repr(evil)[:40]
    key = rng.choice([*tree]) if isinstance(tree, dict) else rng.randrange(len(tree))
    inner, where = changed(tree[key], rng)
    again: Any = tree.copy()
    again[key] = inner
    return again, f"{key}.{where}"


def seal(path: Path, tree: Any) -> None:
    """Write a file, with hashes that are right."""
    import yaml

    from lm.system.files import checksum, sha256

    if isinstance(tree, dict) and "checksum" in tree:
        tree["checksum"] = checksum({key: value for key, value in tree.items() if key != "checksum"})
    # as JSON, 1e-05 would be a text in YAML, and the checksum another
    text = json.dumps(tree) if path.suffix != ".yaml" else yaml.safe_dump(tree).replace(f"'{DEEP}'", f'"{DEEP}"')
    path.write_text(text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000))
    if path.parent.name == "model" and path.name != "config.json":
        config = json.loads(Path("run/model/config.json").read_text())
        seal(path.with_name("config.json"), config | {"sha256": config["sha256"] | {path.name: sha256(path)}})


def one_of(files: list[str], rng: random.Random) -> tuple[str, str]:
    name, pattern = rng.choice(files).split()
    return name, str(rng.choice(sorted(Path().glob(pattern))))


def written(rng: random.Random) -> tuple[str, str]:
    (name, file), what = one_of(SETTINGS, rng), rng.choice(TEXTS)
    Path(file).write_text(what)
    return name, f"{file}: {what[:40]}"


def mutated(rng: random.Random) -> tuple[str, str]:
    import yaml

    name, file = one_of(TREES, rng)
    read = json.loads if file.endswith(".json") else yaml.safe_load
    tree, where = changed(read(Path(file).read_text()), rng)
    seal(Path(file), tree)
    return name, f"{file}: {where}"


def replaced(rng: random.Random) -> tuple[str, str]:
    name, file = one_of(OURS, rng)
    what = rng.choice(["/dev/zero", "fifo", Path(file).name, "/etc/passwd", "/proc/self/mem", "folder"])
    Path(file).unlink()
    {"fifo": os.mkfifo, "folder": os.mkdir}.get(what, lambda there: os.symlink(what, there))(file)
    return name, f"{file} is {what[:40]}"


def tokenizer(rng: random.Random) -> tuple[str, str]:
    place, change = Path("run/model/tokenizer.json"), rng.choice(TOKENIZERS)
    seal(place, json.loads(place.read_text()) | change)
    return "generate", f"tokenizer with {str(change)[:60]}"


def pickled(rng: random.Random) -> tuple[str, str]:
    import torch

    from lm.system.files import sha256

    torch.save(Payload(), "payload")
    os.rename("payload", f"half/checkpoints/step-00000005-{sha256(Path('payload'))[:16]}.ckpt")
    return "resume", "a pickle as a checkpoint"


KINDS = (mutated, replaced, mutated, replaced, mutated, written, tokenizer, pickled)


def hostile(made: Made, case: int, rng: random.Random, seed: int) -> int:
    made.copy("text.txt", "other.txt", "cache", "run", "half", "study", "rows")
    Path("evil.py").write_text("import os; os.system('touch ../EXECUTED')")
    name, what = KINDS[case % len(KINDS)](rng)
    before = sorted(os.listdir(".."))
    try:
        command = run(COMMANDS[name][0], lambda: guard(os.path.realpath("..")), 30).proper()
        if "\x1b" in command.out + command.err:
            raise Failed(f"{name}: shows a terminal escape")
        if sorted(os.listdir("..")) != before:
            raise Failed(f"{name}: executes, or writes elsewhere")
    except Failed as error:
        raise Failed(f"{what}: {error}") from error
    return 1
