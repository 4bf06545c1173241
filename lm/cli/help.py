"""What --help prints of a command: its docstring, an example, its groups, and a line for each setting."""

import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lm.cli.compose import compose
from lm.cli.main import command_prefix
from lm.cli.mistakes import CONFIGS
from lm.cli.recipe import RECIPES
from lm.config import RunConfig
from lm.system.terminal import to_override_value

GROUPS = {
    "train": ("model", "head", "data", "tokenizer", "optim", "trainer", "logger", "experiment"),
    "ablate": ("ablation",),
    "evaluate": ("data",),
}
USUAL = (  # settings of train
    *("run_dir", "seed", "trainer.max_steps", "data.path", "data.seq_len", "data.batch_size"),
    *("tokenizer.vocab_size", "model.n_layers", "model.d_model", "optim.lr"),
)
EXAMPLES = {
    "train": "my.txt trainer.max_steps=400 run_dir=runs/mine",
    "ablate": "model.dropout=0,0.1 my.txt output_dir=ablations/mine",
    "evaluate": "run_dir=runs/mine data=text data.path=other.txt",
    "generate": 'run_dir=runs/mine "prompt=To be, or not" temperature=0.8',
}
REQUIRED = "VALUE"  # in the place of a default
FIELD = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)  # of a dataclass, with the comment behind it


class Setting(NamedTuple):
    key: str
    kind: Any  # its type
    default: Any  # REQUIRED where there is none
    meaning: str  # the comment behind the field; may be empty


def help_text(command: str, docstring: str, schema: Any, args: Sequence[str]) -> str:
    """What --help prints. Of the arguments, --config-dir counts: its choices are listed too."""
    start = shlex.join(command_prefix(command))
    parts = [re.sub(r"lm-lab (\w+)", lambda match: shlex.join(command_prefix(match[1])), docstring.strip())]
    if command in EXAMPLES:
        parts.append(f"Example: {start} {EXAMPLES[command]}")
    if command in GROUPS:
        folders = [CONFIGS, *(Path(folder) for flag, folder in pairwise(args) if flag in ("--config-dir", "-cd"))]
        choices = {
            group: sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
            for group in GROUPS[command]
        }
        parts.append("Groups, each chosen by group=name:")
        parts.append("\n".join(f"  {group}: {', '.join(names)}" for group, names in choices.items()))
    values = compose("train", [], RunConfig) if schema is RunConfig else None
    lines = {setting.key: _line(setting) for setting in settings(schema, values)}
    if command == "train":
        parts.append("A text of your own is trained by a recipe that suits its size, unless experiment= names another:")
        sizes = [f"  up to {most / 1e3:,.0f} kB: experiment={name}" for most, name in RECIPES]
        parts.append("\n".join([*sizes, "  larger texts: experiment=none, the default run"]))
        parts.append("Settings, each changed by key=value, here with its default. Those that are changed most:")
        parts.append("\n".join(lines.pop(key) for key in USUAL))
        parts.append(f"All others ({start} --cfg job shows them as they are with the choices and settings behind it):")
    else:
        parts.append("Settings, each changed by key=value, here with its default:")
    return "\n\n".join([*parts, "\n".join(lines.values())])


def _line(setting: Setting) -> str:
    line = f"{f'  {setting.key}={to_override_value(setting.default)}':39} {setting.meaning}"
    return textwrap.fill(line.rstrip(), 120, subsequent_indent=" " * 40, break_on_hyphens=False)


def settings(schema: Any, values: Any = None, prefix: str = "") -> Iterator[Setting]:
    """Each setting of a dataclass, those of nested ones too. The default is the value in `values`, if that is given."""
    comments = {name: text for cls in schema.__mro__[:-1] for name, text in FIELD.findall(inspect.getsource(cls))}
    for field in fields(schema):
        key, value = prefix + field.name, field.default if values is None else getattr(values, field.name)
        group: Any = next((kind for kind in (field.type, *get_args(field.type)) if is_dataclass(kind)), None)
        if group is not None:
            yield from settings(group, value if isinstance(value, group) else None, f"{key}.")
            continue
        if value is MISSING:
            value = REQUIRED if field.default_factory is MISSING else field.default_factory()
        yield Setting(key, field.type, value, comments.get(field.name, ""))
