"""Errors that a wrong setting raises, checks that several dataclasses share, and dataclasses from files."""

import csv
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

# What Python raises where the content of a file is not what its reader expects.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, csv.Error)
# An address in a text: scheme, user and password, host and path, query. What follows it in a sentence is no part of it.
ADDRESS = re.compile(
    r"""([a-zA-Z][\w+.-]*://)(?:[^\s/?#'"]*@)?((?:(?!::)[^\s?'"])*)(?:\?[^\s'"]*?(?=[]:;,.)]*(?:$|[\s'"])))?"""
)
RESUMABLE = "the same command continues what is done already"  # a note of an exception that ends a run
_hints = cache(get_type_hints)  # of a class they never change, and are slow to find


def without_secrets(value: Any) -> Any:
    """Text, or lists and dicts of it, in which no address has a user, a password or a query, which may give access.

    What is shown, sent or published passes through it. Only a run's config.yaml keeps an address as it was given.

    >>> without_secrets("data.path=https://me:pw@host/a.txt?signature=x: not found")
    'data.path=https://host/a.txt: not found'
    """
    if isinstance(value, str):
        return ADDRESS.sub(r"\1\2", value) if "://" in value else value
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return {key: without_secrets(item) for key, item in value.items()} if isinstance(value, dict) else value


class UserError(ValueError):
    """A mistake that the user can correct, as one line: the key or file, what was found and what is expected."""

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))


class Diverged(UserError):
    """The loss is no longer finite: an outcome of these settings, the same in every attempt."""


@contextmanager
def error_prefix(place: str) -> Iterator[None]:
    """Let the message of a UserError from inside begin with the key or the file that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


@contextmanager
def reading(path: Path, expected: str = "what lm wrote") -> Iterator[None]:
    """Turn whatever is wrong with the content of a file that is read inside into a UserError that names the file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except DAMAGE as error:
        message = next(iter(str(error).splitlines()), "")
        raise UserError(f"{path}: not {expected} ({type(error).__name__}: {message})") from error


def require_choice(key: str, name: str | None, names: tuple[str, ...]) -> None:
    if name is not None and name not in names:
        raise UserError(f"{key}={name}: choose one of {', '.join(names)}")


def require(holds: bool, setting: str, what: str) -> None:
    if not holds:
        raise UserError(f"{setting}: expected {what}")


def require_min(minimum: float, prefix: str, config: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        if value is not None and not minimum <= value <= 2**53:  # an int and a float; refuses nan too
            raise UserError(f"{prefix}{key}={value}: expected {minimum} or more, at most 2**53")


def expanded(path: str, key: str) -> str:
    """A path with the home folder in place of its `~`. `~name` of no user stays, as a file may be called so."""
    full = os.path.expanduser(path)
    require(full != path or (path != "~" and path[:2] != "~/"), f"{key}={path}", "a path without ~: no home is known")
    return full


def expand_paths(prefix: str, config: Any, *keys: str) -> None:
    """Put the home folder into paths that begin with `~`: here alone, where a setting becomes a path."""
    for key in keys:
        if (path := getattr(config, key)) is not None:
            setattr(config, key, expanded(path, f"{prefix}{key}"))


def require_seed(seed: int, key: str = "seed") -> None:
    require(0 <= seed < 2**63, f"{key}={seed}", "0 to 2**63 - 1")


def build(kind: Any, value: Any, key: str = "") -> Any:
    """A value from JSON or YAML as a dataclass, a list, a dict or a plain type; an int is a float too.

    Raises UserError naming a key that does not exist or whose value has another type, TypeError for a missing one.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        kinds = [member for member in arguments if member is not NoneType]
        return None if value is None else build(type(value) if type(value) in kinds else kinds[0], value, key)
    if kind is Any or (kind is float and type(value) is int):
        return value
    is_record = is_dataclass(kind)
    expected = dict if is_record else origin or kind
    if type(value) is not expected:
        raise UserError(f"{key}: expected {expected.__name__}, found {value!r:.60}".removeprefix(": "))
    content: Any = value  # of that type, which mypy cannot follow
    if is_record:
        hints = _hints(kind)
        if unknown := [name for name in content if name not in hints]:
            raise UserError(f"{key}.{unknown[0]}: no such key".lstrip("."))
        values = {name: build(hints[name], item, f"{key}.{name}".lstrip(".")) for name, item in content.items()}
        return kind(**values)
    if origin is list:
        return [build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(content)]
    if origin is dict:
        return {name: build(arguments[1], item, f"{key}.{name}") for name, item in content.items()}
    return value
