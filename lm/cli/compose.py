"""A composed configuration as the dataclass that it describes."""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lm.cli.base import with_base
from lm.cli.errors import in_one_line
from lm.cli.names import no_such_key
from lm.config import BadInput

Config = TypeVar("Config")


def register(name: str, schema: type[Any]) -> None:
    """Make `schema` known to Hydra, as configs/NAME.yaml names it in its defaults."""
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)


def convert(composed: DictConfig, schema: type[Config], words: dict[str, Any]) -> Config:
    """The composed configuration as the dataclass, with `words` (key -> value) that Hydra has not seen.

    Raises BadInput for a key that is unknown or lacks a value.
    """
    composed.update({key: None for key, word in words.items() if isinstance(word, str)})
    check_keys(composed, schema)
    for key in sorted(OmegaConf.missing_keys(composed)):
        raise BadInput(f"{key}: is missing; give it as {key}=VALUE")
    config = OmegaConf.to_object(composed)
    for key, word in words.items():
        setattr(config, key, word)
    return config  # type: ignore[return-value]  # to_object gives the class that the schema names


def compose(name: str, words: list[str], schema: type[Config]) -> Config:
    """configs/NAME.yaml with overrides as the dataclass, while another command is running. Raises BadInput."""
    register(name, schema)
    try:
        return convert(with_base(hydra.compose(name, words), words), schema, {})
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(in_one_line(error)) from error


def check_keys(node: Any, schema: Any, prefix: str = "") -> None:
    """Refuse what `+key=value` has added; Hydra's own message recommends the plus."""
    known = {one.name: one.type for one in fields(schema)}
    for key in node:
        if key not in known:
            raise BadInput(no_such_key(f"{prefix}{key}", list(known), schema))
        nested = [one for one in (known[key], *get_args(known[key])) if is_dataclass(one)]
        if nested and not OmegaConf.is_missing(node, key) and OmegaConf.is_config(node[key]):
            check_keys(node[key], nested[0], f"{prefix}{key}.")
