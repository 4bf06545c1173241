"""Nested settings from a file as typed dataclasses."""

from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lm.config.checks import BadInput

_hints = cache(get_type_hints)  # which is slow


def build(kind: Any, value: Any, key: str = "") -> Any:
    """A value from JSON or YAML as a dataclass, a NamedTuple, a list, a dict or a plain type; an int is a float too.

    Raises BadInput naming a key that does not exist or whose value has another type, TypeError for one that is missing.
    """
    if isinstance(kind, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
        return None if value is None else build(kind, value, key)
    if kind is Any or (kind is float and type(value) is int):
        return value
    origin, arguments, is_pair = get_origin(kind), get_args(kind), hasattr(kind, "_fields")
    stored = dict if is_dataclass(kind) else list if is_pair else origin or kind
    if type(value) is not stored:
        raise BadInput(f"{key}: expected {stored.__name__}, found {value!r:.60}")
    if is_dataclass(kind):
        for name in value.keys() - _hints(kind).keys():
            raise BadInput(f"{key}.{name}: no such key".lstrip("."))
        fields = {name: build(_hints(kind)[name], value[name], f"{key}.{name}".lstrip(".")) for name in value}
        return kind(**fields)  # type: ignore[operator]
    if is_pair:
        return kind(*(build(hint, item, key) for hint, item in zip(_hints(kind).values(), value, strict=True)))
    if origin is list:
        return [build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        return {name: build(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    return value
