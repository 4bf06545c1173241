"""Damaged files, and files made to do harm, of every kind that the program reads."""

import io
import json
import os
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from lm.system.files import checksum, sha256
from tests.inject import changes

from .case import COMMANDS, Case, check
from .program import Failed, run

FILES = [  # the command that reads it, a kind of file; with ! its result must be right, with ? it has no hash
    *("resume !half/checkpoints/step-00000004*", "resume half/config.yaml", "resume half/metrics.csv"),
    *("resume !cache/tokens/*/train.bin", "resume !cache/tokens/*/val.bin", "resume !cache/tokens/*/meta.json"),
    *("resume !cache/tokens/*/tokenizer.json", "resume !cache/texts/*/*.*", "resume !cache/sources/*.json"),
    *("resume text.txt", "evaluate run/model/model.safetensors", "export run/model/model.safetensors"),
    *("evaluate run/model/config.json", "export run/model/config.json", "evaluate run/model/tokenizer.json"),
    *("generate run/model/tokenizer.json", "runs run/config.yaml", "show run/config.yaml", "runs run/result.json"),
    *("page run/result.json", "page run/metrics.csv", "page run/samples.jsonl", "report study/ablation.json"),
    *("rows rows/ablation.json", "report study/cells/*/result.json", "report study/cells/*/metrics.csv"),
    *("report study/cells/*.where", "report study/verdicts.jsonl", "rows rows/results.csv", "rows rows/curves.csv"),
    *("overview rows/ablation.json", "foreign ?out/config.json", "foreign ?out/tokenizer*.json"),
    *("foreign ?out/model.safetensors", "json ?rows.jsonl", "csv ?rows.csv", "parquet ?rows.parquet"),
]
SAID = ["broken", "damaged", "cannot be read", "does not match", "is not what", "was changed"]  # of a file


def damage(case: Case) -> None:
    """Flip a bit, change a digit, cut, or write zeros: the result is right, or the damage is said."""
    name, pattern = FILES[case.number % len(FILES)].split()
    path, rng = case.copy(name, pattern), case.rng
    content = path.read_bytes()
    digit = rng.choice([rb"\d", rb"(?<![\da-f])\d"])  # any, or the first one of a number
    digits = [found.start() for found in re.finditer(digit, content)]
    kind = rng.choice(["flip", "flip", "cut", "zeros", *["digit"] * 3 * bool(digits)])
    at = rng.choice(digits) if kind == "digit" else rng.randrange(len(content))
    put = {
        "digit": b"%d" % ((content[at] - 48 + rng.randint(1, 9)) % 10),
        "zeros": bytes(min(rng.randint(1, 512), len(content) - at)),
        "flip": bytes([content[at] ^ 1 << rng.randrange(8)]),
        "cut": b"",
    }[kind]
    damaged = content[:at] + put + content[at + len(put) :] * (kind != "cut")
    path.write_bytes(damaged)
    case.tried = int(damaged != content)  # there may have been zeros
    case.about = f"{path}, {kind} at byte {at}"
    command = run(COMMANDS[name][0]).proper(*[0] * (pattern[0] == "!"))
    if command.code == 0 and pattern[0] != "?":
        said = [*SAID, path.name, *["Results so far"] * (kind == "cut" and path.name == "results.csv")]  # lost rows
        check(name, command, said * (pattern[0] != "!"))


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch ../EXECUTED",)


PICKLE = io.BytesIO()
torch.save(Payload(), PICKLE)
BOMB = "a: &a {x: 0, y: 0}\n" + "".join(
    f"{b}: &{b} {{x: *{a}, y: *{a}}}\n" for a, b in pairwise("abcdefghijklmnopqrst")
)
FOREIGN = {"a pickle": PICKLE.getvalue(), "an alias bomb": BOMB.encode(), "deep": b"[" * 100_000 + b"]" * 100_000}
FOREIGN |= {"Python": b"!!python/object/apply:os.system ['touch ../EXECUTED']"}
EVIL: list[Any] = [None, True, -1, 0, 1, 10**9, 10**30, 1e308, float("nan"), "x", "../../x", "", [], {}, [[]]]
EVIL += ["\x1b]0;x\x07", "<script>alert(1)</script>", "=1+1", {"_target_": "os.system", "command": "touch x"}]
EVIL += ["a" * 10**6, {"/dev/zero": "x"}, "os.system", "evil.Evil", ["\x1b[2J"], "!!python/name:os.system"]
DOUBLE = {"type": "Replace", "pattern": {"String": "f"}, "content": "ff"}
TOKENIZERS: list[dict[str, Any]] = [
    {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(f+)+$"}, "behavior": "Isolated", "invert": False}},
]
OURS = [one for one in FILES if "!" not in one and "text.txt" not in one] + [FILES[0], "show run/result.json"]
OUR_OWN = ("/dev/", "/proc/", os.path.expanduser("~/.cache/"), os.path.expanduser("~/.config/matplotlib"))


def hostile(case: Case) -> None:
    """Evil content with right hashes, or what is no such file: nothing is executed, written elsewhere or waited for."""
    name, pattern = case.rng.choice(OURS).split()
    path, rng = case.copy(name, pattern), case.rng
    Path("evil.py").write_text("import os; os.system('touch ../EXECUTED')")
    if path.suffix in (".json", ".where", ".yaml") and rng.random() < 0.7:
        tree, where = changed((yaml.safe_load if path.suffix == ".yaml" else json.loads)(path.read_text()), rng)
        if path.name == "tokenizer.json" and isinstance(tree, dict) and rng.random() < 0.5:
            tree |= rng.choice(TOKENIZERS)
        if isinstance(tree, dict) and "checksum" in tree:
            tree["checksum"] = checksum({key: value for key, value in tree.items() if key != "checksum"})
        # as JSON, 1e-05 would be a text in YAML, and the checksum another
        put(path, (json.dumps(tree) if path.suffix != ".yaml" else yaml.safe_dump(tree)).encode())
        case.about = f"{path}: {where}"
    elif content := rng.choice([b"", *FOREIGN.values()]):
        put(path, content)
        case.about = f"{path} is {content[:40]!r}"
    else:
        kind = rng.choice(["fifo", "folder", "/dev/zero", path.name, "/etc/passwd", "/proc/self/mem"])
        path.unlink()
        {"fifo": os.mkfifo, "folder": os.mkdir}.get(kind, lambda there: os.symlink(kind, there))(path)
        case.about = f"{path} is {kind}"
    before = sorted(os.listdir(".."))
    command = run(COMMANDS[name][0], guard, 30).proper()
    if "\x1b" in command.out + command.err:
        raise Failed(f"{name}: shows a terminal escape")
    if sorted(os.listdir("..")) != before:
        raise Failed(f"{name}: executes, or writes elsewhere")


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


def put(path: Path, content: bytes) -> None:
    """Write a file, and make right what names and other files say of its hash."""
    path.write_bytes(content)
    if path.suffix == ".ckpt":
        path.rename(path.with_name(f"{path.name[:14]}{sha256(path)[:16]}.ckpt"))
    elif path.parent.name == "model" and path.name != "config.json":
        config = json.loads(path.with_name("config.json").read_text()) | {"checksum": None}
        config["sha256"][path.name] = sha256(path)
        config["checksum"] = checksum({key: value for key, value in config.items() if key != "checksum"})
        path.with_name("config.json").write_text(json.dumps(config))


def guard() -> None:
    """Note what starts a process, connects, or writes outside of the folder of the case."""
    root = os.path.realpath("..") + os.sep

    def note(event: str, args: tuple[Any, ...]) -> None:
        outside = changes(event, args) and isinstance(args[0], str)
        outside = outside and not os.path.realpath(args[0]).startswith((root, *OUR_OWN))
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect") or outside:
            os.close(os.open(f"{root}EXECUTED", os.O_CREAT | os.O_WRONLY))

    sys.addaudithook(note)
