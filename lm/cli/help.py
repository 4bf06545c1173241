"""What --help prints: a docstring, the groups of a command, and a line for each setting.

The meaning of a setting is the comment behind its field.
"""

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple, get_args

from lm.cli import command_line
from lm.cli.arguments import CONFIGS
from lm.cli.compose import compose
from lm.config import RunConfig
from lm.system.terminal import to_override_value

CHOSEN_FROM = {  # command -> groups that it composes
    "train": ("model", "head", "data", "tokenizer", "optim", "trainer", "logger", "experiment"),
    "ablate": ("ablation",),
    "evaluate": ("data",),
}
USUAL = {  # command -> settings on the first screen; of other commands, all
    "train": (
        "run_dir",
        "seed",
        "trainer.max_steps",
        "data.seq_len",
        "data.batch_size",
        "tokenizer.vocab_size",
        "model.n_layers",
        "model.d_model",
        "model.dropout",
        "optim.lr",
    ),
    "ablate": (
        "ablation.seeds",
        "ablation.equivalence_margin",
        "ablation.tune",
        "ablation.folds",
        "output_dir",
        "confirm",
        "plan_only",
        "json",
        "exit_code",
        "workers",
    ),
}
EXAMPLES = {
    "train": "my.txt trainer.max_steps=400 run_dir=runs/mine",
    "ablate": "model.dropout=0,0.1 my.txt output_dir=ablations/mine",
    "evaluate": "run_dir=runs/mine data=text data.path=other.txt",
    "generate": 'run_dir=runs/mine "prompt=To be, or not" temperature=0.8',
}
COLUMN = 30  # column at which the meaning of a setting begins
REQUIRED = "VALUE"  # in the place of a default
FIELD = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)  # field of a dataclass, with its comment


class Setting(NamedTuple):
    key: str
    kind: Any  # type
    default: Any  # REQUIRED where there is none
    meaning: str  # the comment behind the field


def help_text(command: str, module: Any, is_whole: bool = False) -> str:
    """Return what --help prints. For train and ablate, return one screen if not `is_whole`."""
    width = max(shutil.get_terminal_size().columns - 1, 60)
    docstring = re.sub(r"lm-lab (\w+)", lambda match: command_line(match[1]), str(module.__doc__).strip())
    values = compose("train", [], RunConfig) if module.SCHEMA is RunConfig else None
    hidden = getattr(module, "HIDDEN", ())
    every = {setting.key: setting for setting in settings(module.SCHEMA, values) if setting.key not in hidden}
    shown = [*every.values()] if is_whole else [every[key] for key in USUAL.get(command, every)]

    parts = [_filled(paragraph, width) for paragraph in docstring.split("\n\n")]
    if command in EXAMPLES:
        parts.append(_filled(f"Example: {command_line(command)} {EXAMPLES[command]}", width))
    parts.append("\n".join(_row(f"{s.key}={to_override_value(s.default)}", s.meaning, width) for s in shown))
    rows = []
    for group in CHOSEN_FROM.get(command, ()):
        names = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
        rows.append(_row(f"{group}=", ", ".join(names), width, 14))
    if rows:
        parts.append("\n".join(rows))
    if len(shown) < len(every):
        parts.append(_filled(f"{command_line(command, '--help', 'all')} shows all {len(every)} settings.", width))
    return "\n\n".join(parts)


def _filled(text: str, width: int) -> str:
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def _row(name: str, meaning: str, width: int, column: int = COLUMN) -> str:
    """Return a name and its meaning, wrapped at the width of the terminal."""
    line = f"  {name:{column - 3}} {meaning}".rstrip()
    return textwrap.fill(line, width, subsequent_indent=" " * column, break_on_hyphens=False)


def settings(schema: Any, values: Any = None, prefix: str = "") -> Iterator[Setting]:
    """Yield each setting of a dataclass and of nested dataclasses. The default is the value in `values`, if given."""
    comments = dict(FIELD.findall(inspect.getsource(schema)))
    for item in fields(schema):
        key, value = prefix + item.name, item.default if values is None else getattr(values, item.name)
        group: Any = next(filter(is_dataclass, (item.type, *get_args(item.type))), None)
        if group is not None:
            yield from settings(group, value if isinstance(value, group) else None, f"{key}.")
            continue
        if value is MISSING:
            value = REQUIRED if item.default_factory is MISSING else item.default_factory()
        yield Setting(key, item.type, value, comments.get(item.name, ""))
