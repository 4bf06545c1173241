"""What --help prints of a command: its docstring, an example, its groups, and a line for each setting."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lm.cli import command_line
from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.config import RunConfig
from lm.config.data import RECIPES
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
MEANINGS = {  # on the choices of train that are made most, which its --help lists first
    "model": {"small": "minutes on a CPU", "medium": "10 M, for a GPU", "gpt2": "124 M"},
    "head": {"tied": "one matrix in and out", "untied": "two"},
    "data": {"text": "a file", "stdlib": "Python's own source", "csv": "a table", "json": "", "hub": "a data set"},
    "tokenizer": {"bpe": "parts of words", "char": "", "byte": "", "file": "a tokenizer.json"},
    "optim": {"muon": "", "adamw": "", "muon_short": "few steps", "muon_continue": "with init_from"},
    "trainer": {"auto": "", "cpu": "", "gpu": "", "debug": "20 steps", "overfit": "one batch"},
    "logger": {"none": "metrics.csv alone", "tensorboard": "", "wandb": ""},
    "experiment": {"chars_10k": "", "chars_100k": "", "bpe_300k": "", "bpe_1m": "up to 2 MB", "none": "larger"},
}
SCREEN = 80  # columns
REQUIRED = "VALUE"  # in the place of a default
FIELD = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)  # of a dataclass, with the comment behind it


class Setting(NamedTuple):
    key: str
    kind: Any  # its type
    default: Any  # REQUIRED where there is none
    meaning: str  # the comment behind the field; may be empty


def help_text(command: str, docstring: str, schema: Any, args: Sequence[str]) -> str:
    """What --help prints, of train a screen unless `all` is asked. With --config-dir its choices are listed too."""
    start = command_line(command)
    choices = _choices(command, args)
    values = compose("train", [], RunConfig) if schema is RunConfig else None
    every = {setting.key: setting for setting in settings(schema, values)}
    if command == "train":
        screen = [*_screen(start, choices, [every.pop(key) for key in USUAL])]
        if "all" not in args:
            return "\n".join(map(_cut, screen))
        sizes = ", ".join(f"up to {most / 1e3:,.0f} kB {name}" for most, name in RECIPES)
        parts = ["\n".join(screen), f"The experiment by the size of a text: {sizes}, and none above."]
        parts += [f"Further settings ({start} --cfg job shows them as they are with these choices):"]
    else:
        parts = [re.sub(r"lm-lab (\w+)", lambda match: command_line(match[1]), docstring.strip())]
        parts += [f"Example: {start} {EXAMPLES[command]}"] if command in EXAMPLES else []
        listed = [f"  {group}: {', '.join(names)}" for group, names in choices.items()]
        parts += ["Groups, each chosen by group=name:", "\n".join(listed)] if listed else []
        parts.append("Settings, each changed by key=value, here with its default:")
    return "\n\n".join([*parts, "\n".join(map(_line, every.values()))])


def _choices(command: str, args: Sequence[str]) -> dict[str, list[str]]:
    folders = [CONFIGS, *(Path(folder) for flag, folder in pairwise(args) if flag in ("--config-dir", "-cd"))]
    return {
        group: sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
        for group in GROUPS.get(command, ())
    }


def _screen(start: str, choices: Mapping[str, Sequence[str]], usual: Sequence[Setting]) -> Iterator[str]:
    """The lines of train's --help: the settings that are changed most, and the groups, their usual choices first."""
    yield f"Train one run: {start} [TEXT] [group=choice] [key=value ...]"
    yield "TEXT is a file, folder, glob or address; its size chooses the experiment. The"
    yield "same command resumes or shows its run; -m head=tied,untied seed=0,1 makes four."
    yield f"Example: {start} {EXAMPLES['train']}"
    yield "Settings, by key=value, with defaults, and groups; --help all has the rest:"
    for key, _, value, meaning in usual:
        yield f"{f'  {key}={to_override_value(value)}':28} {meaning}"
    for group, names in choices.items():
        words = MEANINGS[group]
        ordered = [*words, *(name for name in names if name not in words)]
        yield f"  {group}: {', '.join(f'{name} ({words[name]})' if words.get(name) else name for name in ordered)}"


def _cut(line: str) -> str:
    return line if len(line) <= SCREEN else f"{line[: SCREEN - 3].rpartition(' ')[0]} ..."


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
