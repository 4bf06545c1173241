"""An error as one line that says what to correct, and its exit code."""

import errno
import glob
import io
import os
import re
import sys
import traceback
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from lm.cli.names import expected, meant, names, no_such_choice, no_such_key
from lm.config import BadInput
from lm.system.streams import ReaderLeft
from lm.system.terminal import printable

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next((path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir()), PACKAGE)
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
PATHS = (  # errors that another path or other permissions would mend
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.EINVAL),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


def report(error: Exception) -> int:
    """Say what failed, in one line where the user can correct it; return the exit code."""
    if isinstance(error, BadInput):
        return complain(str(error), 2)
    if isinstance(error, OmegaConfBaseException):
        return complain(in_one_line(error), 2)
    if isinstance(error, ReaderLeft) and error.delivered:  # it has seen enough: generate ... | head
        return 0
    if isinstance(error, OSError) and ((name := file_of(error)) or error.errno in (*FULL, errno.EIO)):
        place = f"{name}: " if name else ""
        advice = "; free some space and run the same command again" if error.errno in FULL else ""
        return complain(f"{place}{error.strerror or error}{advice}", 2 if error.errno in PATHS else 1)
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(one in str(error) for one in ("can't allocate", "size calculation overflowed"))
    ):
        less = "a smaller data.batch_size, trainer.accumulate_grad_batches, loss=chunked, activation_checkpointing=true"
        return complain(f"out of memory; these settings need less: {less}", 1)
    if "can't start new thread" in str(error):
        return complain("no further thread can be started: free some memory, or raise the limit by ulimit -u", 1)
    traceback.print_exception(error)
    return 1


def complain(message: str, code: int) -> int:
    print("error:", printable(" ".join(message.split())), file=sys.stderr)
    return code


def file_of(error: OSError) -> str | None:
    """The name of the file that an error is about. Reading and writing do not say it: it is that of an open file among
    the variables of the innermost function that has one."""
    found = f"file descriptor {error.filename}" if isinstance(error.filename, int) else error.filename
    for frame, _ in traceback.walk_tb(None if found else error.__traceback__):
        files = [one for one in frame.f_locals.values() if isinstance(one, io.IOBase)]
        found = next(
            (name for one in files if isinstance(name := getattr(one, "name", None), str | os.PathLike)), found
        )
    return None if found is None else os.fsdecode(found)


def before_the_task(error: Exception, line: list[str], schema: type[Any], verbatim: tuple[str, ...]) -> str:
    """The message about a command line that could not be composed, naming the word that is to blame."""
    if isinstance(error, OverrideParseException) and (said := stray(str(error.override), schema, verbatim)):
        return said
    if found := re.match(r"Could not override '([^'@]+)'\. No match in the defaults list", str(error)):
        instead = " or ".join(meant(found[1], schema))
        return f"{found[1]}: no group of this command; {f'did you mean {instead}?' if instead else 'see --help'}"
    message = in_one_line(error)
    named = any(word.partition("=")[0].lstrip("+~") in message for word in line)
    return message if named else f"{message} (in: {' '.join(line)})"


def stray(word: str, schema: type[Any], verbatim: tuple[str, ...]) -> str | None:
    """The message about a word that was meant as something but is no key=value; None if it begins with a key."""
    key = word.partition("=")[0]
    if "=" in word and key.lstrip("+~").partition(".")[0].partition("@")[0].replace("_", "").isalnum():
        return None
    if "prompt" in verbatim:
        return f'{word}: give the prompt as "prompt={word}"'
    for folder in names(schema) if word and Path(word).is_dir() else ():
        if folder in ("run_dir", "output_dir"):
            return f"{word}: a setting is given as key=value; did you mean {folder}={word}?"
    choices = CONFIGS.glob(f"*/{glob.escape(word)}.yaml") if {"model", "ablation"} & set(names(schema)) else ()
    found = [path.parent.name for path in choices if "/" not in word]
    hint = f"did you mean {' or '.join(f'{group}={word}' for group in sorted(found))}?" if found else "see --help"
    return f"{word}: a setting is given as key=value; {hint}"


def in_one_line(error: BaseException) -> str:
    """What Hydra or OmegaConf says in several lines, without the advice to add a plus."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, slash, name = error.missing_cfg_file.partition("/")
        if not slash:
            return f"{group}: no such config in {CONFIGS}"
        return no_such_choice(group, name, sorted(error.options or []))
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, OverrideParseException):
        quotes = """, a word that holds '=' needs quotes: 'key=["head=untied"]'"""
        inner = "=" in str(error.override).partition("=")[2]
        return f"{error.override}: cannot be read as key=value ({text}){quotes if inner else ''}"
    if text.startswith("Ambiguous value"):
        return f"{text}: several values, a run for each, need -m"
    cause = error.__cause__ or error
    full_key = str(getattr(cause, "full_key", None) or "")
    _, _, word = full_key.rpartition(".")
    schema = getattr(cause, "object_type", None)
    if text.endswith("raised while composing config:") and error.__context__:  # what is wrong with a user's own YAML
        return f"{text.split(': ')[0]}: {in_a_file(error.__context__)}"
    if isinstance(cause, ValidationError) and is_dataclass(schema) and (kind := expected(schema, word or full_key)):
        return f"{text.removeprefix('Error merging override ')}: expected {kind}"
    if "is not Optional" in f"{text} {error.__cause__}" or "Got NoneType" in text:  # a group of settings, or its choice
        key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
        return f"{f'{key}=null: ' if key else ''}a group of settings cannot be null; leave it out"
    if "Could not override" in text and is_dataclass(schema):
        return no_such_key(full_key, names(schema), schema)
    if "Unexpected type for root" in text:
        return "data: no source is chosen; choose one with its path, as in data=text data.path=FILE"
    if cause is not error:
        text = f"{text}: {str(cause).splitlines()[0]}"
    return f"{full_key}: {text}" if full_key and full_key not in text else text


def in_a_file(error: BaseException) -> str:
    """What is wrong with a key of a YAML file."""
    key, schema, text = getattr(error, "full_key", ""), getattr(error, "object_type", None), str(error).splitlines()[0]
    if " not in " in text and is_dataclass(schema):
        return no_such_key(key, names(schema), schema)
    if "(bool) is incompatible with (str)" in text:
        return f"{key}: YAML reads on, off, yes and no as true or false; write this name in quotes"
    if isinstance(error, ValidationError) and is_dataclass(schema) and (kind := expected(schema, key.split(".")[-1])):
        return f"{key}: expected {kind} ({text})"
    return f"{text} ({key})"
