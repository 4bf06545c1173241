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
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

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


def key_of(override: str) -> str:
    """The key that an override sets: `+head.name=a` sets head.name, `~logger` logger."""
    return override.partition("=")[0].lstrip("+~")


@contextmanager
def explaining(overrides: Sequence[str], kinds: Kinds) -> Iterator[None]:
    """A context in which what Hydra, OmegaConf and YAML raise becomes a UserError of one line."""
    from hydra.errors import HydraException

    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        message = _format_config_error(error, overrides, kinds)
        is_named = any(key_of(override) in message for override in overrides)
        raise UserError(message if is_named or not overrides else f"{' '.join(overrides)}: {message}") from error
    except (AttributeError, AssertionError) as error:  # of OmegaConf, for names below a setting of Hydra that is null
        if not (own := [override for override in overrides if key_of(override).startswith("hydra.")]):
            raise
        raise UserError(f"{' '.join(own)}: cannot be merged; write it below hydra: in an experiment file") from error


def _format_config_error(error: BaseException, overrides: Sequence[str], kinds: Kinds) -> str:
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        override = str(error.override)
        if not re.match(r"[+~]*\w+([.@/][\w.@/]*)?=", override):
            return explain_non_override([override], kinds)
        advice = """quote each setting by itself, and a word that holds = as in 'key=["head=untied"]'"""
        return f"{override}: cannot be read as key=value; {advice}"
    lines = str(error).splitlines() or [type(error).__name__]
    if match := re.match("Ambiguous value for argument '(.*)'", lines[0]):
        return f"{match[1]}: several values, a run for each, need -m"
    place = f"{lines[0].split(': ')[0]}: " if lines[0].startswith("In '") else ""  # a YAML file, perhaps the user's own
    causes = (error, error.__cause__, error.__context__)
    cause = next((cause for cause in causes if isinstance(cause, OmegaConfBaseException)), None)
    if cause is None or not cause.full_key:
        return " ".join(" ".join(lines).split())  # Hydra's own advice, and YAML's file and line
    key = str(cause.full_key)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):  # of a.b the error names a alone
        typed = next((name for name in map(key_of, overrides) if f"{name}.".startswith(f"{key}.")), key)
        return place + no_such_key(typed, kinds)
    if isinstance(cause, ValidationError) and key in kinds:
        return place + wrong_value(next((entry for entry in overrides if key_of(entry) == key), key), kinds)
    return f"{place}{key}: {str(cause).splitlines()[0]}"


def no_such_key(key: str, kinds: Iterable[str]) -> str:
    """The message about a key that does not exist.

    >>> from lm.config import RunConfig
    >>> no_such_key("max_steps", kinds_of(RunConfig))
    'max_steps: no such key; did you mean trainer.max_steps?'
    """
    return f"{key}: no such key; {_did_you_mean(_similar_keys(key, kinds)) or '--help lists the settings'}"


def _did_you_mean(words: Sequence[str]) -> str:
    return f"did you mean {' or '.join(words)}?" if words else ""


def _similar_keys(key: str, kinds: Iterable[str]) -> list[str]:
    """The settings that `key` may mean: those that end in the same name, else one of nearly the same spelling."""
    last_parts, last = {name: name.rpartition(".")[2] for name in kinds}, key.lower().rpartition(".")[2]
    same = [name for name, part in last_parts.items() if part == last]
    spellings = {name if "." in key else part: name for name, part in last_parts.items()}
    return same or [spellings[close] for close in difflib.get_close_matches(key.lower(), spellings, 1, 0.75)]


def _no_such_choice(file: str, options: Sequence[str]) -> str:
    group, slash, choice = file.partition("/")
    if not slash:
        return f"{file}: no such config in {CONFIGS}"
    options = sorted({*options} - {LOADED}) or sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    close = [f"{group}={name}" for name in difflib.get_close_matches(choice.lower(), options, n=1)]
    if group == "data" and Path(choice).exists():
        close = [f"data=text data.path={choice}"]
    return f"{group}={choice}: no such config; {_did_you_mean(close) or 'choose one of ' + ', '.join(options)}"


def wrong_value(override: str, kinds: Kinds) -> str:
    """The message about a value of another type than that of the setting.

    >>> wrong_value("temperature=0,7", {"temperature": float})
    'temperature=0,7: expected a number'
    """
    kind = kinds.get(key_of(override))
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return f"{override}: expected {' or '.join(EXPECTED.get(get_origin(part) or part, 'a group') for part in parts)}"


def explain_non_override(args: Sequence[str], kinds: Kinds, i: int = 0) -> str:
    """The message about argument i, which is not key=value."""
    word = args[i]
    key = word.strip("-").replace("-", "_").partition("=")[0]
    suggestions = [f"{name}=VALUE" for name in _similar_keys(key, kinds)]
    if Path(word).is_dir():
        suggestions = [f"{name}={word}" for name in kinds if name in ("run_dir", "output_dir")][:1]
    elif "prompt" in kinds and not word.startswith("-"):  # quotes were forgotten
        parts = [arg for arg in args if arg.startswith("prompt=") or arg.partition("=")[0] not in kinds]
        prompt = " ".join(part.removeprefix("prompt=") for part in parts)
        suggestions = [f'"prompt={prompt}", the whole prompt in quotes']
    elif "data.path" in kinds and Path(word).is_file():
        suggestions = [f"data=text data.path={word}"]
    elif "/" not in word:
        groups = sorted(path.parent.name for path in CONFIGS.glob(f"*/{glob.escape(word)}.yaml"))
        suggestions = [f"{group}={word}" for group in groups if group in kinds] or suggestions
    return f"{word}: a setting is given as key=value; {_did_you_mean(suggestions) or '--help lists them'}"
