"""Import a part of the lab by its name, when the part is chosen: the core runs without the lab."""

from importlib import import_module
from typing import Any

from lm.errors import UserError


def from_lab(dotted: str, default: Any = None) -> Any:
    """Return the object at a dotted path, or `default` if the lab is not installed.

    Raises UserError if the lab is not installed and `default` is None.

    >>> from_lab("math.sqrt")(4.0)
    2.0
    """
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not module.startswith(f"{error.name}.") and error.name != module:
            raise
        if default is not None:
            return default
        raise UserError(f"{dotted}: is a part of the lab, which is not installed") from error


def construct(key: str, path: str, *args: Any, **options: Any) -> Any:
    """Return an object of the user's class at the dotted path `path`, which the setting `key` names."""
    return from_lab("lm.lab.user_class.construct")(key, path, *args, **options)
