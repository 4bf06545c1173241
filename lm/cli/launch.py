"""From a command line to a dataclass, by way of Hydra, and out with an exit code."""

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lm.cli.errors import CONFIGS, check_keys, complain, in_one_line, report
from lm.config import BadInput

PATHS = ("path", "run_dir", "output_dir", "output", "prompt_file", "cache_dir", "nanogpt")
Config = TypeVar("Config")


def launch(
    task: Callable[[Config], int | None],
    schema: type[Config],
    name: str,
    verbatim: tuple[str, ...] = (),
    at_end: Callable[[], object] = lambda: None,
    rest: str | None = None,
) -> None:
    """Compose configs/NAME.yaml with the command line, convert it to `schema`, call `task`, leave with an exit code.

    0 done, or what the task returns; 1 our own fault; 2 bad input; 130 and 143 interrupted. The value of a key in
    `verbatim` is taken as it stands, past Hydra's grammar. Words that set no key of the schema go, as they are, to the
    list named by `rest`. With -m the task is called once for each job of the sweep, then `at_end`.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as they are
    speak()
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    repair_argparse()
    words: dict[str, Any] = dict(take(verbatim))
    if rest:
        if {"-m", "--multirun"} & set(sys.argv):
            sys.exit(complain("-m: an ablation is a sweep already; list its values as arms and seeds", 2))
        words[rest] = take_others([one.name for one in fields(schema)])  # type: ignore[arg-type]
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)

    failed: list[Exception] = []
    started = False
    code = 0

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)
    def job(composed: DictConfig) -> None:
        nonlocal started, code
        started = True
        try:
            code = max(code, task(convert(composed, schema, words)) or 0)
        except Exception as error:  # a sweep goes on with its next job
            failed.append(error)

    try:
        job()
        at_end()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(complain("interrupted", 130))
    except Exception as error:
        if started:
            sys.exit(report(error))
        line, typed = in_one_line(error), sys.argv[1:]
        named = any(word.partition("=")[0].lstrip("+~") in line for word in typed)
        sys.exit(complain(line if named else f"{line} (in: {' '.join(typed)})", 2))
    except BaseException as error:
        if (signum := getattr(error, "signum", None)) is None:
            raise
        sys.exit(complain(f"{error}; the same command resumes", 128 + signum))
    sys.exit(min(map(report, failed), default=code))


def convert(composed: DictConfig, schema: type[Config], words: dict[str, Any]) -> Config:
    """The composed configuration as the dataclass. Raises BadInput for a key that is unknown or lacks a value."""
    composed.update({key: None for key, word in words.items() if isinstance(word, str)})
    check_keys(composed, schema)
    for key in sorted(OmegaConf.missing_keys(composed)):
        raise BadInput(f"{key}: is missing; give it as {key}=VALUE")
    config = OmegaConf.to_object(composed)
    for key, word in words.items():
        setattr(config, key, word)
    return config  # type: ignore[return-value]  # to_object gives the class that the schema names


def compose(name: str, words: list[str], schema: type[Config]) -> Config:
    """configs/NAME.yaml with overrides as the dataclass, while another configuration is at work. Raises BadInput."""
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    try:
        return convert(hydra.compose(name, words), schema, {})
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(in_one_line(error)) from error


def take_others(known: list[str]) -> list[str]:
    """Remove from the command line what sets no key in `known` and none of Hydra's."""
    keys = [word.partition("=")[0].lstrip("+~").partition(".")[0] if "=" in word else "" for word in sys.argv[1:]]
    others = [key not in ("", "hydra", *known) and not key.startswith(("-", "hydra/")) for key in keys]
    found = [word for word, other in zip(sys.argv[1:], others, strict=True) if other]
    sys.argv[1:] = [word for word, other in zip(sys.argv[1:], others, strict=True) if not other]
    return found


def take(keys: tuple[str, ...]) -> dict[str, str]:
    """Remove `key=value` for these keys from the command line, and quote paths so that Hydra takes any characters."""
    found, sweep = {}, bool({"-m", "--multirun"} & set(sys.argv))
    flags = [word for word in sys.argv[1:] if word in ("-m", "--multirun")]  # argparse wants them first
    sys.argv[1:] = flags + [word for word in sys.argv[1:] if word not in flags]
    for i, word in reversed(list(enumerate(sys.argv))):
        key, equals, value = word.partition("=")
        if i and equals and key in keys:
            found[key] = value
            del sys.argv[i]
        elif i and equals and key.split(".")[-1] in PATHS and not sweep and value != "null" and value[:1] not in "'\"":
            sys.argv[i] = f"{key}={quote(value)}"
    return found


def quote(value: str) -> str:
    """A string literal of Hydra's grammar that means exactly `value`, without interpolation."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"


def speak() -> None:
    """Our own messages go to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("lm")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def repair_argparse() -> None:
    """One line for an unknown flag. And let Hydra 1.3 start on Python 3.14, whose argparse checks help texts that Hydra
    gives as lazy objects."""

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        hint = "; a setting is given as key=value, and --cfg job shows them" if "unrecognized" in message else ""
        sys.exit(complain(f"{message}{hint}", 2))

    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign]
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        return

    def check_text(self: argparse.ArgumentParser, action: argparse.Action) -> None:
        if action.help is None or isinstance(action.help, str):
            check(self, action)

    argparse.ArgumentParser._check_help = check_text  # type: ignore[attr-defined]
