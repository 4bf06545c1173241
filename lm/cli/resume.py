"""A run that is named by its directory alone: its settings are those that lie there."""

from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from lm.cli.words import key_of
from lm.config import RUNTIME, BadInput, RunConfig
from lm.config.identity import config_hash
from lm.training.run_directory import RunDirectory

Schema = TypeVar("Schema")


def as_it_was(run: RunConfig, line: list[str]) -> RunConfig:
    """The run that lies in run_dir, if the words of `line` decide nothing else; `run` itself if they do, or none lies.

    Words that may differ on resume (RUNTIME in lm/config/run.py) are applied. Raises BadInput if the directory holds
    settings that are no run's.
    """
    keys = [key_of(word) for word in line]
    if run.run_dir is None or not all(is_runtime(key) for key in keys):
        return run
    place = RunDirectory(Path(run.run_dir).expanduser())
    if not place.config.exists():
        return run
    settings = place.read_config()
    for key in keys:
        copy_setting(key, asdict(run), settings)
    try:
        if "data_hash" not in settings:
            raise TypeError("data_hash is missing")
        return with_loss_as_typed(build(RunConfig, settings), settings, place.path)
    except (TypeError, AttributeError) as error:
        raise BadInput(f"{place.config}: not what train wrote ({error})") from error


def is_runtime(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in RUNTIME)


def copy_setting(key: str, source: dict[str, Any], target: dict[str, Any]) -> None:
    """Take one setting, given by its dotted key, from one nested configuration to another."""
    name, _, deeper = key.partition(".")
    if deeper and isinstance(target.get(name), dict):
        copy_setting(deeper, source[name], target[name])
    else:
        target[name] = source[name]


def build(schema: type[Schema], settings: dict[str, Any]) -> Schema:
    """A dataclass from nested settings. Raises TypeError for a key that it lacks; a run's also holds what it found."""
    known = {one.name: one.type for one in fields(schema)}  # type: ignore[arg-type]
    if schema is RunConfig:
        settings = {key: value for key, value in settings.items() if key in known}
    values = {
        key: build(known[key], value) if is_dataclass(known.get(key)) else value  # type: ignore[arg-type]
        for key, value in settings.items()
    }
    return schema(**values)


def with_loss_as_typed(run: RunConfig, settings: dict[str, Any], path: Path) -> RunConfig:
    """config.yaml holds the loss that was chosen; if loss=auto chose it, the hash of the configuration tells."""
    chosen, run.loss = run.loss, "auto"
    found = config_hash(run)
    if settings.get("config_hash") != found and not path.resolve().name.endswith(f"-{found[:8]}"):
        run.loss = chosen
    return run
