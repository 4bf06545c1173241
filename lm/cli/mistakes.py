"""Mistakes in the arguments of a command, each as one line that names the key or the file."""

import difflib
import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lm.config import UserError

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next((path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir()), PACKAGE)
EXPECTED: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    list: "a list, as in [a,b]",
    dict: "names with values, as in {a: b}",
    NoneType: "null",
}
ALIASES = {  # of other programs
    "learning_rate": "optim.lr",
    "epochs": "trainer.max_steps",
    "device": "trainer.accelerator",
    "n_embd": "model.d_model",
    "hidden_size": "model.d_model",
}
LOADED = "loaded"  # the choice that stands for what init_from names, which nobody types
Kinds = dict[str, Any]  # the dotted key of every setting of a command -> its type


def kinds_of(schema: Any, prefix: str = "") -> Kinds:
    """The types of the settings of a dataclass, of groups as well as of what they hold."""
    kinds: Kinds = {}
    for field in fields(schema):
        kinds[prefix + field.name] = field.type
        for kind in filter(is_dataclass, (field.type, *get_args(field.type))):
            kinds |= kinds_of(kind, f"{prefix}{field.name}.")
    return kinds


@contextmanager
def explaining(overrides: Sequence[str], kinds: Kinds) -> Iterator[None]:
    """A context in which what Hydra, OmegaConf and YAML raise becomes a UserError of one line."""
    from hydra.errors import HydraException

    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        message = _format_config_error(error, kinds)
        is_named = any(override.partition("=")[0].lstrip("+~") in message for override in overrides)
        raise UserError(message if is_named or not overrides else f"{' '.join(overrides)}: {message}") from error


def _format_config_error(error: BaseException, kinds: Kinds) -> str:
    from hydra.errors import MissingConfigException, OverrideParseException

    text = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error.missing_cfg_file, error.options or ())
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OverrideParseException):
        return _explain_parse_error(str(error.override), kinds)
    if match := re.match("Ambiguous value for argument '(.*)'", text):
        return f"{match[1]}: several values, a run for each, need -m"
    if match := re.match("Error merging override (.*)", text):
        return wrong_value(match[1], kinds)
    if match := re.match(r"Could not override '(.*)'\.( No match in the defaults list)?", text):
        key = str(getattr(error.__cause__, "full_key", ""))
        key = key if key.startswith(f"{match[1]}.") else match[1]
        return f"{key}: is no group of this command; --help lists them" if match[2] else no_such_key(key, kinds)
    if "Config group override" in text or text == "argument of type 'int' is not iterable":
        return "a group is chosen by the name of a file, as in head=tied"
    file = f"{text.split(': ')[0]}: " if text.startswith("In '") else ""  # a YAML file, perhaps the user's own
    cause = error.__context__ if file and error.__context__ else error
    key, reason = str(getattr(cause, "full_key", None) or ""), str(cause).splitlines()[0].removeprefix(file)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key:
        return file + no_such_key(key, kinds)
    return f"{file}{reason}" if key in reason else f"{file}{key}: {reason}"


def did_you_mean(words: Sequence[str]) -> str:
    return f"did you mean {' or '.join(words)}?" if words else ""


def no_such_key(key: str, kinds: Iterable[str]) -> str:
    """The message about a key that does not exist.

    >>> from lm.config import RunConfig
    >>> no_such_key("max_steps", kinds_of(RunConfig))
    'max_steps: no such key; did you mean trainer.max_steps?'
    """
    return f"{key}: no such key; {did_you_mean(_suggest_keys(key, kinds)) or '--help lists the settings'}"


def _suggest_keys(key: str, kinds: Iterable[str]) -> list[str]:
    """The settings that `key` may mean: those that end in the same name, else one of nearly the same spelling."""
    last_parts, last = {name: name.rpartition(".")[2] for name in kinds}, key.lower().rpartition(".")[2]
    same = [name for name, part in last_parts.items() if part == last or name == ALIASES.get(last)]
    spellings = {name if "." in key else part: name for name, part in last_parts.items()}
    return same or [spellings[close] for close in difflib.get_close_matches(key.lower(), spellings, 1, 0.75)]


def _no_such_choice(file: str, options: Sequence[str]) -> str:
    options = [option for option in options if option != LOADED]
    group, slash, choice = file.partition("/")
    if not slash:
        return f"{file}: no such config in {CONFIGS}"
    close = [f"{group}={name}" for name in difflib.get_close_matches(choice.lower(), options, n=1)]
    if group == "data" and Path(choice).exists():
        close = [f"data=text data.path={choice}"]
    hint = did_you_mean(close) or f"choose one of {', '.join(sorted(options))}"
    return f"{group}={choice}: no such config; {hint}"


def explain_non_override(args: Sequence[str], kinds: Kinds, i: int = 0) -> str:
    """The message about argument i, which is not key=value."""
    word, suggestions = args[i], list[str]()
    if word.startswith("-"):
        key, _, value = word.strip("-").replace("-", "_").partition("=")
        suggestions = [f"{name}={value or ''.join(args[i + 1 : i + 2])}" for name in _suggest_keys(key, kinds)]
    elif word in kinds:
        suggestions = [f"{word}=VALUE"]
    elif Path(word).is_dir():
        suggestions = [f"{key}={word}" for key in kinds if key in ("run_dir", "output_dir")][:1]
    elif "prompt" in kinds:
        parts = [arg for arg in args if arg.startswith("prompt=") or arg.partition("=")[0] not in kinds]
        words = [part.removeprefix("prompt=") for part in parts]
        suggestions = [f'"prompt={" ".join(words)}", the whole prompt in quotes']
    elif "data.path" in kinds and Path(word).is_file():
        suggestions = [f"data=text data.path={word}"]
    elif "/" not in word:
        groups = sorted(path.parent.name for path in CONFIGS.glob(f"*/{glob.escape(word)}.yaml"))
        suggestions = [f"{group}={word}" for group in groups if group in kinds]
    return f"{word}: a setting is given as key=value; {did_you_mean(suggestions) or '--help lists them'}"


def _explain_parse_error(override: str, kinds: Kinds) -> str:
    key, equals, value = override.partition("=")
    if not equals or not re.match(r"[+~]*\w+([.@/][\w.@/]*)?$", key):
        return explain_non_override([override], kinds)
    if re.search(r"\s[\w.+~@/]+=", value):
        return f"{override}: several settings in one pair of quotes; quote each by itself"
    quotes = """; a word that holds = needs quotes, as in 'key=["head=untied"]'""" if "=" in value else ""
    return f"{override}: cannot be read as key=value{quotes}"


def wrong_value(override: str, kinds: Kinds) -> str:
    """The message about a value of another type than that of the setting.

    >>> wrong_value("temperature=0,7", {"temperature": float})
    'temperature=0,7: expected a number'
    """
    kind = kinds.get(override.partition("=")[0].lstrip("+"))
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return f"{override}: expected {' or '.join(EXPECTED.get(get_origin(part) or part, 'a group') for part in parts)}"
