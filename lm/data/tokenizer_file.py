"""Reading a tokenizer.json, which may be a stranger's."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tokenizers

from lm.config import BadInput
from lm.config.checks import about
from lm.data.tokenizer import Tokenizer
from lm.system.files import read_regular

MOST_BYTES = 100_000_000  # three times the largest file in use
MOST_TOKENS = 1_000_000  # four times


def refuse_many_tokens(layout: Any) -> None:
    """Raise BadInput for more than MOST_TOKENS."""
    with suppress(KeyError, TypeError, AttributeError):  # the library says what is wrong
        for key, found in (("vocab", layout["model"]["vocab"]), ("added_tokens", layout.get("added_tokens") or ())):
            if len(found) > MOST_TOKENS:
                raise BadInput(f"{key}: has {len(found):,} tokens, expected at most {MOST_TOKENS:,}")


@contextmanager
def _muted() -> Iterator[None]:
    """A context in which nothing reaches standard error, also what a library writes there by itself."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def load_tokenizer(path: Path, eot: str | None = None) -> Tokenizer:
    """Read a tokenizer.json. Raises BadInput naming the file if it is missing or damaged.

    >>> load_tokenizer(Path("absent.json"))
    Traceback (most recent call last):
    lm.config.checks.BadInput: absent.json: No such file or directory; expected a tokenizer.json
    """
    try:
        text = read_regular(path, MOST_BYTES).decode()
        refuse_many_tokens(json.loads(text))
        with _muted():  # a malformed file can panic in Rust, which prints a message of its own and raises BaseException
            backend = tokenizers.Tokenizer.from_str(text)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; expected a tokenizer.json") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        if isinstance(error, BadInput):
            raise BadInput(f"{path}: {error}") from error
        raise BadInput(f"{path}: not a tokenizer.json ({str(error).splitlines()[0]})") from error
    with about(str(path)):
        return Tokenizer(backend, eot)
