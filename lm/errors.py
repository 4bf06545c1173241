"""Errors that a user can correct, each as one line, and the checks that raise them."""

import csv
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

# Exceptions of Python where the content of a file is not what its reader expects.
DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    csv.Error,
    yaml.YAMLError,
)
# An address in a text: scheme, user and password, host and path, query.
ADDRESS = re.compile(
    r"""([a-zA-Z][\w+.-]*://)(?:[^\s/?#'"]*@)?((?:(?!::)[^\s?'"])*)"""
    r"""(?:\?[^\s'"]*?(?=[]:;,.)]*(?:$|[\s'"])))?"""
)
NO_MEMORY = re.compile("can't allocate|size calculation overflowed|segment from shared object$")
RESUMABLE = "the same command continues what is done already"  # note of an exception


def without_secrets(value: Any) -> Any:
    """Return text, or lists and dicts of text, without users, passwords and queries of addresses.

    A query may give access. Everything that lm shows, sends or publishes passes through this
    function. Only config.yaml of a run keeps an address as the user gave it.

    >>> without_secrets("data.path=https://me:pw@host/a.txt?signature=x: not found")
    'data.path=https://host/a.txt: not found'
    """
    if isinstance(value, str):
        return ADDRESS.sub(r"\1\2", value) if "://" in value else value
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {key: without_secrets(item) for key, item in value.items()}
    return value


class UserError(ValueError):
    """A mistake that the user can correct. The message has the key or file, what is wrong, and what to type."""

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))


def missing_extra(place: str, package: str, extra: str) -> UserError:
    """Return the error for a package that an extra of pyproject.toml would install; lm is on no package index."""
    advice = f"pip install -e '.[{extra}]' in the folder of the project (from a wheel: pip install 'FILE.whl[{extra}]')"
    return UserError(f"{place}: needs the package {package}; type {advice}")


class Diverged(UserError):
    """A loss that is no longer finite. Every attempt with the same settings ends so."""


@contextmanager
def error_prefix(place: str) -> Iterator[None]:
    """Put the key or the file in front of the message of a UserError from inside this context.

    The traceback of any other exception ends in the key or the file.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    except Exception as error:
        error.add_note(place)
        raise


@contextmanager
def reading(path: Path, expected: str = "what lm wrote") -> Iterator[None]:
    """Turn an error about the content of a file into a UserError that names the file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except DAMAGE as error:
        text = " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else first_line(error)  # has the line
        raise UserError(f"{path}: not {expected} ({type(error).__name__}: {text})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory has run out: torch raises RuntimeErrors of many texts for it."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or bool(NO_MEMORY.search(str(error)))


def first_line(error: BaseException | str) -> str:
    """Return the first line of the message of an error, which may be empty."""
    return (str(error).strip() or "no reason given").splitlines()[0]


def named(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


# --- checks of settings


def require(holds: bool, setting: str, expected: str) -> None:
    if not holds:
        raise UserError(f"{setting}: expected {expected}")


def require_choice(key: str, name: str | None, names: Collection[str]) -> None:
    if name is not None and name not in names:
        raise UserError(f"{key}={name}: choose one of {', '.join(names)}")


def check_settings(prefix: str, config: Any, *positive: str, **choices: Collection[str]) -> None:
    """Raise UserError for a number below 0, above 2**53 or NaN, and for a text that is none of the choices of its key.

    A number under a key of `positive` is above 0. A seed is below 2**63. None passes.
    """
    for item in fields(config):
        value, is_positive = getattr(config, item.name), item.name in positive
        setting = f"{prefix}{item.name}={value}"
        if isinstance(value, int | float):
            least = "1 or more" if isinstance(value, int) else "a number above 0"
            require(value > 0 or (value == 0 and not is_positive), setting, least if is_positive else "0 or more")
            largest, words = (2**63 - 1, "2**63 - 1") if item.name == "seed" else (2**53, "2**53")
            require(value <= largest, setting, f"at most {words}")
        if item.name in choices:
            require_choice(f"{prefix}{item.name}", value, choices[item.name])


def check_kind(prefix: str, config: Any, kind_key: str, settings: Mapping[str, Collection[str]]) -> None:
    """Raise UserError for a setting that the chosen kind needs and that is null, or that only another kind has.

    `settings`: kind -> keys of its settings.
    """
    kind = getattr(config, kind_key)
    for key in dict.fromkeys(chain(*settings.values())):
        value, is_own = getattr(config, key), key in settings[kind]
        if (value is None) == is_own:
            chosen = f"with {prefix}{kind_key}={kind}"
            unused = f"{prefix}{key}={value}: has no use {chosen}; expected null"
            missing = f"{prefix}{key}: is missing; give it {chosen}; see configs/{prefix.rstrip('.')}/"
            raise UserError(missing if is_own else unused)


def check_unused(prefix: str, config: Any, chosen: str, *keys: str) -> None:
    """Raise UserError for a setting under one of the keys that is not at its default, where it has no use."""
    for item in fields(config):
        if item.name in keys and (value := getattr(config, item.name)) != item.default:
            neutral = {"None": "null", "False": "false"}.get(str(item.default), item.default)
            raise UserError(f"{prefix}{item.name}={value}: has no use with {chosen}; expected {neutral}")


def check_output(path: Path, key: str) -> None:
    """Raise UserError unless a file can be written there, before work is done whose result would be lost."""
    require(path.parent.is_dir(), f"{key}={path}: no such folder as {path.parent}", "a file in a folder that exists")
    require(not path.is_dir(), f"{key}={path}: is a folder", "a file")


def expand_paths(config: Any, *keys: str) -> None:
    """Replace `~` in the settings of these keys."""
    for key in keys:
        if (path := getattr(config, key)) is not None:
            setattr(config, key, os.path.expanduser(path))
