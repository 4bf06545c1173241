"""The recipe of a text: by its size, `experiment=NAME` in front of what is typed.

A recipe is a YAML file of configs/experiment/. It is chosen before Hydra composes, so that a sweep, --cfg job, the hash
of a run and a resume see an ordinary override. docs/own-text.md has what each recipe reaches.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lm.cli.compose import composing
from lm.cli.mistakes import CONFIGS
from lm.config import DataConfig, RunConfig, UserError
from lm.config.checks import expanded, without_secrets
from lm.config.data import RECIPES, default_cache, recipe_of
from lm.config.identity import key_of
from lm.data.paths import BLOCK, COMPRESSED, SUFFIXES, downloaded, is_url, local_files, open_file, reading_from
from lm.system.terminal import to_override_value

MIN_CHARACTERS = 2_000  # a page of text, of which a tenth is held out
KINDS = ("text", "json", "csv", "parquet")  # of data: the user's own files
TRIALS = ("debug", "overfit")  # trainers for a few steps on any text
# What a typed choice of a group replaces: the recipe's choice and settings of these groups. The learning rates of a
# recipe and the scales of its head suit tokens of its own kind.
REPLACED = {"model": ("model",), "head": ("head",), "optim": ("optim",), "tokenizer": ("tokenizer", "head", "optim")}
notes: list[str] = []  # what is read, and what has been chosen: `tell` says it when the command has been understood
log = logging.getLogger(__name__)
Values = Mapping[str, Sequence[Any]]  # those that an override gives its key, several in a sweep


def with_recipe(overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Overrides of train, in Hydra's grammar, with the recipe of their text in front if they choose none.

    Groups that are typed replace those of the recipe, also of one that is typed; their files may be in a folder of the
    user's own, `config_dir`. Raises UserError for a sweep over texts whose recipes differ.
    """
    notes.clear()
    if not {*map(key_of, overrides)} & {"data", "experiment"}:
        return [*overrides]
    typed = values_of(overrides)
    chosen = [] if _is_decided(typed) else _recipe_of_texts(typed)
    names = chosen or [str(name) for name in typed.get("experiment", [])]
    added, own = replacing(names, typed, config_dir), _set_by_all(names)
    groups = [key for key in REPLACED if key in own.keys() & typed.keys() and [*typed[key]] != [own[key]]]
    if replaced := dict.fromkeys([*groups, *map(key_of, added)]):
        notes.append(f"experiment={','.join(names)}: what is typed replaces {', '.join(replaced)}")
    return [*(f"experiment={name}" for name in chosen), *added, *overrides]


def tell(data: DataConfig | None = None) -> None:
    """Say what was chosen, once; and first which text is read, before the imports that take seconds."""
    if data is not None and not any(note.startswith("reading ") for note in notes):
        path = without_secrets(data.path or "the source of Python's standard library")
        log.info("reading %s", f"{path} ({_in_words(os.path.getsize(path))})" if os.path.isfile(path) else path)
    while notes:
        log.info(notes.pop(0))


def values_of(overrides: Sequence[str]) -> Values:
    """The values of each key: several in a sweep. A glob() over choices stays one."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString

    values = dict[str, list[Any]]()
    for entry in OverridesParser.create().parse_overrides(list(overrides)):
        value = entry.value()
        if isinstance(value, ChoiceSweep):
            swept = [item.text if isinstance(item, QuotedString) else item for item in value.list]
        elif entry.is_sweep_override() and not isinstance(value, Glob):
            swept = [*entry.sweep_string_iterator()]
        else:
            swept = [value]  # type: ignore[list-item]  # a Glob
        if not entry.is_delete():
            values[entry.key_or_group] = swept
    return values


def _is_decided(typed: Values) -> bool:
    """Whether there is no text of the user's own, or the settings say how to train on it, or are not known yet."""
    is_own = {*map(str, typed.get("data", ["none"]))} <= {*KINDS} and "data.path" in typed
    is_trial = bool({*map(str, typed.get("trainer", []))} & {*TRIALS})
    is_open = any("${" in str(path) for path in typed.get("data.path", []))
    is_open |= not all(isinstance(most, int | float | None) for most in typed.get("data.max_bytes", []))
    run_dir = expanded(str(typed.get("run_dir", [None])[0] or os.devnull), "run_dir")
    has_run = os.path.exists(f"{run_dir}/config.yaml")  # which has settings of its own
    decided = {"experiment", "init_from", "data.overfit_batches"}
    return not is_own or is_trial or is_open or has_run or bool(typed.keys() & decided)


def _recipe_of_texts(typed: Values) -> list[str]:
    """The recipe of the texts that are typed."""
    texts = [*product(typed["data"], typed["data.path"], typed.get("data.max_bytes", [None]))]
    column = str(typed.get("data.column", ["text"])[0])
    cache = str(typed.get("data.cache_dir", [default_cache()])[0])
    try:
        sizes = {
            str(path): [min(size, most or inf) for size in text_size(str(path), str(kind), column, cache)]
            for kind, path, most in texts
        }
    except UserError as error:
        if any(os.path.exists(str(path)) for _, path, _ in texts):
            raise
        raise UserError(f"{error}; run_dir=RUN shows a finished run without its text") from error
    for path, (_, length) in sizes.items():
        if length < MIN_CHARACTERS:
            advice = "; experiment=none tokenizer=char trains on it all the same" if length > MIN_CHARACTERS / 2 else ""
            raise UserError(f"data.path={path}: has {length:,} characters, expected {MIN_CHARACTERS:,} or more{advice}")
    recipes = {path: recipe_of(size) for path, (size, _) in sizes.items()}
    if len({*recipes.values()}) > 1:
        listed = ", ".join(f"{path} experiment={name}" for path, name in recipes.items())
        raise UserError(f"data.path: these texts have different recipes ({listed}); give experiment=NAME for all")
    for path, (size, _) in sizes.items():
        tokenizers = typed.get("tokenizer", [_set_by(recipes[path]).get("tokenizer")])
        advice = "; as GGUF: experiment=bpe_300k" if "char" in tokenizers else ""
        notes.append(f"reading {path} ({_in_words(size)}): experiment={recipes[path]}{advice}")
    return [next(iter(recipes.values()))]


def _in_words(size: float) -> str:
    return f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def text_size(path: str, kind: str, column: str = "text", cache: str | None = None) -> tuple[int, int]:
    """The bytes of a text, decompressed and of a local table those of a column, and its characters in UTF-8.

    Both as far as they decide its recipe: the file at which they do is the last that is read.
    """
    n_bytes, n_characters = 0, 0
    path = path if is_url(path) else expanded(path, "data.path")
    urls = [downloaded(path, DataConfig(cache_dir=cache or default_cache()).cache)] if is_url(path) else []
    files = urls or local_files(path, SUFFIXES.get(kind, ())).values()
    for file in files:
        if kind == "text" and not file.name.lower().endswith(COMPRESSED):
            n_bytes += file.stat().st_size
            if n_characters < MIN_CHARACTERS:
                with file.open("rb") as content:
                    n_characters += _characters(content.read(4 * MIN_CHARACTERS))
            continue
        with reading_from(str(file), kind):
            for piece in _pieces(file, kind, column):
                n_bytes, n_characters = n_bytes + len(piece), n_characters + _characters(piece)
                if n_bytes > RECIPES[-1][0]:
                    return n_bytes, n_characters
    return n_bytes, n_characters


def _characters(text: bytes) -> int:
    return len(text.translate(None, bytes(range(0x80, 0xC0))))  # without the bytes that go on with one in UTF-8


def _pieces(file: Path, kind: str, column: str) -> Iterator[bytes]:
    from lm.lab.sources.tables import READERS, cells_in, documents_of

    if kind in READERS:
        yield from (text for _, (text,) in documents_of(cells_in(file, kind, column), column))
        return
    with open_file(file) as content:
        while block := content.read(BLOCK):
            yield block


def replacing(names: Sequence[str], typed: Values, config_dir: str | None = None) -> list[str]:
    """Overrides by which typed groups replace what recipes choose and set, and the groups that depend on them."""
    own = _set_by_all(names)
    others = [  # choices that are not the recipe's own; {key: value} changes a group, and chooses none
        group
        for group, values in typed.items()
        if group in REPLACED and all(isinstance(value, str) for value in values) and [*values] != [own.get(group)]
    ]
    replaced = {group for by in others for group in REPLACED[by]}
    changed = {key for key in own.keys() - typed.keys() if key.partition(".")[0] in replaced}
    if not changed:
        return []
    entries = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
    defaults = {group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()}
    choices = {group: typed.get(group, [defaults[group]]) for group in sorted(replaced)}
    for group in {key.partition(".")[0] for key in changed - replaced}:
        if len(choices[group]) > 1:
            several = f"{group}={','.join(map(str, choices[group]))}"
            advice = "experiment=none compares them without it; so does lm-lab ablate, each with its own"
            raise UserError(f"{several}: experiment={','.join(names)} has settings of its own there; {advice}")
    words = [f"{group}={values[0]}" for group, values in choices.items()]
    words += [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"] if config_dir else []
    with composing("train", words, RunConfig) as (config, _):
        values = {key: OmegaConf.select(config, key) for key in sorted(changed - replaced)}
    return [
        *(f"{group}={choices[group][0]}" for group in sorted(changed & replaced)),
        *(f"{key}={to_override_value(value)}" for key, value in values.items()),
    ]


def _file(experiment: str) -> Path:
    return CONFIGS / "experiment" / f"{experiment}.yaml"


def _set_by_all(experiments: Sequence[str]) -> dict[str, Any]:
    return {key: value for name in experiments if _file(name).is_file() for key, value in _set_by(name).items()}


def _set_by(experiment: str) -> dict[str, Any]:
    """What an experiment chooses of each group, and the settings that it has, with those that it is based on."""
    content = yaml.safe_load(_file(experiment).read_text()) or {}
    own = dict[str, Any]()
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            own |= {key.rpartition("/")[2]: choice for key, choice in entry.items()}  # override /head
        elif entry != "_self_":
            own |= _set_by(entry)
    groups = {group: values for group, values in content.items() if isinstance(values, dict)}
    return own | {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
