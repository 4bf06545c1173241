"""Arguments to a dataclass: `parse` for the flat commands, Hydra for train and ablate."""

import argparse
import difflib
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, IntegerNode, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.cli.mistakes import CONFIGS, LOADED, Kinds, explain_non_override, explaining, kinds_of, no_such_key, wrong_value
from lm.config import RunConfig, UserError, require
from lm.config.checks import error_prefix, expanded
from lm.config.identity import PLACES, is_runtime, key_of
from lm.config.model import refuse_foreign_classes
from lm.formats.base import agrees, read_base
from lm.system.terminal import to_override_value
from lm.training.run_directory import LENGTH, RunDirectory

SHORT_FLAGS = ("-i", "-p", "-r", "-s")  # Hydra has them, and people mean something else
SWEEP_VALUE = re.compile(r",|^\w+\(")  # several values in Hydra's grammar: a,b or choice(a,b), range(...), glob(...)
Config = TypeVar("Config")
log = logging.getLogger(__name__)

as_integer = IntegerNode._validate_and_convert_impl


def _as_whole_number(node: IntegerNode, value: Any) -> int:
    """OmegaConf's conversion to an integer, which takes 1e4 and 10000.0 too, from the command line and from files."""
    with suppress(ValueError):
        if isinstance(value, float | str) and (number := float(value)).is_integer() and abs(number) < 2**53:
            return int(number)
    return as_integer(node, value)


IntegerNode._validate_and_convert_impl = _as_whole_number  # type: ignore

# --- the flat commands


def parse(schema: type[Config], args: Sequence[str], **values: Any) -> Config:
    """key=value arguments as a flat dataclass; `values` are settings that come from elsewhere. Raises UserError.

    A setting that is text is what stands behind the first =, whatever it contains; others are read as YAML.
    """
    kinds = kinds_of(schema)
    for i, arg in enumerate(args):
        key, _, text = arg.partition("=")
        if not re.match(r"\+*[a-zA-Z][\w.]*=", arg):
            raise UserError(explain_non_override(args, kinds, i))
        if key not in kinds:
            raise UserError(no_such_key(arg, kinds, args))
        if kinds[key] is str or (kinds[key] == str | None and (text != "null" or key == "prompt")):
            values[key] = text
            continue
        try:
            config = OmegaConf.structured(schema)
            value = yaml.safe_load(text)
            config[key] = text if isinstance(value, int | float) else value  # 010 is no octal number
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise UserError(wrong_value(arg, kinds)) from error
        values[key] = OmegaConf.to_container(config[key]) if OmegaConf.is_config(config[key]) else config[key]
    for field in fields(schema):  # type: ignore[arg-type]  # it is a dataclass
        if field.name not in values and field.default is field.default_factory is NO_DEFAULT:
            raise UserError(f"{field.name}: is missing; give it as {field.name}=VALUE")
    return schema(**values)


# --- the commands of Hydra


def run_hydra(
    program: Callable[[], Any], words: list[str], kinds: Kinds, prepare: Callable[[argparse.Namespace], list[str]]
) -> None:
    """Call a @hydra.main program with these arguments; `prepare` gives the overrides that Hydra reads.

    Raises UserError for what cannot be composed.
    """
    from hydra._internal import utils

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise UserError(message)

        def _check_help(self, action: argparse.Action) -> None:
            """Python 3.14 refuses Hydra 1.3's text of --shell-completion, which is no string."""

        def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
            if args is not None:  # the line that is to be completed
                return super().parse_args(args, namespace)
            flags, unknown = self.parse_known_intermixed_args([word for word in words if word not in SHORT_FLAGS])
            for i, word in enumerate(words):
                if word in SHORT_FLAGS or word in unknown:
                    raise UserError(explain_non_override(words, kinds, i))
            flags.overrides = flags.overrides if flags.shell_completion else prepare(flags)
            return flags

    utils.argparse = SimpleNamespace(ArgumentParser=Parser)  # type: ignore  # for Hydra alone
    with explaining(words, kinds):
        program()


def quoted(override: str, kinds: Kinds, sweep: bool = False) -> str:
    """An override as Hydra reads it. Text, such as a path, may hold any characters; ${key} in it is interpolated.

    In a sweep, several values are left as they are, unless they name a file. Hydra takes no null for an experiment.

    >>> quoted("data.path=it's (1),a=b.txt", {"data.path": str})
    "data.path='it\\\\'s (1),a=b.txt'"
    """
    override = "experiment=none" if override == "experiment=null" else override
    key, equals, value = override.partition("=")
    is_text = kinds.get(key.lstrip("+")) in (str, str | None) and value != "null" and value[:1] not in ("'", '"')
    if not equals or not is_text or (sweep and SWEEP_VALUE.search(value) and not os.path.exists(value)):
        return override
    return f"{key}={string(value)}"


def string(text: str) -> str:
    """A string of Hydra's grammar."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def for_later(text: str) -> str:
    """Text whose ${key} is left for a run, which is composed later."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def current_overrides() -> list[str]:
    """Those of the job that Hydra is running."""
    from hydra.core.hydra_config import HydraConfig

    return list(OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))  # type: ignore[arg-type]


def compose(name: str, overrides: Sequence[str], schema: type[Config]) -> Config:
    """configs/NAME.yaml with overrides as a dataclass, also while a program of Hydra is running. Raises UserError."""
    with composing(name, overrides, schema) as (config, quoted_overrides):
        return to_dataclass(config, quoted_overrides, schema)


@contextmanager
def composing(name: str, overrides: Sequence[str], schema: type[Any]) -> Iterator[tuple[DictConfig, list[str]]]:
    """configs/NAME.yaml with overrides as Hydra composes it, which may compose more inside, and these overrides."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    register(name, schema)  # type: ignore[arg-type]  # a class is hashable
    kinds = kinds_of(schema)
    overrides = [quoted(override, kinds) for override in overrides]
    with ExitStack() as stack:
        if not GlobalHydra.instance().is_initialized():
            stack.enter_context(hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"))
        with explaining(overrides, kinds):
            yield hydra.compose(name, overrides), overrides


@cache  # to build a schema takes a tenth of the time of composing
def register(name: str, schema: Any) -> None:
    """Make a schema known to Hydra, as configs/NAME.yaml names it in its defaults."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(f"{name}_schema", schema)


def to_dataclass(config: DictConfig, overrides: Sequence[str], schema: type[Config]) -> Config:
    """What Hydra has composed of these overrides as a dataclass. Raises UserError.

    A RunConfig is that of the run that run_dir names, if that stands alone, and has the model that init_from names.
    """
    with explaining(overrides, kinds_of(schema)):
        if schema is RunConfig:
            if (run := _continued_run(config, overrides)) is not None:
                return run  # type: ignore[return-value]
            config = _with_init_from(config, overrides)
        typed = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(config))  # refuses what +key added
        for key in sorted(OmegaConf.missing_keys(typed)):
            raise UserError(f"{key}: is missing; give it as {key}=VALUE")
        result = OmegaConf.to_object(typed)
    if isinstance(result, RunConfig) and (path := CONFIGS / "head" / f"{result.head.name}.yaml").is_file():
        kind = yaml.safe_load(path.read_text())["kind"]  # results are listed under the name
        setting = f"head.name={result.head.name}"
        require(
            kind == result.head.kind, setting, f"another name with head.kind={result.head.kind}; it is a {kind} head"
        )
    return result  # type: ignore[return-value]  # to_object gives the class of the schema


# --- runs that start from another run, or continue one


def _with_init_from(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration of train whose default model, head and tokenizer are those of init_from, if there is one.

    The head may be another one; a setting of the model or the tokenizer that contradicts what is loaded is refused.
    """
    import hydra
    from hydra.core.config_store import ConfigStore

    if (path := config.get("init_from")) is None:
        return config
    base, store = read_base(path), ConfigStore.instance()
    model, tokenizer = asdict(base.settings.model), asdict(base.tokenizer)
    loaded = {"model": model, "head": asdict(base.settings.head), "tokenizer": tokenizer}
    for group, values in loaded.items():
        store.store(LOADED, values, group)
    defaults = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
    changed = [dict.fromkeys(entry, LOADED) if {*entry} <= {*loaded} else entry for entry in defaults]
    store.store("from_loaded", {"defaults": changed})
    config = hydra.compose("from_loaded", list(overrides))
    with error_prefix(f"init_from={path}"):
        refuse_foreign_classes(model, [key_of(override) for override in overrides])

    differing = {f"model.{key}": value for key, value in model.items() if not agrees(key, config.model[key], value)}
    for key, value in tokenizer.items():
        yielded, asked = base.typed.get(key), config.tokenizer[key]
        is_more = key == "vocab_size" and None not in (yielded, asked) and asked > yielded  # than its text yields
        if asked not in (value, yielded) and not is_more:
            differing[f"tokenizer.{key}"] = base.typed.get(key, value)
    if config.init_sha256 not in (None, base.sha256):
        differing["init_sha256"] = base.sha256
    if differing:
        shown = {key: to_override_value(OmegaConf.select(config, key)) for key in differing}
        lines = [f"{key}={shown[key]}: init_from={path} has {to_override_value(differing[key])}" for key in differing]
        raise UserError("; ".join(f"{line}; leave it out" for line in lines))
    config.tokenizer.update(tokenizer)
    config.init_sha256 = base.sha256
    return config


def _continued_run(config: DictConfig, overrides: Sequence[str]) -> RunConfig | None:
    """The run in run_dir with what is typed; None if there is none to go on from.

    Raises UserError if the name of a run may be mistyped.
    """
    keys, run_dir = [key_of(override) for override in overrides], config.get("run_dir")
    if not run_dir:
        return None
    directory = RunDirectory(Path(expanded(run_dir, "run_dir")))
    others = [key for key in keys if not is_runtime(key) and key not in (*LENGTH, *PLACES)]
    if not directory.path.exists() and {*others} <= {"threads"}:  # it may be mistyped
        names = [path.parent.name for path in directory.path.parent.glob("*/config.yaml")]
        close = difflib.get_close_matches(directory.path.name, names, 1)
        if close and {*keys} <= {"run_dir", "threads"}:
            meant = shlex.quote(f"run_dir={directory.path.with_name(close[0])}")
            raise UserError(f"run_dir={run_dir}: no such run; did you mean {meant}? seed=0 beside it starts a new one")
        log.info("run_dir=%s: does not exist yet, so this is a new run", run_dir)
    return directory.continued(OmegaConf.to_container(config, resolve=True), keys)
