"""Reading a tokenizer.json, which may be a stranger's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from lm.config import UserError
from lm.config.checks import error_prefix
from lm.data.tokenizer import Tokenizer


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
    """Read a tokenizer.json. Raises UserError naming the file if it is missing or damaged.

    >>> load_tokenizer(Path("absent.json"))
    Traceback (most recent call last):
    lm.config.checks.UserError: absent.json: No such file or directory; expected a tokenizer.json
    """
    try:
        text = path.read_text(encoding="utf-8")
        with _muted():  # a malformed file can panic in Rust, which prints a message of its own and raises BaseException
            backend = tokenizers.Tokenizer.from_str(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a tokenizer.json") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{path}: not a tokenizer.json ({str(error).splitlines()[0]})") from error
    with error_prefix(str(path)):
        return Tokenizer(backend, eot)
