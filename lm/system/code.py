"""Which code computes: the version of lm, and a hash of the code that the numbers of a run depend on."""

import hashlib
import io
import tokenize
from functools import cache
from itertools import pairwise
from pathlib import Path

import lm

HOME = Path(lm.__file__).parent
# The files that the numbers of a run depend on. Some of them also hold messages: a word in a message counts as code.
COMPUTING = (
    "config.py",
    "system/device.py",
    "data/*.py",
    "model/*.py",
    "training/*.py",
    "scoring.py",
    "folder.py",
    "lab/init_from/weights.py",
    "lab/lora.py",
    "lab/targets.py",
    "lab/sources/*.py",
)
# The files that decide the tokens of a text.
READING = ("data/*.py", "lab/sources/*.py")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code_identity() -> dict[str, str]:
    """Return the version of lm and the hash of the code that computes."""
    return {"version": lm.__version__, "hash": files_hash(COMPUTING)}


@cache
def files_hash(patterns: tuple[str, ...]) -> str:
    """Return the hash of some files of this package, comments and docstrings apart."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(HOME.glob(pattern)):
            digest.update(f"{path.relative_to(HOME)}\n{code_of(path.read_text(encoding='utf-8'))}\n".encode())
    return digest.hexdigest()


def code_of(source: str) -> str:
    r"""Return the tokens of a Python source without comments, docstrings and layout.

    >>> code_of('def f(x):\n    "Double."\n    return 2 * x  # twice\n')
    'def f ( x ) : return 2 * x'
    >>> code_of('x = f"{a!r} {b:>{n}}"\n')
    'x = f"{a!r} {b:>{n}}"'
    """
    words, begins_line, lines = list[str](), True, source.splitlines(keepends=True)
    tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
    f_strings = list[tuple[int, int]]()  # where the open ones begin: from Python 3.12 on, an f-string is many tokens
    for token, following in pairwise(tokens):
        is_docstring = token.type == tokenize.STRING and begins_line and following.type == tokenize.NEWLINE
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            f_strings.append(token.start)
        elif kind == "FSTRING_END":
            (first, begin), (last, end) = f_strings.pop(), token.end
            if not f_strings:
                text = [*lines[first - 1 : last - 1], lines[last - 1][:end]]
                words.append("".join([text[0][begin:], *text[1:]]))
        elif token.type not in LAYOUT and not is_docstring and not f_strings:
            words.append(token.string)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins_line = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    return " ".join(words)
