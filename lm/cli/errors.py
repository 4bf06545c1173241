"""An error as one line that says what to mend, and its exit code."""

import ast
import difflib
import errno
import importlib.util
import os
import sys
import traceback
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.config import DECIDED, OURS, BadInput

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def report(error: Exception) -> int:
    """Say what failed, in one line where the user can mend it; return the exit code."""
    if isinstance(error, BadInput):
        return complain(str(error), 2)
    if isinstance(error, OmegaConfBaseException):
        return complain(in_one_line(error), 2)
    if isinstance(error, BrokenPipeError):  # the reader has seen enough: ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        place = f"{error.filename}: " if error.filename else ""
        return complain(f"{place}{error.strerror}; free some space and run the same command again", 1)
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        less = "a smaller data.batch_size, trainer.accumulate_grad_batches, loss=chunked, activation_checkpointing=true"
        return complain(f"out of memory; these settings need less: {less}", 1)
    traceback.print_exception(error)
    return 1


def complain(message: str, code: int) -> int:
    print("error: " * (code < 128) + " ".join(message.split()), file=sys.stderr)
    return code


def check_keys(node: Any, schema: Any, prefix: str = "") -> None:
    """Refuse what `+key=value` has added; Hydra's own message recommends the plus."""
    known = {one.name: one.type for one in fields(schema)}
    for key in node:
        if key not in known:
            raise BadInput(f"{prefix}{key}: {no_such_key(str(key), list(known), deeper(str(key), schema))}")
        nested = [one for one in (known[key], *get_args(known[key])) if is_dataclass(one)]
        if nested and not OmegaConf.is_missing(node, key) and OmegaConf.is_config(node[key]):
            check_keys(node[key], nested[0], f"{prefix}{key}.")
    for key in node.get("trainer") or {} if not prefix else {}:
        if key not in trainer_arguments():
            raise BadInput(f"trainer.{key}: {no_such_key(str(key), trainer_arguments())}")


@cache
def trainer_arguments() -> list[str]:
    """What lightning.Trainer takes, read from its source: importing Lightning takes seconds."""
    spec = importlib.util.find_spec("lightning")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "pytorch/trainer/trainer.py").read_text()
    init = next(
        part
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Trainer"
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name == "__init__"
    )
    return ["_target_", *(argument.arg for argument in init.args.kwonlyargs)]


def deeper(word: str, schema: Any) -> list[str]:
    """Where a key of this very name lies in the groups of a schema."""
    groups = {one.name: [key.name for key in fields(one.type)] for one in fields(schema) if is_dataclass(one.type)}
    if "trainer" in {one.name for one in fields(schema)}:
        groups["trainer"] = [one for one in trainer_arguments() if one not in OURS]
    return [f"{group}.{word}" for group, keys in groups.items() if word in keys]


def no_such_key(word: str, known: list[str], elsewhere: list[str] | None = None) -> str:
    if elsewhere:
        return f"no such key; did you mean {' or '.join(elsewhere)}?"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return "no such key; " + (f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}")


def in_one_line(error: BaseException) -> str:
    """What Hydra or OmegaConf says in several lines, without the advice to add a plus."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, slash, name = error.missing_cfg_file.partition("/")
        if not slash:
            return f"{group}: no such config in {CONFIGS}"
        found = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
        return f"{group}={name}: no such config; choose one of {', '.join(found) or 'none yet'}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    text, *more = str(error).splitlines()
    if more and text.endswith("raised while composing config:"):  # of a user's own YAML: what is wrong stands below
        return f"{text.split(': ')[0]}: {' '.join(one.strip() for one in more[:2])}"
    if isinstance(error, OverrideParseException):
        quotes = """, a word that holds '=' needs quotes: 'key=["head=untied"]'"""
        inner = "=" in str(error.override).partition("=")[2]
        return f"{error.override}: cannot be read as key=value ({text}){quotes if inner else ''}"
    if text.startswith("Ambiguous value"):
        return f"{text}: several values, a run for each, need -m"
    cause = error.__cause__ or error
    full_key = str(getattr(cause, "full_key", None) or "")
    parent, _, word = full_key.rpartition(".")
    schema = getattr(cause, "object_type", None)
    if "Could not override" in text and is_dataclass(schema):
        return f"{full_key}: {no_such_key(word, [one.name for one in fields(schema)], deeper(word, schema))}"
    if "Could not override" in text and parent == "trainer":
        if word in OURS:
            return f"{full_key}: {DECIDED}"
        known = word in trainer_arguments()
        return f"{full_key}: {f'write +{full_key}=...' if known else no_such_key(word, trainer_arguments())}"
    if "Unexpected type for root" in text:
        return "a key lies below a group that is not chosen: choose it first, as in data=text data.path=FILE"
    if cause is not error:
        text = f"{text}: {str(cause).splitlines()[0]}"
    return f"{full_key}: {text}" if full_key and full_key not in text else text
