"""Nested settings from a file as typed dataclasses."""

from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lm.config.checks import UserError

_hints = cache(get_type_hints)  # of a class they never change, and are slow to find


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
