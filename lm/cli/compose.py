"""What Hydra has composed, as dataclasses."""

import difflib
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.cli.arguments import CONFIGS, CONTINUED, GROUPS, hydra_words, key_of, kinds_of, value_mistake
from lm.config import TYPED_LENGTHS, ModelConfig, RunConfig, build, literal, user_classes
from lm.errors import UserError, error_prefix, require
from lm.registry import from_lab
from lm.system.files import is_run

LOADED = "loaded"  # choice of a group whose content was read from a file: the model of init_from, or a question
log = logging.getLogger(__name__)


@cache
def register(name: str, schema: Any) -> None:
    """Make a schema known to Hydra under the name that the defaults of configs/NAME.yaml have."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(f"{name}_schema", schema)


def run_hydra(
    name: str,
    schema: Any,
    args: Sequence[str],
    words: Sequence[str],
    job: Callable[[DictConfig, list[str]], Any],
) -> None:
    """Let Hydra compose configs/NAME.yaml, and call `job` with each configuration and the overrides of its job.

    `args` were typed, and `words` are what Hydra reads in their place. An error of `job` is raised after Hydra has
    ended, because Hydra would print further lines. In a process of a launcher the error is raised at once: nothing else
    comes back from there.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    register(name, schema)
    typed, sys.argv = sys.argv, [sys.argv[0], *words]  # Hydra reads its arguments there
    errors, process = list[Exception](), os.getpid()

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)
    def composed(config: DictConfig) -> Any:
        sys.argv = typed
        overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # ${key} stays so
        try:
            return job(config, list(overrides))
        except Exception as error:
            if os.getpid() != process:
                raise
            errors.append(error)

    with explaining(args):
        composed()
    if errors:
        raise errors[0]


def compose(name: str, overrides: Sequence[str], schema: Any) -> Any:
    """Return configs/NAME.yaml with overrides as a dataclass. Raises UserError."""
    import hydra

    register(name, schema)
    with _hydra_of_configs():
        with explaining(overrides):
            config = hydra.compose(name, [*overrides])
        return to_dataclass(config, overrides, schema)


def run_config(*words: str | Path) -> RunConfig:
    """Return the configuration of a run from the words of the command: run_config("my.txt", "head=untied").

    The size of the text chooses a recipe, as in the command. Raises UserError.
    """
    typed = [*map(str, words)]
    flags = [word for word in typed if word.startswith("-")]
    require(not flags, " ".join(flags), "a text and settings, because flags are for the command")
    run: RunConfig = compose("train", hydra_words(typed, kinds_of(RunConfig)), RunConfig)
    return run


@contextmanager
def _hydra_of_configs() -> Iterator[None]:
    """Let Hydra compose the files of configs/, also inside an application of the user that has configs of its own."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    outer = GlobalHydra.instance().hydra
    places = outer.config_loader.get_search_path().get_path() if outer else []
    if str(CONFIGS) in [str(place.path).removeprefix("file://") for place in places]:  # of a command, with --config-dir
        yield
        return
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def to_dataclass(config: DictConfig, overrides: Sequence[str], schema: Any) -> Any:
    """Return what Hydra has composed of these overrides as a dataclass. Raises UserError.

    If run_dir names a run, and no group but data or logger is typed, a RunConfig is this run with the typed settings.
    Otherwise a RunConfig takes the model, the head and the tokenizer of init_from, unless they are typed.
    """
    with explaining(overrides):
        if schema is RunConfig:
            if (run := _saved_run(config, overrides)) is not None:
                return run
            if config.get("init_from") is not None:
                config = from_lab("lm.lab.init_from.base.with_init_from")(config, overrides)
        result = build(schema, config)
    if isinstance(result, RunConfig):
        _check_head_name(result)
    return result


def _check_head_name(run: RunConfig) -> None:
    """Raise UserError if a head has the name of a file in configs/head of another kind: results show the name."""
    path = CONFIGS / "head" / f"{run.head.name}.yaml"
    if path.is_file():
        kind = yaml.safe_load(path.read_text(encoding="utf-8"))["kind"]
        setting = f"head.name={run.head.name}"
        require(kind == run.head.kind, setting, f"another name with head.kind={run.head.kind}")


# --- runs that continue a run


def _saved_run(config: DictConfig, overrides: Sequence[str]) -> RunConfig | None:
    """Return the saved run of run_dir, changed by the typed settings, or None if there is no run.

    If another group than data or logger is typed, return None too: the whole run is typed then.

    Raises UserError if run_dir is all that is typed and there is no run, or if a class of the user would be
    imported without its setting being typed.
    """
    if not (run_dir := config.get("run_dir")):
        return None
    path = Path(os.path.expanduser(run_dir))
    keys = [key_of(override) for override in overrides]
    if not path.exists() and {*keys} == {"run_dir"}:
        runs = [place.name for place in path.parent.glob("*") if is_run(place)]
        close = difflib.get_close_matches(path.name, runs, 1)
        meant = f"; did you mean {shlex.quote(f'run_dir={path.with_name(close[0])}')}?" if close else ""
        raise UserError(f"run_dir={run_dir}: no such run{meant}; data=stdlib beside it starts a new run there")
    if not is_run(path) or ({*keys} & {*GROUPS} - CONTINUED):
        return None
    from lm.training.run_directory import RunDirectory

    directory = RunDirectory(path)
    content = OmegaConf.create(literal(directory.settings()))
    for key, value in directory.read_config()["requested"].items():  # what is typed changes what was asked for,
        OmegaConf.update(content, key, value)  # not what text and machine decided
    for key in TYPED_LENGTHS[1:] if {*keys} & {*TYPED_LENGTHS} else ():  # a typed length replaces any other
        OmegaConf.update(content, key, None)
    recorded = content.init_from
    with error_prefix(f"run_dir={run_dir}"):
        check_consent(content.model, keys)
    for key in keys:
        if key == "data":
            content.data.source = config.data.source
        else:
            value = OmegaConf.select(config, key)
            typed = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            OmegaConf.update(content, key, literal(typed))
    if content.init_from != recorded:  # the recorded one may be gone
        read_base = from_lab("lm.lab.init_from.base.read_base")
        content.init_sha256 = content.init_from and read_base(content.init_from).sha256
    content.run_dir = literal(run_dir)
    return build(RunConfig, content)


def check_consent(model: ModelConfig, keys: Sequence[str]) -> None:
    """Raise UserError if a loaded model names a class of the user that is not among the typed settings."""
    for key, cls in user_classes(model).items():
        if key not in keys:
            raise UserError(f"its class {cls} would be imported; add {key}={cls} if you trust it")


# --- errors of Hydra, OmegaConf and YAML


@contextmanager
def explaining(overrides: Sequence[str]) -> Iterator[None]:
    """Turn the errors of Hydra, OmegaConf and YAML into a UserError: the key, and the words of the error."""
    from hydra.errors import HydraException

    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(_in_a_line(error, overrides)) from error
    except (AttributeError, AssertionError) as error:  # OmegaConf's, for a key below null
        for override in overrides:
            if match := re.match(r"logger\.(\w+)\.", key_of(override)):
                raise UserError(f"{override}: needs logger={match[1]} beside it") from error
        raise


def _in_a_line(error: BaseException, overrides: Sequence[str]) -> str:
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        file = error.missing_cfg_file
        group = next((name for name in GROUPS if file.startswith(f"{name}/")), file.rpartition("/")[0])
        choice = file.removeprefix(f"{group}/")
        advice = f", or data=text data.path={choice}" if group == "data" else ""
        if not group:  # of --config-name
            return f"--config-name={choice}: the main config is fixed; --config-dir=DIR adds a folder of configs"
        choices = ", ".join(sorted({*(error.options or ())} - {LOADED}))
        return f"{group}={choice}: no such config; choose one of {choices}{advice}"
    for cause in (error, error.__cause__, error.__context__):
        key = str(getattr(cause, "full_key", None) or "")
        if isinstance(cause, OmegaConfBaseException) and re.match(r"[a-z]", key):  # not <unresolvable due to ...>
            return value_mistake(next((word for word in overrides if key_of(word) == key), key), cause)
    text = " ".join(str(error).split())
    is_named = not overrides or any(key_of(word) in text for word in overrides)
    return text if is_named else f"{' '.join(overrides)}: {text}"
