"""The recipe of a text: by its size, `experiment=NAME` in front of what is typed.

A recipe is a YAML file of configs/experiment/. It is chosen before Hydra composes, so that a sweep, --cfg job, the hash
of a run and a resume see an ordinary override. docs/own-text.md has what each recipe reaches.
"""

import logging
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lm.cli.compose import composing
from lm.cli.mistakes import CONFIGS, key_of
from lm.config import RunConfig, UserError
from lm.data.paths import COMPRESSED, SUFFIXES, is_url, local_files
from lm.system.terminal import to_override_value

# Texts of at most so many bytes, and their recipe. Above the last, the default run.
RECIPES = ((20_000, "chars_10k"), (60_000, "chars_30k"), (1_000_000, "chars"))
MIN_BYTES = 2_000  # a page of text, of which a tenth is held out
KINDS = ("text", "json", "csv", "parquet")  # of data: the user's own files
TRIALS = ("debug", "overfit")  # trainers for a few steps on any text
# What a typed choice of a group replaces: the recipe's choice and settings of these groups. The learning rates of a
# recipe and the scales of its head suit tokens of its own kind.
REPLACED = {"model": ("model",), "head": ("head",), "optim": ("optim",), "tokenizer": ("tokenizer", "head", "optim")}
notes: list[str] = []  # what has been chosen, and why: `tell` says it when the command has been understood
log = logging.getLogger(__name__)
Values = Mapping[str, Sequence[Any]]  # those that an override gives its key, several in a sweep


def recipe_of(n_bytes: float) -> str:
    """The experiment that suits a text of so many bytes.

    >>> recipe_of(300_000), recipe_of(10**9)
    ('chars', 'none')
    """
    return next((name for most, name in RECIPES if n_bytes <= most), "none")


def with_recipe(overrides: Sequence[str]) -> list[str]:
    """Overrides of train, in Hydra's grammar, with the recipe of their text in front if they choose none.

    Groups that are typed replace those of the recipe, also of one that is typed. Raises UserError for a sweep over
    texts whose recipes differ.
    """
    notes.clear()
    typed = values_of(overrides)
    chosen = [] if _is_decided(typed) else [_recipe_of_texts(typed)]
    names = [str(name) for name in chosen or typed.get("experiment", []) if _file(str(name)).is_file()]
    added = replacing(names, typed)
    if added:
        notes.append(f"experiment={','.join(names)}: without its own {', '.join(map(key_of, added))}")
    return [*(f"experiment={name}" for name in chosen), *added, *overrides]


def tell() -> None:
    """Say what was chosen, once."""
    while notes:
        log.info(notes.pop(0))


def values_of(overrides: Sequence[str]) -> Values:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return {
        entry.key_or_group: [*entry.sweep_string_iterator()] if entry.is_sweep_override() else [entry.value()]
        for entry in parsed
        if not entry.is_delete()
    }


def _is_decided(typed: Values) -> bool:
    """Whether there is no text of the user's own, or the settings say how to train on it."""
    is_own = {*typed.get("data", ["none"])} <= {*KINDS} and "data.path" in typed
    is_trial = bool({*typed.get("trainer", [])} & {*TRIALS})
    return not is_own or is_trial or bool(typed.keys() & {"experiment", "init_from", "data.overfit_batches"})


def _recipe_of_texts(typed: Values) -> str:
    most = typed.get("data.max_bytes", [None])[0]
    kind = str(typed["data"][0])
    sizes = {str(path): min(bytes_of(str(path), kind), most or inf) for path in typed["data.path"]}
    for path, size in sizes.items():
        if size < MIN_BYTES:
            advice = "experiment=none trains on it all the same"
            raise UserError(
                f"data.path={path}: has {size:,.0f} bytes, expected {MIN_BYTES:,} characters or more; {advice}"
            )
    recipes = {path: recipe_of(size) for path, size in sizes.items()}
    if len({*recipes.values()}) > 1:
        listed = ", ".join(f"{path} experiment={name}" for path, name in recipes.items())
        raise UserError(f"data.path: these texts have different recipes ({listed}); give experiment=NAME for all")
    for path, size in sizes.items():
        shown = f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"
        notes.append(f"{path}: {shown}, so experiment={recipes[path]}")
    return next(iter(recipes.values()))


def bytes_of(path: str, kind: str) -> int:
    """The bytes of a text, decompressed, as far as they decide its recipe."""
    total, enough = 0, RECIPES[-1][0]
    files = [path] if is_url(path) else local_files(path, SUFFIXES.get(kind, ())).values()
    for file in files:
        if isinstance(file, Path) and not file.name.lower().endswith(COMPRESSED):
            total += file.stat().st_size
            continue
        from lm.data.tables import BLOCK, open_file, reading_from

        with reading_from(f"data.path={path}", kind), open_file(file) as content:
            while total <= enough and (block := content.read(BLOCK)):
                total += len(block)
    return total


def replacing(names: Sequence[str], typed: Values) -> list[str]:
    """Overrides by which typed groups replace what recipes choose and set, and the groups that depend on them."""
    replaced = {group for by, groups in REPLACED.items() if by in typed for group in groups}
    own = {key for name in names for key in _set_by(name) if key.partition(".")[0] in replaced}
    groups, settings = sorted(own & replaced - typed.keys()), sorted(own - replaced - typed.keys())
    if not (groups or settings):
        return []
    entries = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
    defaults = {group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()}
    choices = {group: typed.get(group, [defaults[group]]) for group in sorted(replaced)}
    for group in {key.partition(".")[0] for key in settings}:
        if len(choices[group]) > 1:
            several = f"{group}={','.join(map(str, choices[group]))}"
            raise UserError(f"{several}: experiment={','.join(names)} has settings of its own there; sweep without it")
    with composing("train", [f"{group}={values[0]}" for group, values in choices.items()], RunConfig) as (config, _):
        values = {key: OmegaConf.select(config, key) for key in settings}
    return [
        *(f"{group}={choices[group][0]}" for group in groups),
        *(f"{key}={to_override_value(value)}" for key, value in values.items()),
    ]


def _file(experiment: str) -> Path:
    return CONFIGS / "experiment" / f"{experiment}.yaml"


def _set_by(experiment: str) -> set[str]:
    """The groups of which an experiment makes a choice, and the keys that it sets, with those that it is based on."""
    content = yaml.safe_load(_file(experiment).read_text()) or {}
    own = set()
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            own |= {key.rpartition("/")[2] for key in entry}  # override /head
        elif entry != "_self_":
            own |= _set_by(entry)
    return own | {f"{group}.{key}" for group, values in content.items() if isinstance(values, dict) for key in values}
