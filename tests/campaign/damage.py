"""Bit flips, cuts and swapped digits in every kind of file that the program reads."""

import random
import re
from pathlib import Path

from .case import Failed, run
from .prepared import COMMANDS, Made

FILES = [  # the command that reads it, a kind of file; with a ! its result must be the right one
    *("resume !half/checkpoints/step-00000004*", "resume half/config.yaml", "resume half/metrics.csv"),
    *("resume !cache/tokens/*/train.bin", "resume !cache/tokens/*/val.bin", "resume !cache/tokens/*/meta.json"),
    *("resume !cache/tokens/*/tokenizer.json", "resume !cache/texts/*/*.*", "resume !cache/sources/*.json"),
    *("resume text.txt", "evaluate run/model/model.safetensors", "export run/model/model.safetensors"),
    *("evaluate run/model/config.json", "export run/model/config.json", "evaluate run/model/tokenizer.json"),
    *("generate run/model/tokenizer.json", "runs run/config.yaml", "show run/config.yaml", "runs run/result.json"),
    *("page run/result.json", "page run/metrics.csv", "report study/ablation.json", "rows rows/ablation.json"),
    *("report study/cells/*/result.json", "report study/cells/*/metrics.csv", "rows rows/results.csv"),
    *("rows rows/curves.csv", "overview rows/ablation.json"),
]
LOST = {"results.csv": ["Results so far"]}  # a cut between two rows leaves runs that have yet to be made


def damaged(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and the content after it."""
    digits = [found.start() for found in re.finditer(rb"\d", content)]
    what = rng.choice(["flip", "flip", "cut", "zeros", *["digit"] * 3 * bool(digits)])
    at, n, bit = rng.choice(digits) if what == "digit" else rng.randrange(len(content)), 1, rng.randrange(8)
    if what == "zeros":
        n = min(rng.randint(1, 512), len(content) - at)
    digit = b"%d" % ((content[at] - 48 + rng.randint(1, 9)) % 10)
    put = {"digit": digit, "zeros": bytes(n), "flip": bytes([content[at] ^ 1 << bit]), "cut": b""}[what]
    return f"{what} at byte {at}", content[:at] + put + content[at + n :] * (what != "cut")


def damage(made: Made, case: int, rng: random.Random, seed: int) -> int:
    """The result is the right one, or the damage is said: in one line, or in a word about the file."""
    name, pattern = FILES[case % len(FILES)].split()
    must, (words, needs, _) = pattern[0] == "!", COMMANDS[name]
    made.copy(*needs.split())
    path = rng.choice(sorted(path for path in Path().glob(pattern.lstrip("!")) if path.is_file()))
    how, content = damaged(path.read_bytes(), rng)
    path.write_bytes(content)
    try:
        command = run(words).proper(*[0] * must)
        if command.code == 0:
            made.check(name, command, name, None if must else [path.name, *LOST.get(path.name, [])])
    except Failed as error:
        raise Failed(f"{path}, {how}: {error}") from error
    return 1
