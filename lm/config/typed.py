"""Nested settings from a file as typed dataclasses."""

from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lm.config.checks import UserError


def build(kind: Any, value: Any, key: str = "") -> Any:
    """A value from JSON or YAML as a dataclass, a NamedTuple, a list, a dict or a plain type; an int is a float too.

    Raises UserError naming a key that does not exist or whose value has another type, TypeError for one that is missing.
    """
    origin, of = get_origin(kind), get_args(kind)
    found: Any = value
    if origin is UnionType:
        kinds = [one for one in of if one is not NoneType]
        return None if value is None else build(type(value) if type(value) in kinds else kinds[0], value, key)
    if kind is Any or (kind is float and type(value) is int):
        return value
    record, pair = is_dataclass(kind), hasattr(kind, "_fields")
    stored = dict if record else list if pair else origin or kind
    if type(value) is not stored:
        raise UserError(f"{key}: expected {stored.__name__}, found {value!r:.60}")
    hints = hints_of(kind) if record or pair else {}
    if record:
        if unknown := [name for name in found if name not in hints]:
            raise UserError(f"{key}.{unknown[0]}: no such key".lstrip("."))
        return kind(**{name: build(hints[name], one, f"{key}.{name}".lstrip(".")) for name, one in found.items()})
    if pair:
        return kind(*(build(hint, one, key) for hint, one in zip(hints.values(), found, strict=True)))
    if origin is list:
        return [build(of[0], one, f"{key}[{i}]") for i, one in enumerate(found)]
    if origin is dict:
        return {name: build(of[1], one, f"{key}.{name}") for name, one in found.items()}
    return value


@cache  # of a class it never changes, and is slow to find
def hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
