"""The finished model that a run starts from, and the settings that the run takes from the model.

Imports no torch, so that a wrong setting is refused within a second.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lm.config import TokenizerConfig, literal, user_classes
from lm.errors import UserError, error_prefix, reading
from lm.folder import TOKENIZER, WEIGHTS, ModelSettings, model_folder, read_result, read_settings, run_of
from lm.system.files import is_run, read_json, sha256

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)
# Settings that the weights of a model do not depend on.
WEIGHTLESS = ("dropout", "lora_rank", "lora_alpha", "lora_targets")


@dataclass(slots=True, kw_only=True)
class Base:
    """A finished model that a run starts from, with the known facts of its training."""

    folder: Path  # of the model
    settings: ModelSettings
    sha256: str  # of the weights, compared when the weights are read
    tokenizer: TokenizerConfig  # names the tokenizer.json
    made_by: dict[str, Any]  # settings of the group `tokenizer` that would make such a tokenizer
    steps: int | None  # of training, with the runs that the model started from; None: unknown
    tokens: int | None

    def accepts(self, key: str, value: Any) -> bool:
        """Return whether a run can start from this model, if the setting model.KEY of the run is `value`."""
        own = getattr(self.settings.model, key)
        is_adapted = (key, value, own) == ("linear", "lora", "linear")
        return key in WEIGHTLESS or value == own or is_adapted


def read_base(init_from: str) -> Base:
    """Return the model that `init_from` names. Raises UserError with what is missing or damaged."""
    folder = model_folder(init_from, "init_from")
    settings, path = read_settings(folder), folder / TOKENIZER
    if sha256(path) != settings.sha256[TOKENIZER]:
        raise UserError(f"{path}: damaged, its bytes do not match config.json")
    steps, tokens = _training_of(folder)
    if is_run(run := run_of(folder)) and not (run / "result.json").exists():
        _warn_once("init_from=%s: is unfinished; this is its model when it was stopped", init_from)
    return Base(
        folder=folder,
        settings=settings,
        sha256=settings.sha256[WEIGHTS],
        tokenizer=TokenizerConfig(kind="file", vocab_size=None, path=str(path)),
        made_by=_kind_of(path, settings.vocab_size),
        steps=steps,
        tokens=tokens,
    )


def _kind_of(path: Path, vocab_size: int) -> dict[str, Any]:
    """Return the settings that make such a tokenizer in this project, or {} for a tokenizer of another project."""
    with suppress(UserError), reading(path):  # load_tokenizer says what is wrong with the file
        model = read_json(path)["model"]
        if model["type"] == "BPE" and model.get("merges"):
            return {"kind": "bpe", "vocab_size": vocab_size}
        if kind := {"WordLevel": "char", "BPE": "byte"}.get(model["type"]):
            return {"kind": kind, "vocab_size": None}
    return {}


def _training_of(folder: Path) -> tuple[int | None, int | None]:
    """Return the steps and tokens of the training of a model and of the models that it started from."""
    if folder.name != "model" or (result := read_result(folder.parent / "result.json")) is None:
        return None, None
    before = result["init_from"] or {"steps": 0, "tokens": 0}
    if before["steps"] is None:  # the run began with a model whose training is unknown
        return None, None
    return result["steps"] + before["steps"], result["tokens"] + before["tokens"]


# --- settings


def with_init_from(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with the model, head and tokenizer of init_from, unless they are typed.

    The head may be another head. Raises UserError if a setting of the model or the tokenizer
    contradicts the loaded model.
    """
    import hydra
    from hydra.core.config_store import ConfigStore

    from lm.cli.arguments import key_of
    from lm.cli.compose import LOADED, check_consent

    path = config.init_from
    base = read_base(path)
    model, tokenizer = asdict(base.settings.model), asdict(base.tokenizer)
    loaded = {"model": model, "head": asdict(base.settings.head), "tokenizer": tokenizer}
    for group, values in loaded.items():
        ConfigStore.instance().store(LOADED, literal(values), group)
    keys = [key_of(override) for override in overrides]
    chosen = [f"{group}={LOADED}" for group in loaded if group not in keys]
    config = hydra.compose("train", [*chosen, *overrides])  # again, from the loaded groups on
    with error_prefix(f"init_from={path}"):
        check_consent(base.settings.model, keys)
    differing = {f"model.{key}": value for key, value in model.items() if not base.accepts(key, config.model[key])}
    for key, value in tokenizer.items():
        if config.tokenizer[key] not in (value, base.made_by.get(key)):
            differing[f"tokenizer.{key}"] = base.made_by.get(key, value)
    if config.init_sha256 not in (None, base.sha256):
        differing["init_sha256"] = base.sha256
    if differing:
        lines = [f"{key}={OmegaConf.select(config, key)}: init_from={path} has {differing[key]}" for key in differing]
        classes = user_classes(base.settings.model)  # which only a typed setting lets the program import
        cures = dict.fromkeys(
            f"type {key}={classes[key]}" if key in classes else f"leave out {_typed_cause(key, keys)}="
            for key in differing
        )
        raise UserError(f"{'; '.join(lines)}; {' and '.join(cures)}")
    config.tokenizer.update(tokenizer)
    config.init_sha256 = base.sha256
    return config


def _typed_cause(key: str, typed: Sequence[str]) -> str:
    """Return which of the typed keys has set a setting: the key itself, its group, or an experiment."""
    return next((cause for cause in (key, key.partition(".")[0], "experiment") if cause in typed), key)
