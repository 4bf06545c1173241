"""Mistakes in the arguments of a command, each as one line that names the key or the file."""

import difflib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from lm.cli import command_line
from lm.cli.aliases import EPOCHS, EXPERIMENT, RESUME, meaning
from lm.config import UserError
from lm.config.ablation import ReportConfig
from lm.config.commands import EvaluateConfig, ExportConfig, GenerateConfig, LookConfig, RunsConfig
from lm.config.data import TABLES
from lm.config.identity import key_of
from lm.data.paths import SUFFIXES, local_files, suffix

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
SCHEMAS = {"generate": GenerateConfig, "export": ExportConfig, "look": LookConfig, "runs": RunsConfig}
SCHEMAS |= {"evaluate": EvaluateConfig, "report": ReportConfig}
MAX_COLUMNS = 6  # of a table that are listed
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
        message = _format_config_error(error, overrides, kinds)
        is_named = any(key_of(override) in message for override in overrides)
        raise UserError(message if is_named or not overrides else f"{' '.join(overrides)}: {message}") from error
    except (AttributeError, AssertionError) as error:  # of OmegaConf, for names below what is null
        for key in map(key_of, overrides):
            if re.match(r"logger\.\w+\.", key):
                raise UserError(f"{key}: is for logger={key.split('.')[1]}, which is to be chosen too") from error
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
        key = key_of(match[1])
        is_setting = key in kinds or (CONFIGS / key).is_dir()
        return f"{match[1]}: several values, a run for each, need -m" if is_setting else no_such_key(match[1], kinds)
    place = f"{lines[0].split(': ')[0]}: " if lines[0].startswith("In '") else ""  # a YAML file, perhaps the user's own
    causes = (error, error.__cause__, error.__context__)
    cause = next((cause for cause in causes if isinstance(cause, OmegaConfBaseException)), None)
    if cause is None or not cause.full_key:
        return " ".join(" ".join(lines).split())  # Hydra's own advice, and YAML's file and line
    key = str(cause.full_key)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):  # of a.b the error names a alone
        typed = next((entry for entry in overrides if f"{key_of(entry)}.".startswith(f"{key}.")), key)
        return place + no_such_key(typed, kinds, overrides)
    if isinstance(cause, ValidationError) and key in kinds:
        return place + wrong_value(next((entry for entry in overrides if key_of(entry) == key), key), kinds)
    return f"{place}{key}: {str(cause).splitlines()[0]}"


def no_such_key(override: str, kinds: Kinds, args: Sequence[str] = ()) -> str:
    """The message about an override of a key that does not exist; `args` are those of the whole command.

    >>> from lm.config import RunConfig
    >>> no_such_key("steps=3", kinds_of(RunConfig))
    'steps: no such key; did you mean trainer.max_steps=3?'
    """
    key, (_, equals, value) = key_of(override), override.partition("=")
    if advice := _advice(key, value, kinds, args):
        return f"{override}: {advice}"
    words = _with_all(_similar(key, value if equals else "VALUE", kinds), args, kinds)
    if not words and "prompt" in kinds and equals:
        words = [whole_prompt(args or [override], kinds)]
    elif "data.path" in kinds and os.path.exists(override):
        words = [text_settings(override)]
    return f"{key}: no such key; {_did_you_mean(words) or '--help all lists the settings'}"


def _did_you_mean(words: Sequence[str]) -> str:
    return f"did you mean {' or '.join(words)}?" if words else ""


def _similar(key: str, value: str, kinds: Kinds) -> list[str]:
    """The settings that `key` may mean, as they are typed: by its words, its name, or nearly its spelling."""
    key = key.lower()
    if key in kinds and (key != "data" or _is_choice(key, value)):
        return [_assigned(key, value, kinds)]
    if meant := meaning(key, value, kinds):
        return [_assigned(*meant, kinds)]
    last_parts, last = {name: name.rpartition(".")[2] for name in kinds}, key.rpartition(".")[2]
    same = [name for name, part in last_parts.items() if part == last]
    spellings = {name if "." in key else part: name for name, part in last_parts.items()}
    close = same or [spellings[spelling] for spelling in difflib.get_close_matches(key, spellings, 1, 0.75)]
    return [_assigned(name, value, kinds) for name in close]


def _with_all(words: list[str], args: Sequence[str], kinds: Kinds) -> list[str]:
    """What one everyday word or flag means, with what all others of the command mean, to be pasted at once."""
    meant = []
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        key, equals, value = arg.lstrip("-").partition("=")
        if (equals or arg.startswith("-")) and (key not in kinds or key == "data"):
            value = value if equals else "VALUE" if "=" in following or following[:1] in ("", "-") else following
            similar = _similar(key.replace("-", "_"), value, kinds)
            meant += similar if len(similar) == 1 else []
    return [" ".join(meant)] if words[:1] and words[0] in meant else words


def _assigned(key: str, value: str, kinds: Kinds) -> str:
    parts = {kinds[key], *get_args(kinds[key])}
    if key == "data.path":
        return text_settings(value)
    if key == "tokenizer.vocab_size":  # which a recipe's characters do not have
        return f"tokenizer=bpe {key}={value}"
    if bool in parts and value not in ("true", "false"):
        value = "true"  # of a flag, which what follows need not belong to
    is_list = any(get_origin(part) is list for part in parts)
    if not is_list and {float, int} & parts and not (value == "null" and NoneType in parts):
        value = re.sub(r"^(\d{1,3}),000$", r"\g<1>000", value)
        value = ",".join(map(_number, value.split(",")))  # those of a comparison or a sweep
    return shlex.quote(f"{key}=[{value}]" if is_list and not value.startswith("[") else f"{key}={value}")


def _number(value: str) -> str:
    """A number as it is typed here: that of 2k is 2000, that of 10% is 0.1, and of no number VALUE."""
    unit = {"k": 1e3, "K": 1e3, "M": 1e6, "%": 1e-2}.get(value[-1:])
    try:
        number = float(value[:-1] if unit else value)
    except ValueError:
        return "VALUE"
    return f"{number * unit:.10g}" if unit else value


def _is_choice(group: str, word: str) -> bool:
    return os.path.isfile(CONFIGS / group / f"{word}.yaml")


def _advice(key: str, value: str, kinds: Kinds, args: Sequence[str]) -> str:
    """What a word asks for that is no setting, with the way to it; empty if it is none of them."""
    word = key.lower().replace("-", "_")
    if word == "help":
        return "did you mean --help?"
    if "trainer" not in kinds:
        return ""
    if word.rpartition(".")[2] in EPOCHS:
        from lm.cli.words import describe_epochs

        return describe_epochs(value, args)
    if difflib.get_close_matches(word, EXPERIMENT, 1, 0.8):
        return f"did you mean {shlex.quote(f'experiment={value}')}?"
    if word in RESUME and not os.path.isdir(value):
        return "the same command continues an ablation by itself" if "ablation" in kinds else resume_line(args)
    if word.partition(".")[0] == "ablation" and "ablation" not in kinds:
        return f"is for an ablation; did you mean {command_line('ablate', *args)}?"
    is_own = key in kinds or meaning(key, value, kinds)
    command = next((name for name, schema in SCHEMAS.items() if key in kinds_of(schema) and not is_own), "")
    return f"is a setting of another command; {command_line(command, '--help')} tells of it" if command else ""


def resume_line(args: Sequence[str] = ()) -> str:
    """How a run is resumed: the one that is typed, or else the newest that can be."""
    from lm.runs.find import newest_run

    if typed := [arg for arg in args if arg.startswith("run_dir=")]:
        return f"did you mean {command_line('train', typed[-1])}?"
    run = newest_run(Path("runs"), finished=False)
    line = "" if run is None else f"; {command_line('train', f'run_dir={run}')} resumes the newest"
    return f"the same command as before resumes its run by itself{line or '; none below runs/ is unfinished'}"


def text_settings(path: str) -> str:
    """The settings that read a text, as they are typed in a shell. Of a table, one of its columns is to be named."""
    endings, files = {suffix(path)}, list[Path]()
    with suppress(OSError, UserError):  # an address, or nothing
        files = [*local_files(path).values()]
        endings = {suffix(file) for file in files}
    kind = next((kind for kind, suffixes in SUFFIXES.items() if endings <= {*suffixes}), "text")
    words = [f"data={kind}", f"data.path={path}"]
    words += ["data.val_path=FILE", "tokenizer=file", "tokenizer.path=FILE"] if kind == "tokens" else []
    if kind not in TABLES:
        return shlex.join(words)
    from lm.data.tables import columns_of

    columns = columns_of(files[0], kind) if files else ["COLUMN"]
    columns = ["text"] if "text" in columns else columns
    shown = [shlex.quote(f"data.column={column}") for column in columns[:MAX_COLUMNS]]
    shown += [f"one of {len(columns) - MAX_COLUMNS} more"] if columns[MAX_COLUMNS:] else []
    return f"{shlex.join(words)} {' or '.join(shown)}"


def whole_prompt(args: Sequence[str], kinds: Kinds) -> str:
    """The prompt whose quotes were forgotten, as it is typed in a shell."""
    parts = [arg for arg in args if arg.startswith("prompt=") or arg.partition("=")[0] not in kinds]
    prompt = " ".join(part.removeprefix("prompt=") for part in parts if not os.path.isdir(part))
    return shlex.quote(f"prompt={prompt}") if re.search(r'["$`!\\]', prompt) else f'"prompt={prompt}"'


def _no_such_choice(file: str, options: Sequence[str]) -> str:
    group, slash, choice = file.partition("/")
    if not slash:
        return f"{file}: no such config in {CONFIGS}"
    options = sorted({*options} - {LOADED}) or sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    close = [f"{group}={name}" for name in difflib.get_close_matches(choice.lower(), options, n=1)]
    if group == "data" and os.path.exists(choice):
        close = [text_settings(choice)]
    elif group == "ablation" and os.path.exists(choice):
        close = [command_line("ablate", choice)]
    return f"{group}={choice}: no such config; {_did_you_mean(close) or 'choose one of ' + ', '.join(options)}"


def wrong_value(override: str, kinds: Kinds) -> str:
    """The message about a value of another type than that of the setting.

    >>> wrong_value("temperature=0,7", {"temperature": float}), wrong_value("seed=2k", {"seed": int})
    ('temperature=0,7: expected a number', 'seed=2k: expected a whole number; did you mean seed=2000?')
    """
    key, value = key_of(override), override.partition("=")[2]
    kind, number = kinds.get(key), _number(value)
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    meant = [f"{key}={number}"] if {int, float} & {*parts} and number not in ("VALUE", value) else []
    expected = " or ".join(EXPECTED.get(get_origin(part) or part, "a group") for part in parts)
    return f"{override}: expected {expected}{'; ' if meant else ''}{_did_you_mean(meant)}"


def explain_non_override(args: Sequence[str], kinds: Kinds, i: int = 0) -> str:
    """The message about argument i, which is not key=value."""
    word, following = args[i], next((arg for arg in args[i + 1 :] if arg != "="), "")
    key, equals, value = word.strip("-").partition("=")
    key, is_flag = key.replace("-", "_"), word.startswith("-")
    if not equals and "=" not in following and not re.match("-+[a-zA-Z]", following):
        value = following
    if advice := _advice(key, value, kinds, args):
        return f"{word}: {advice}"
    is_path = not is_flag and ("/" in word or "." in word) and word not in kinds
    suggestions = [] if is_path else _with_all(_similar(key, value or "VALUE", kinds), args, kinds)
    joined = (" ".join(args[i:end]) for end in range(i + 2, len(args) + 1))
    if is_flag and os.path.exists(word):
        suggestions = [shlex.quote(f"./{word}")]
    elif os.path.isdir(word):
        suggestions = [f"{name}={word}" for name in kinds if name in ("run_dir", "output_dir")][:1]
    elif "data.path" in kinds and (path := next(filter(os.path.isfile, joined), None)):
        suggestions = [text_settings(path)]
    elif not is_path and not is_flag and (groups := sorted(group for group in kinds if _is_choice(group, word))):
        choices = [arg for arg in args[i:] if "=" not in arg and _is_choice(groups[0], arg)]
        several = "-m " * (len(choices) > 1 and "ablation" not in kinds)
        suggestions = [f"{several}{group}={','.join(choices)}" for group in groups]
    if is_path and not suggestions and "trainer" in kinds:
        folder, name = os.path.split(word)
        names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        close = [shlex.quote(os.path.join(folder, match)) for match in difflib.get_close_matches(name, names, 1, 0.75)]
        advice = "a question is KEY=A,B or FILE.yaml" if "ablation" in kinds else "run_dir=RUN shows a finished run"
        return f"{word}: no such file, folder or glob; {_did_you_mean(close) or advice}"
    what = "a" if is_flag or suggestions or os.path.exists(word) else "no such file, folder or glob; a"
    return f"{word}: {what} setting is given as key=value; {_did_you_mean(suggestions) or '--help all lists them'}"
