"""From a command line to a dataclass, and from an error to one line and an exit code. All that knows Hydra."""

import argparse
import ast
import difflib
import errno
import importlib.util
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lm.config import BadInput

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PATHS = ("path", "run_dir", "output_dir", "prompt_file", "cache_dir")
Config = TypeVar("Config")


def launch(
    task: Callable[[Config], object],
    schema: type[Config],
    name: str,
    verbatim: tuple[str, ...] = (),
    at_end: Callable[[], object] = lambda: None,
) -> None:
    """Compose configs/NAME.yaml with the command line, convert it to `schema`, call `task`, leave with an exit code.

    0 done; 1 our own fault; 2 bad input; 130 and 143 interrupted. The value of a key in `verbatim` is taken as it
    stands, past Hydra's grammar. With -m the task is called once for each job of the sweep, then `at_end`.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as they are
    speak()
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    repair_argparse()
    words = take(verbatim)
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)

    failed: list[Exception] = []
    started = False

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)
    def job(composed: DictConfig) -> None:
        nonlocal started
        started = True
        try:
            task(convert(composed, schema, words))
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
            raise
        sys.exit(complain(in_one_line(error), 2))  # Hydra's own checks raise whatever they like
    except BaseException as error:
        if (signum := getattr(error, "signum", None)) is None:
            raise
        sys.exit(complain(f"{error}; the same command resumes", 128 + signum))
    sys.exit(min(map(report, failed), default=0))


def report(error: Exception) -> int:
    """Say what failed, in one line where the user can mend it; return the exit code."""
    if isinstance(error, BadInput):
        return complain(str(error), 2)
    if isinstance(error, OmegaConfBaseException):
        return complain(in_one_line(error), 2)
    if isinstance(error, BrokenPipeError):  # the reader has seen enough: ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return complain(f"{error}: free some space and run the same command again", 1)
    traceback.print_exception(error)
    return 1


def complain(message: str, code: int) -> int:
    print("error: " * (code < 128) + " ".join(message.split()), file=sys.stderr)
    return code


def convert(composed: DictConfig, schema: type[Config], words: dict[str, str]) -> Config:
    """The composed configuration as the dataclass itself. Raises BadInput for a key that the schema lacks."""
    check_keys(composed, schema)
    OmegaConf.resolve(composed)
    composed.update(dict.fromkeys(words))
    config = OmegaConf.to_object(composed)
    for key, word in words.items():
        setattr(config, key, word)
    return config  # type: ignore[return-value]  # to_object gives the class that the schema names


def check_keys(node: Any, schema: Any, prefix: str = "") -> None:
    """Refuse what `+key=value` has added; Hydra's own message recommends the plus."""
    known = {one.name: one.type for one in fields(schema)}
    for key in node:
        if key not in known:
            raise BadInput(f"{prefix}{key}: {no_such_key(str(key), list(known))}")
        nested = [one for one in (known[key], *get_args(known[key])) if is_dataclass(one)]
        if nested and OmegaConf.is_config(node._get_node(key)):
            check_keys(node[key], nested[0], f"{prefix}{key}.")
    for key in node.get("trainer") or {} if not prefix else {}:
        if key not in trainer_arguments():
            raise BadInput(f"trainer.{key}: {no_such_key(str(key), trainer_arguments())}")


@cache
def trainer_arguments() -> list[str]:
    """What lightning.Trainer takes, read from its source: importing Lightning takes seconds."""
    spec = importlib.util.find_spec("lightning")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "pytorch/trainer/trainer.py").read_text()
    init = next(
        part
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Trainer"
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name == "__init__"
    )
    return ["_target_", *(argument.arg for argument in init.args.kwonlyargs)]


def no_such_key(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return "no such key; " + (f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}")


def in_one_line(error: BaseException) -> str:
    """What Hydra or OmegaConf says in several lines, without the advice to add a plus."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        found = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
        return f"{group}={name}: no such config; choose one of {', '.join(found) or 'none yet'}"
    text = str(error).splitlines()[0]
    cause = error.__cause__ or error
    full_key = str(getattr(cause, "full_key", None) or "")
    parent, _, word = full_key.rpartition(".")
    schema = getattr(cause, "object_type", None)
    if "Could not override" in text and is_dataclass(schema):
        return f"{full_key}: {no_such_key(word, [one.name for one in fields(schema)])}"
    if "Could not override" in text and parent == "trainer":
        known = word in trainer_arguments()
        return f"{full_key}: {f'write +{full_key}=...' if known else no_such_key(word, trainer_arguments())}"
    if "Unexpected type for root" in text:
        return "a key lies below a group that is not chosen: choose it first, as in data=text data.path=FILE"
    if isinstance(error, MissingMandatoryValue):
        return f"{text.rpartition(' ')[2]}: is missing; give it as {text.rpartition(' ')[2]}=VALUE"
    if cause is not error:
        text = f"{text}: {str(cause).splitlines()[0]}"
    return f"{full_key}: {text}" if full_key and full_key not in text else text


def take(keys: tuple[str, ...]) -> dict[str, str]:
    """Remove `key=value` for these keys from the command line, and quote paths so that Hydra takes any characters."""
    found, sweep = {}, bool({"-m", "--multirun"} & set(sys.argv))
    for i, word in reversed(list(enumerate(sys.argv))):
        key, equals, value = word.partition("=")
        if i and equals and key in keys:
            found[key] = value
            del sys.argv[i]
        elif i and equals and key.split(".")[-1] in PATHS and not sweep and value != "null" and value[:1] not in "'\"":
            sys.argv[i] = f"{key}='" + value.replace("'", "\\'") + "'"
    return found


def speak() -> None:
    """Our own messages go to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("lm")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def repair_argparse() -> None:
    """Let Hydra 1.3 start on Python 3.14, whose argparse checks help texts that Hydra gives as lazy objects."""
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        return

    def check_text(self: argparse.ArgumentParser, action: argparse.Action) -> None:
        if action.help is None or isinstance(action.help, str):
            check(self, action)

    argparse.ArgumentParser._check_help = check_text  # type: ignore[attr-defined]
