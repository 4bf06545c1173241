"""The page docs/configuration.md, made of the dataclasses: python -m scripts.pages.configuration writes it."""

import os
import re
from dataclasses import replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from lm.cli.compose import compose
from lm.cli.evaluate import EvaluateConfig
from lm.cli.generate import GenerateConfig
from lm.cli.help import REQUIRED, Setting, settings
from lm.config import RunConfig
from lm.errors import UserError
from lm.lab.ablation.question import AblateConfig, Question, ReportConfig
from lm.lab.commands.export import ExportConfig
from lm.lab.commands.look import LookConfig
from lm.lab.commands.runs import RunsConfig
from lm.system.terminal import to_override_value

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
TYPES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    NoneType: "`null`",
    list[int]: "list of integers",
    list[float]: "list of numbers",
    list[str]: "list of strings",
    dict[str, int]: "mapping to integers",
    dict[str, str]: "mapping to strings",
    dict[str, Any]: "mapping",
    Any: "one value or a list",
}
COMMANDS = {  # and a valid example of its settings
    "ablate": AblateConfig(
        ablation=Question(name="name", question="?", arms={"a": [], "b": []}, baseline="a", seeds=[0])
    ),
    "generate": GenerateConfig(run_dir="RUN"),
    "evaluate": EvaluateConfig(run_dir="RUN"),
    "export": ExportConfig(run_dir="RUN", output_dir="DIR", format="gguf"),
    "report": ReportConfig(run_dir="RUN"),
    "runs": RunsConfig(),
    "look": LookConfig(),
}
INTRODUCTION = """\
# Configuration

Every setting of every command, with its type and its default. `python -m scripts.pages.configuration` writes this page
from the dataclasses in `lm/config.py`, so it says what the program accepts. `--help` prints the same about one command.
`python scripts/train.py --cfg job` prints the values that choices such as `head=untied` set. `eval "$(lm-lab -sc
install=bash)"` lets bash complete commands and settings.

A setting is given as `key=value`. `null` means that there is no value. Write a list as `[a,b]` and a mapping as
`{key: value}`, in quotes for the shell. A setting without a default is required.
"""
TRAIN = """
## train

The table has the defaults of `python scripts/train.py`, with the YAML files in `configs/` that it chooses. Where the
dataclass itself, as `RunConfig()` in Python gives it, has another default, the table gives both.
"""
SECTIONS = ("model, head", "data, tokenizer", "optim, trainer", "logger, checkpoint, validation, diagnostics")
HEADER = "| setting | type | default | meaning |\n| --- | --- | --- | --- |\n"
EVALUATE = "\nThe settings of `data.` stand under [train](#train).\n"


def page() -> str:
    parts = [INTRODUCTION, TRAIN]
    example, composed = RunConfig(), compose("train", [], RunConfig)
    composed.data.cache_dir = example.data.cache_dir  # of the environment in which the schema was built
    in_python = {setting.key: setting.default for setting in settings(RunConfig, example)}
    for section, members in groupby(settings(RunConfig, composed), _section):
        parts.append(f"\n### {section}\n\n{HEADER}")
        parts += [_row(setting, example, in_python[setting.key]) for setting in members]
    for command, example in COMMANDS.items():
        parts.append(f"\n## {command}\n\n{HEADER}")
        parts += [_row(setting, example) for setting in settings(type(example)) if not setting.key.startswith("data.")]
        if command == "evaluate":
            parts.append(EVALUATE)
    return "".join(parts)


def _section(setting: Setting) -> str:
    group = setting.key.split(".")[0]
    return next((section for section in SECTIONS if group in section.split(", ")), "the run")


def _row(setting: Setting, example: Any, in_python: Any = REQUIRED) -> str:
    kinds = get_args(setting.kind) if isinstance(setting.kind, UnionType) else (setting.kind,)
    shown = " or ".join(_choices(setting.key, kind, example) or TYPES[kind] for kind in kinds)
    default = "" if setting.default == REQUIRED else _code(setting.default)
    if in_python not in (REQUIRED, setting.default):
        default += f"; in Python {_code(in_python)}"
    return f"| `{setting.key}` | {shown} | {default} | {setting.meaning} |\n"


def _code(value: Any) -> str:
    return f"`{to_override_value(value)}`"


def _choices(key: str, kind: Any, config: Any) -> str:
    """The strings that a setting may be, as the refusal of another one lists them; empty if it lists none."""
    *groups, name = key.split(".")
    config = reduce(getattr, groups, config)
    if kind not in (str, list[str]) or config is None:
        return ""
    try:
        replace(config, **{name: "?" if kind is str else ["?"]})
    except UserError as error:
        if listed := re.fullmatch(r"[\w.]+=\?: choose one of ([\w, -]+?)(, or .*)?", str(error)):
            choices = ", ".join(map(_code, listed[1].split(", "))) + (listed[2] or "")
            return choices if kind is str else f"list of {choices}"
    return ""


if __name__ == "__main__":
    os.environ.pop("XDG_CACHE_HOME", None)  # the default of data.cache_dir depends on it
    PAGE.write_text(page())
