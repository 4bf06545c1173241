"""What is said of a key or a choice that does not exist, and which one was probably meant."""

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

KINDS: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    list: "a list, as in [a,b]",
    NoneType: "null",
}


def no_such_key(key: str, known: Sequence[str], schema: Any = None) -> str:
    """The message about a key that does not exist; `known` are the keys beside it, `schema` is the class of its parent.

    >>> no_such_key("sead", ["model", "seed"])
    'sead: no such key; did you mean seed?'
    """
    parent, dot, word = key.rpartition(".")
    if found := meant(key, schema) if schema is not None else []:
        return f"{key}: no such key; did you mean {' or '.join(found)}?"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"{key}: no such key; " + (
        f"did you mean {parent}{dot}{close[0]}?" if close else f"choose one of {', '.join(known)}"
    )


def meant(key: str, schema: Any) -> list[str]:
    """The settings of that name in a group of the schema."""
    if "." in key:
        return []
    groups = {one.name: names(one.type) for one in fields(schema) if is_dataclass(one.type)}
    return [f"{group}.{key}" for group, keys in groups.items() if key in keys]


def names(schema: Any) -> list[str]:
    return [one.name for one in fields(schema)]


def expected(schema: Any, name: str) -> str | None:
    """What a setting of a dataclass may be, None where it is a group.

    >>> from lm.config import HeadConfig
    >>> expected(HeadConfig, "head_std")
    'a number or null'
    """
    kind = get_type_hints(schema)[name]
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    found = [KINDS.get(get_origin(one) or one) for one in kinds]
    return None if None in found else " or ".join(map(str, found))


def no_such_choice(group: str, name: str, known: Sequence[str]) -> str:
    """The message about a file of configs/ that does not exist.

    >>> no_such_choice("data", "prquet", ["json", "parquet"])
    'data=prquet: no such config; did you mean data=parquet?'
    """
    if group == "data" and Path(name).exists():
        return f"{group}={name}: no such config; did you mean data=text data.path={name}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"did you mean {group}={close[0]}?" if close else f"choose one of {', '.join(known) or 'none yet'}"
    return f"{group}={name}: no such config; {hint}"
