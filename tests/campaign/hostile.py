"""Files made to do harm: none may execute, write elsewhere, hang, steer a terminal or end in a traceback."""

import json
import os
import pickle
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from .case import Failed, run
from .inject import CHANGING
from .prepared import COMMANDS, Made

DEEP = "@deep@"  # stands for 100,000 nested lists
EVIL: list[Any] = [None, True, -1, 0, 1, 10**9, 10**30, 1e308, float("nan"), "x", "../../x", "", [], {}, [[]], DEEP]
EVIL += ["\x1b]0;x\x07", "<script>alert(1)</script>", "=1+1", {"_target_": "os.system", "command": "touch x"}]
EVIL += ["a" * 10**6, {"/dev/zero": "x"}, "os.system", "evil.Evil", ["\x1b[2J"], "!!python/name:os.system"]
FILES = [  # a command, and what it reads
    *("generate run/model/config.json", "evaluate run/model/config.json", "export run/model/config.json"),
    *("generate run/model/tokenizer.json", "runs run/result.json", "show run/result.json", "page run/result.json"),
    *("report study/ablation.json", "rows rows/ablation.json", "overview rows/report.json", "runs run/config.yaml"),
    *("page run/config.yaml", "show run/config.yaml", "resume half/config.yaml"),
]
LINKED = [
    "rows rows/results.csv",
    "rows rows/curves.csv",
    "page run/metrics.csv",
    "generate run/model/model.safetensors",
]
OUR_OWN = ("/dev/", "/proc/", os.path.expanduser("~/.cache/"), os.path.expanduser("~/.config/matplotlib"))
BOMB = "a: &a {x: 0, y: 0}\n" + "".join(
    f"{b}: &{b} {{x: *{a}, y: *{a}}}\n" for a, b in pairwise([*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQR"])
)


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch ../EXECUTED",)


def guard(root: str) -> None:
    """Note what starts a process, connects, or writes outside of `root`."""

    def note(event: str, args: tuple[Any, ...]) -> None:
        writes = event in CHANGING or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) != 0)
        outside = writes and isinstance(args[0], str) and not os.path.realpath(args[0]).startswith((root, *OUR_OWN))
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
    from lm.system.files import checksum, sha256

    if isinstance(tree, dict) and "checksum" in tree:
        tree["checksum"] = checksum({key: value for key, value in tree.items() if key != "checksum"})
    if tree is not None:
        path.write_text(json.dumps(tree).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000))  # also YAML
    if path.parent.name == "model" and path.name != "config.json":
        config = json.loads(Path("run/model/config.json").read_text())
        seal(path.with_name("config.json"), config | {"sha256": config["sha256"] | {path.name: sha256(path)}})


def mutated(rng: random.Random) -> tuple[str, str]:
    import yaml

    name, file = rng.choice(FILES).split()
    tree, where = changed(yaml.load(Path(file).read_text(), yaml.CSafeLoader), rng)
    seal(Path(file), tree)
    return name, f"{file}: {where}"


def linked(rng: random.Random) -> tuple[str, str]:
    name, file = rng.choice(FILES + LINKED).split()
    target = rng.choice(["/dev/zero", "fifo", Path(file).name, "/etc/passwd", "/proc/self/mem", "folder"])
    Path(file).unlink()
    {"fifo": os.mkfifo, "folder": os.mkdir}.get(target, lambda there: os.symlink(target, there))(file)
    return name, f"{file} is {target}"


def special(rng: random.Random) -> tuple[str, str]:
    import torch
    from safetensors.torch import load_file, save_file

    from lm.system.files import sha256

    place, weights, which = Path("run/model/tokenizer.json"), Path("run/model/model.safetensors"), rng.randrange(8)
    double = {"type": "Replace", "pattern": {"String": "f"}, "content": "ff"}
    change: dict[str, Any] = [
        {"normalizer": {"type": "Sequence", "normalizers": [double] * 40}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(f+)+$"}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        *[{}] * 5,
    ][which]
    if change:
        seal(place, json.loads(place.read_text()) | change)
        return "generate", f"tokenizer with {str(change)[:60]}"
    if which == 3:
        save_file({key: torch.full_like(one, float("nan")) for key, one in load_file(weights).items()}, weights)
        seal(weights, None)
        return "generate", "NaN weights"
    if which in (4, 5):
        (torch.save if which == 4 else lambda one, to: Path(to).write_bytes(pickle.dumps(one)))(Payload(), "payload")
        os.rename("payload", f"half/checkpoints/step-00000005-{sha256(Path('payload'))[:16]}.ckpt")
        return "resume", "a pickle as a checkpoint"
    name, file = rng.choice(["runs run/config.yaml", "resume half/config.yaml", "page run/config.yaml"]).split()
    what = BOMB if which == 6 else "!!python/object/apply:os.system ['touch ../EXECUTED']"
    Path(file).write_text(what)
    return name, f"{file}: {what[:20]}"


def hostile(made: Made, case: int, rng: random.Random, seed: int) -> int:
    made.copy("text.txt", "other.txt", "cache", "run", "half", "study", "rows")
    Path("evil.py").write_text("import os; os.system('touch ../EXECUTED')")
    name, what = (mutated, mutated, linked, special)[case % 4](rng)
    before = sorted(os.listdir(".."))
    try:
        command = run(COMMANDS[name][0], lambda: guard(os.path.realpath("..")), 30).proper()
        if "\x1b" in command.out + command.err:
            raise Failed(f"{name}: shows a terminal escape")
        if sorted(os.listdir("..")) != before:
            raise Failed(f"{name}: executes, or writes elsewhere")
        if what == "NaN weights" and command.code == 0:
            raise Failed("silent: generates from NaN weights")
    except Failed as error:
        raise Failed(f"{what}: {error}") from error
    return 1
