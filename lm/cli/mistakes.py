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

from lm.config import BadInput

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next((path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir()), PACKAGE)
EXPECTED: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    list: "a list, as in [a,b]",
    dict: "names with values, as in {a: b}",
}
ALIASES = {  # names of other programs
    **{"learning_rate": "optim.lr", "n_embd": "model.d_model", "hidden_size": "model.d_model", "text": "prompt"},
    **{"block_size": "data.seq_len", "epochs": "trainer.max_steps", "device": "trainer.accelerator"},
}
Kinds = dict[str, Any]  # the dotted key of every setting of a command -> its type


def kinds_of(schema: Any, prefix: str = "") -> Kinds:
    """The types of the settings of a dataclass, of groups as well as of what they hold."""
    kinds: Kinds = {}
    for field in fields(schema):
        key = prefix + field.name
        kinds[key] = field.type
        for kind in (field.type, *get_args(field.type)):
            if is_dataclass(kind):
                kinds |= kinds_of(kind, f"{key}.")
    return kinds


@contextmanager
def explaining(overrides: Sequence[str], kinds: Kinds) -> Iterator[None]:
    """A context in which what Hydra, OmegaConf and YAML raise becomes a BadInput of one line."""
    from hydra.errors import HydraException

    try:
        yield
    except BadInput:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        message = _explain(error, kinds)
        is_named = any(override.partition("=")[0].lstrip("+~") in message for override in overrides)
        raise BadInput(message if is_named or not overrides else f"{' '.join(overrides)}: {message}") from error


def _explain(error: BaseException, kinds: Kinds) -> str:
    from hydra.errors import MissingConfigException, OverrideParseException

    text = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error.missing_cfg_file, error.options or ())
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override), kinds)
    if match := re.match("Ambiguous value for argument '(.*)'", text):
        return f"{match[1]}: several values, a run for each, need -m{_decimal_point(match[1], kinds)}"
    if text.startswith("Error merging override "):
        return wrong_value(text.removeprefix("Error merging override "), kinds)
    if match := re.match("Could not override '(.*)'", text):
        key = str(getattr(error.__cause__, "full_key", ""))
        return no_such_key(key if key.startswith(f"{match[1]}.") else match[1], kinds)
    if "Config group override" in text or text == "argument of type 'int' is not iterable":
        return "a group is chosen by the name of a file, as in head=tied"
    file = f"{text.split(': ')[0]}: " if text.startswith("In '") else ""  # a YAML file, perhaps the user's own
    cause = error.__context__ if file and error.__context__ else error
    key, reason = str(getattr(cause, "full_key", None) or ""), str(cause).splitlines()[0].removeprefix(file)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key:
        reason = no_such_key(key, kinds)
    elif "(bool) is incompatible with (str)" in reason:
        reason = f"{key}: YAML reads on, off, yes and no as true or false; write this name in quotes"
    elif key not in reason:
        reason = f"{key}: {reason}"
    return file + reason


def did_you_mean(words: Sequence[str]) -> str:
    return f"did you mean {' or '.join(words)}?" if words else ""


def no_such_key(key: str, kinds: Iterable[str]) -> str:
    """The message about a key that does not exist.

    >>> from lm.config import RunConfig
    >>> no_such_key("max_steps", kinds_of(RunConfig))
    'max_steps: no such key; did you mean trainer.max_steps?'
    """
    siblings = [name for name in kinds if name.rpartition(".")[0] == key.rpartition(".")[0]]
    hint = f"choose one of {', '.join(siblings)}" if "." in key and siblings else "--help lists the settings"
    return f"{key}: no such key; {did_you_mean(_nearest(key, kinds)) or hint}"


def _nearest(key: str, kinds: Iterable[str]) -> list[str]:
    """The settings that `key` may mean: those that end in the same name, else of the nearest spelling beside it."""
    group, _, last = key.lower().rpartition(".")
    names: dict[str, list[str]] = {}
    for name in kinds:
        names.setdefault(name.rpartition(".")[2], []).append(name)
    if last in names:
        return names[last]
    if alias := [name for name in kinds if name == ALIASES.get(last)]:
        return alias
    beside = [
        spelling for spelling in names if not group or any(f"{group}.{spelling}" == name for name in names[spelling])
    ]
    close = difflib.get_close_matches(last, beside, n=1, cutoff=0.8 if len(last) > 5 else 0.75)
    return [name for spelling in close for name in names[spelling] if not group or name == f"{group}.{spelling}"]


def _no_such_choice(file: str, options: Sequence[str]) -> str:
    group, slash, choice = file.partition("/")
    if not slash:
        return f"{file}: no such config in {CONFIGS}"
    close = difflib.get_close_matches(choice.lower(), options, n=1)
    if group == "data" and Path(choice).exists():
        close = [f"text data.path={choice}"]
    hint = did_you_mean([f"{group}={name}" for name in close]) or f"choose one of {', '.join(sorted(options))}"
    return f"{group}={choice}: no such config; {hint}"


def not_a_setting(args: Sequence[str], kinds: Kinds, given: Iterable[str] = ()) -> str:
    """The message about the first of these arguments, which is not key=value; `given` are the keys before it."""
    word, prompt = args[0], [arg for arg in args if arg.partition("=")[0] not in kinds]
    if word in kinds:
        hint = f"give it as {word}=VALUE"
    elif word.startswith("-"):
        key, equals, value = word.strip("-").replace("-", "_").partition("=")
        value = value if equals else "".join(args[1:2]) or "VALUE"
        hint = did_you_mean([f"{name}={value}" for name in _nearest(key, kinds)])
    elif Path(word).is_dir() and "run_dir" not in given:
        folder = next((key for key in kinds if key in ("run_dir", "output_dir")), "")
        hint = did_you_mean([f"{folder}={word}"] * (folder != ""))
    elif "prompt" in kinds:
        hint = f'put the whole prompt in quotes: "prompt={" ".join(prompt)}"'
    elif Path(word).is_file() and "data.path" in kinds:
        hint = did_you_mean([f"data=text data.path={word}"])
    else:
        groups = [path.parent.name for path in CONFIGS.glob(f"*/{glob.escape(word)}.yaml") if "/" not in word]
        hint = did_you_mean([f"{group}={word}" for group in sorted(groups) if group in kinds])
    return f"{word}: a setting is given as key=value; {hint or '--help lists them'}"


def _unreadable(override: str, kinds: Kinds) -> str:
    key, equals, value = override.partition("=")
    if not equals or not key.lstrip("+~").partition(".")[0].partition("@")[0].replace("_", "").isalnum():
        return not_a_setting([override], kinds)
    if re.search(r"\s[\w.+~@/]+=", value):
        return f"{override}: several settings in one pair of quotes; quote each by itself"
    quotes = """; a word that holds = needs quotes, as in 'key=["head=untied"]'""" if "=" in value else ""
    return f"{override}: cannot be read as key=value{quotes}"


def wrong_value(override: str, kinds: Kinds) -> str:
    """The message about a value of another type than that of the setting.

    >>> wrong_value("temperature=0,7", {"temperature": float})
    'temperature=0,7: expected a number; did you mean temperature=0.7, with a decimal point?'
    """
    kind = kinds.get(override.partition("=")[0].lstrip("+"))
    several = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    expected = " or ".join(EXPECTED.get(get_origin(one) or one, "a group of settings") for one in several)
    return f"{override}: expected {expected}{_decimal_point(override, kinds)}"


def _decimal_point(override: str, kinds: Kinds) -> str:
    key, _, value = override.partition("=")
    if kinds.get(key) in (float, float | None) and re.fullmatch(r"-?\d*,\d+", value):
        return f"; did you mean {key}={value.replace(',', '.')}, with a decimal point?"
    return ""
