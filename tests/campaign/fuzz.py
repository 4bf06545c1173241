"""Misspelt keys and values, random prompts and random texts."""

import os
import random
import sys
from dataclasses import asdict
from pathlib import Path

from .case import COMMANDS, TRAIN, Case, copy, text
from .program import Failed, run

LETTERS = "abcdefghijklmnopqrstuvwxyz_.0"
BLOCKS = [(32, 126), (0, 31), (0x80, 0x24F), (0x300, 0x36F), (0x590, 0x5FF), (0x2000, 0x206F), (0x4E00, 0x4FFF)]
BLOCKS += [(0xE000, 0xE0FF), (0xFFF0, 0xFFFF), (0x1F300, 0x1F64F), (0xE0000, 0xE007F), (0x10FF00, 0x10FFFF)]
SPECIAL = ["<|endoftext|>", "\r\n", "\ufeff", "a" * 50, "\u200d", "</s>", "   ", "\x00"]


def typos(case: Case) -> None:
    """A misspelt key is refused; a misspelt value is refused or means something."""
    import lm.cli.train
    from lm.config import RunConfig
    from lm.config.identity import flat

    known = {key: str(value) for key, value in flat(asdict(RunConfig())).items() if value not in ({}, [])}
    key, of_value = case.rng.choice([*known]), case.number % 4 == 3
    word = known[key] if of_value else key
    at, letter = case.rng.randrange(len(word)), case.rng.choice(LETTERS)
    wrong = word[:at] + case.rng.choice(["", letter, letter + word[at]]) + word[at + 1 :]
    case.about = f"{key}={wrong}" if of_value else f"{wrong}={known[key]}"

    def compose_only() -> None:
        lm.cli.train.check_paths = lambda *_: sys.exit(0)

    run([*TRAIN, case.about], compose_only).proper(*([0, 2] if of_value or wrong in known else [2]))


def random_text(rng: random.Random, n: int = 40) -> str:
    some = (chr(rng.randint(*rng.choice(BLOCKS))) for _ in range(rng.randrange(n)))
    return "".join(rng.choice(SPECIAL) if rng.random() < 0.05 else one for one in some)


def prompts(case: Case) -> None:
    """Every text comes back from its ids, no text gives end of text, a stream of any ids gives what decode gives."""
    from lm.config import BadInput, TokenizerConfig
    from lm.data.vocabulary import build_tokenizer

    known, rng, case.tried = sorted({*text(120)}), case.rng, 999
    for kind, size in {"byte": None, "bpe": 400, "char": None}.items():
        config = TokenizerConfig(kind=kind, vocab_size=size)
        tokenizer = build_tokenizer(config, iter([text(120)]), iter([text(120)]), False)
        for i in range(333):
            given = "".join(rng.choices(known, k=rng.randrange(40))) if kind == "char" and i % 9 else random_text(rng)
            case.about = f"{kind}: {given!r}"
            try:
                ids = tokenizer.encode(given)
            except BadInput as error:
                if kind != "char" or {*given} <= {*known} or "does not know the character" not in str(error):
                    raise Failed(str(error)) from error
                continue
            if tokenizer.decode(ids) != given or tokenizer.eot in ids:
                raise Failed(f"is decoded to {tokenizer.decode(ids)!r}, end of text in it: {tokenizer.eot in ids}")
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(20))]
            if "".join(tokenizer.stream(ids)) != tokenizer.decode(ids):
                raise Failed(f"the stream of {ids} is not their text")


def texts(case: Case) -> None:
    """A random prompt for generate; a random file to train on, for two steps."""
    content = (
        case.rng.randbytes(case.rng.randrange(3000)) if case.number % 4 < 2 else random_text(case.rng, 3000).encode()
    )
    if case.number % 2:
        copy("run")
        run([*COMMANDS["generate"][0], f"prompt={os.fsdecode(content[:40].replace(bytes(1), b''))}"]).proper()
    else:
        Path("text.txt").write_bytes(content)
        run([*TRAIN, "run_dir=run", "trainer.max_steps=2"]).proper()
