"""The defaults of a run that starts from another: the model, head and tokenizer of that one, by init_from."""

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, fields
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from lm.cli.errors import CONFIGS
from lm.config import BadInput, HeadConfig, RunConfig, foreign_classes
from lm.exchange.base import Base, agrees, read_base
from lm.system.terminal import spelled

LOADED = ("model", "head", "tokenizer")


def with_base(composed: DictConfig, words: list[str]) -> DictConfig:
    """The configuration of train that `words` make with the model, head and tokenizer of init_from for defaults.

    Only what the words, or an experiment among them, set can then contradict the loaded model: it is refused by its
    key. Without init_from this is `composed` itself.
    """
    path = OmegaConf.select(composed, "init_from", throw_on_missing=False)
    if path is None:
        return composed
    base = read_base(path)
    found = compose_what_is_set(words)
    fill_model(found.model, base, path)
    fill_head(found.head, base)
    fill_tokenizer(found.tokenizer, base, path)
    if found.init_sha256 not in (None, base.sha256):
        raise BadInput(f"init_sha256={found.init_sha256}: init_from={path} has {base.sha256}")
    found.init_sha256 = base.sha256
    return found


def compose_what_is_set(words: list[str]) -> DictConfig:
    """configs/train.yaml with these overrides, but without its choice of a model, a head and a tokenizer: what the
    overrides do not set is missing."""
    schema = OmegaConf.structured(RunConfig)
    for group in LOADED:
        for key in schema[group]:
            schema[group][key] = MISSING
    defaults = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
    for i, one in enumerate(defaults):
        if one == "train_schema":
            defaults[i] = "unset_schema"
        elif isinstance(one, dict) and set(one) <= set(LOADED):
            defaults[i] = dict.fromkeys(one)
    store = ConfigStore.instance()
    store.store(name="unset_schema", node=schema)
    store.store(name="unset", node={"defaults": defaults})
    return hydra.compose("unset", words)


def fill_model(model: DictConfig, base: Base, path: str) -> None:
    for key, loaded in asdict(base.settings.model).items():
        if OmegaConf.is_missing(model, key):
            if f"model.{key}" in foreign_classes(base.settings.model):
                trust = f"add model.{key}={loaded} if you trust it"
                raise BadInput(f"init_from={path}: its class {loaded} would be imported; {trust}")
            model[key] = loaded
        elif not agrees(key, model[key], loaded):
            raise BadInput(
                f"model.{key}={spelled(model[key])}: the model of init_from={path} has {spelled(loaded)}; leave it out"
            )


def fill_head(head: DictConfig, base: Base) -> None:
    """Without a choice of a head it is the loaded one, with the settings that were given."""
    chosen = not OmegaConf.is_missing(head, "kind")
    for one in fields(HeadConfig):
        if OmegaConf.is_missing(head, one.name):
            assert one.default is not NO_DEFAULT
            head[one.name] = one.default if chosen else getattr(base.settings.head, one.name)


def fill_tokenizer(tokenizer: DictConfig, base: Base, path: str) -> None:
    for key, loaded in asdict(base.tokenizer).items():
        known: list[Any] = [loaded, base.typed.get(key, loaded)]
        if not OmegaConf.is_missing(tokenizer, key) and tokenizer[key] not in known:
            found = f"the tokenizer of init_from={path} has {known[-1]}"
            raise BadInput(f"tokenizer.{key}={tokenizer[key]}: {found}; leave it out")
        tokenizer[key] = loaded
