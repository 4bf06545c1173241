"""Resuming a run that is given by run_dir alone: its settings are read from the config.yaml in that directory."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lm.cli.names import names
from lm.cli.words import key_of
from lm.config import CLASSES, BadInput, RunConfig
from lm.config.identity import PLACES, flat, is_runtime
from lm.config.typed import build
from lm.training.run_directory import LENGTH, RunDirectory

log = logging.getLogger(__name__)


def as_it_was(run: RunConfig, line: list[str]) -> RunConfig:
    """The run whose settings are in run_dir, if every other argument in `line` sets a key that may differ on resume.

    Those keys (RUNTIME in lm/config/run.py) are applied to it, and those of another length, which train then refuses
    for what they are. Returns `run` itself if an argument sets another key or if the directory holds no settings.
    Raises BadInput if config.yaml is not one that train wrote, or names code to run that was not typed.
    """
    keys = [key_of(word) for word in line]
    if run.run_dir is None or not all(is_runtime(key) or key in (*LENGTH, *PLACES, *CLASSES) for key in keys):
        return run
    place = RunDirectory(Path(run.run_dir).expanduser())
    if not place.path.exists():  # it may be mistyped
        log.info("run_dir=%s: does not exist yet, so this is a new run", run.run_dir)
    if not place.config.exists():
        return run
    settings = place.read_config()
    if any(flat(settings).get(key) != flat(asdict(run))[key] for key in CLASSES if key in keys):
        return run
    named = {key: value for key, value in settings.items() if key in names(RunConfig)}
    refuse_code({key: value for key, value in named.items() if key not in keys}, keys, place.config)
    for key in keys:
        copy_setting(key, asdict(run), settings)
    try:
        if "data_hash" not in settings:
            raise TypeError("data_hash is missing")
        found = build(RunConfig, {key: settings[key] for key in settings if key in names(RunConfig)})
        # the loaded run may be gone
        tokenizer = place.model / "tokenizer.json"
        if found.init_from and found.tokenizer.kind == "file" and tokenizer.exists():
            found.tokenizer = replace(found.tokenizer, path=str(tokenizer))
        return found
    except (TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"{place.config}: not what train wrote ({error})") from error


def refuse_code(settings: dict[str, Any], keys: list[str], path: Path) -> None:
    """Raise BadInput for a setting by which the file, perhaps a stranger's, would import or call what it names."""
    named = flat(settings)
    for key, ours in CLASSES.items():
        if (cls := named.get(key)) not in (None, *ours) and key not in keys:
            raise BadInput(f"{path}: its class {cls} would be imported; add {key}={cls} if you trust it")


def copy_setting(key: str, source: dict[str, Any], target: dict[str, Any]) -> None:
    """Take one setting, given by its dotted key, from one nested configuration to another."""
    name, _, deeper = key.partition(".")
    if deeper and isinstance(target.get(name), dict):
        copy_setting(deeper, source[name], target[name])
    else:
        target[name] = source[name]
