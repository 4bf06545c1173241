"""From words to a question: of a line, a YAML file or a finished ablation, and the configurations of its arms.

    lm-lab ablate model.dropout=0,0.2 my.txt

The first value is the baseline. The question is written as a YAML file into the folder of its answer, to be edited.
Imports no torch.
"""

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lm.cli import command_line
from lm.cli.arguments import (
    PATHS,
    Words,
    classify,
    for_hydra,
    is_completion,
    key_of,
    kinds_of,
    quoted,
    recipe_for,
    takes_list,
    unknown_key,
    with_text,
)
from lm.cli.compose import LOADED, compose, explaining
from lm.config import TYPED_LENGTHS, DataConfig, RunConfig, check_init, flat, literal
from lm.data.paths import as_started
from lm.errors import UserError, error_prefix, reading, require, without_secrets
from lm.lab.ablation.folder import AblationRecord, RunReader, by_key, read_record, sibling
from lm.lab.ablation.question import AGAIN, LONGEST, MIN_SEEDS, SEED, AblateConfig, Question
from lm.system.files import json_sha256, write_text
from lm.system.terminal import to_override_value

SEEDS = 5
SHORT = {"margin": "equivalence_margin", "seeds": "seeds", "tune": "tune", "folds": "folds"}  # names in a line
OWN, TRAIN = kinds_of(AblateConfig) | {"ablation.overrides": list[str]}, kinds_of(RunConfig)
IN_A_LINE = {name: OWN[f"ablation.{key}"] for name, key in SHORT.items()}
FRESH = 100  # added to the seeds of a confirmation, or the largest seed plus 1 if a seed is above 99
QuestionFile = dict[str, Any]  # the content of a file of configs/ablation
Compose = Callable[[list[str]], RunConfig]  # overrides of train to a configuration
RESERVED = {
    "seed": "the seeds of an ablation are given as in seeds=5 or 'seeds=[1,2,3]'",
    "run_dir": "each run of an ablation has a directory of its own below output_dir",
    "max_minutes": "paired runs make equal steps; trainer.max_steps=N is their length",
    "checkpoint.patience": "paired runs make equal steps; checkpoint.best=true keeps the best model of a whole run",
}
SET_BY_BUDGET = "an arm trains as long as its budget allows; it may stand among the overrides of all arms"
OF_TEXT = ("data.", "tokenizer.")  # settings that choose what is read and scored

IN_A_FILE = "docs/ablations.md shows questions in a file"


# --- the words of a command


def question_words(args: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments for Hydra, and whether a line is the question. Raises UserError.

    Settings of train become a list, the setting `overrides`.
    """
    if is_completion(args):
        return [*args], False
    words = classify(args, TRAIN | OWN | IN_A_LINE)
    if {"-m", "--multirun"} & {*words.flags}:
        raise UserError("-m: an ablation is a sweep already; list its values as arms and seeds")
    if typed := next((word for word in words.overrides if key_of(word) == "overrides"), None):
        raise UserError(f"{typed}: expected each setting of all arms by itself, as in optim.lr=0.01")
    files = [word for word in words.bare if is_question(word)]
    texts = [word for word in words.bare if word not in files]
    own = [_with_one_value(long_name(word)) for word in words.overrides if _is_own(word)]
    names_question = any(key_of(word) == "ablation" for word in own)
    train = with_text(Words([], [word for word in words.overrides if not _is_own(word)], texts))
    if typed := next((word for word in train if key_of(word) == "seed"), None):
        raise UserError(f"{typed}: expected no such setting; {RESERVED['seed']}")
    changes = [word for word in train if len(values_of(for_hydra(word, TRAIN, is_sweep=True))) > 1]
    chosen, is_line = list[str](), False
    if any(key_of(word) == "confirm" for word in own):
        if train or files:
            raise UserError(
                f"{' '.join([*files, *train])}: confirm asks a question as it was, expected no settings of train"
            )
        chosen, own = _confirm(own)
    elif files:
        if len(files) > 1 or names_question:
            raise UserError(f"{files[-1]}: is a second question, expected one")
        chosen = choose(read_question(Path(files[0])), Path(files[0]).stem)
    elif changes and not names_question:
        if len(changes) > 1:
            advice = "a line compares one; in a YAML file each arm may have several (docs/ablations.md)"
            raise UserError(f"{' '.join(changes)}: several settings with several values; {advice}")
        if several := next((word for word in own if re.match(r"[~+]*ablation\.(arms|overrides)\b", word)), None):
            raise UserError(f"{several}: a line has its own arms and settings; write a YAML file for others")
        recipe = recipe_for(train, is_sweep=True)
        question = question_in_a_line(for_hydra(changes[0], TRAIN, is_sweep=True))
        chosen = choose(_as_file(question), question["name"])
        train = [*([f"experiment={recipe}"] if recipe else []), *(word for word in train if word not in changes)]
        is_line, changes = True, []
    if changes:
        raise UserError(f"{changes[0]}: several values beside a question, expected one; alone they are a question")
    if not chosen and not names_question and not {"--cfg", "-c", "--info", "--hydra-help", "-sc"} & {*words.flags}:
        raise UserError(_no_question(train, texts))
    of_all = ",".join(quoted(literal(for_hydra(word, TRAIN))) for word in train)
    return [*words.flags, *chosen, *(for_hydra(word, OWN) for word in own), f"overrides=[{of_all}]"], is_line


def _is_own(word: str) -> bool:
    group = re.split("[.@/]", key_of(word))[0]
    return group in OWN or group in IN_A_LINE or group == "hydra"


def _with_one_value(word: str) -> str:
    """Return a setting of the question. Several values make one list, as in seeds=0,1,2.

    Raises UserError for several values of a setting that is no list.
    """
    values = values_of(for_hydra(word, OWN, is_sweep=True))
    kind = OWN.get(key_of(word))
    if len(values) > 1 and (kind is Any or takes_list(kind)):  # seeds are a number, or a list
        return f"{key_of(word)}=[{','.join(map(to_override_value, values))}]"
    require(len(values) == 1, word, "one value; the values of a comparison belong to a setting of train")
    return word


def _no_question(train: Sequence[str], texts: Sequence[str]) -> str:
    aside = ("data", "threads", "trainer")
    if single := [word for word in train if "=" in word and key_of(word).split(".")[0] not in aside]:
        return f"{single[0]}: one value is no question; type two or more, as in {single[0]},OTHER; {IN_A_FILE}"
    line = command_line("ablate", "head=tied,untied", *texts)
    short = command_line("ablate", "ablation=smoke")
    return f"ablation: no question is given; type {line}, or {short} for a first look; {IN_A_FILE}"


def _confirm(own: list[str]) -> tuple[list[str], list[str]]:
    """Return the overrides that ask a finished question on fresh seeds, and the other words."""
    folders = {key_of(word): Path(word.partition("=")[2]).expanduser() for word in own}
    if any(key_of(word).startswith("ablation") for word in own):
        expected = "no seeds, margin or tune, which the first question takes"
        raise UserError(f"confirm={folders['confirm']}: asks a question as it was, expected {expected}")
    folder = folders.get("output_dir", sibling(folders["confirm"], "confirm"))
    if folder.resolve() == folders["confirm"].resolve():
        raise UserError(f"output_dir={folder}: holds the ablation that is to be confirmed; name another folder")
    rest = [word for word in own if key_of(word) != "output_dir"]
    question = confirmation(folders["confirm"])
    return [*choose(_as_file(question), question["name"]), f"output_dir={quoted(str(folder))}"], rest


# --- a question in a line


def question_in_a_line(change: str) -> QuestionFile:
    """Return the question of a setting with several values, in Hydra's grammar. Raises UserError."""
    require("=" in change, change, "a setting with its values, as in model.dropout=0,0.1")
    key, values = key_of(change), [to_override_value(value) for value in values_of(change)]
    if len({*values}) < max(2, len(values)):
        raise UserError(f"{change}: expected different values, two or more, as in {key}=VALUE,VALUE")
    label = key.rpartition(".")[2]
    words = [re.sub(r"[^\w.-]+", "_", value) for value in values]
    names = [(word if "." not in key else f"{label}-{word}")[-LONGEST:] for word in words]
    names = [name.lstrip("_.-") or name for name in names]
    if len({*names}) < len(names):
        names = [f"{label}-{number}" for number in range(len(values))]
    arms = {name: [f"{key}={value}"] for name, value in zip(names, values, strict=True)}
    name = "-".join([label, *words])
    return {
        "name": name if len(name) <= LONGEST else f"{label}-{json_sha256(arms)[:8]}",
        "question": f"Which is better, {' or '.join(f'{label}={value}' for value in values)}?",
        "arms": arms,
        "baseline": next(iter(arms)),
        "seeds": SEEDS,
        "metric": "val_bpb" if key.startswith("tokenizer") else "val_loss",
    }


def long_name(word: str) -> str:
    """Return a short setting of a question under the name that it has in a file.

    >>> long_name("seeds=3"), long_name("margin=0.1"), long_name("workers=2")
    ('ablation.seeds=3', 'ablation.equivalence_margin=0.1', 'workers=2')
    """
    key, equals, value = word.removeprefix("ablation.").partition("=")
    return f"ablation.{SHORT[key]}{equals}{value}" if key in SHORT else word


def values_of(override: str) -> list[Any]:
    """Return the values of an override in Hydra's grammar, several in a sweep. A glob() stays one value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString

    with explaining([override]):
        (entry,) = OverridesParser.create().parse_overrides([override])
    value = entry.value()
    if isinstance(value, ChoiceSweep):
        return [item.text if isinstance(item, QuotedString) else item for item in value.list]
    if entry.is_sweep_override() and not isinstance(value, Glob):
        return [*entry.sweep_string_iterator()]
    return [value]


# --- a question in a file


def is_question(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and Path(word).is_file()


def read_question(path: Path) -> QuestionFile:
    """Return the question of a YAML file, under the names of Question. Raises UserError that names the file."""
    with reading(path, "a question in YAML"):
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        require(isinstance(content, dict), "its content", "keys with values, such as question, arms and seeds")
        have_names = isinstance(content.get("arms", {}), dict)
        require(have_names, "arms", "a name for each arm with its settings, as in {wide: model.d_ff=512}")
        content = {SHORT.get(key, key): value for key, value in content.items()}
        schema, kinds = OmegaConf.structured(Question), kinds_of(Question)
        for key, value in content.items():
            if key not in kinds:
                raise UserError(unknown_key(str(key), kinds))
            with explaining([]):
                schema[key] = value  # OmegaConf checks the type
        for key in ("question", "arms", "baseline", "seeds"):
            require(key in content, f"{key}: is missing", "question, arms, baseline and seeds")
        return content


def choose(content: QuestionFile, name: str) -> list[str]:
    """Return the overrides of ablate that ask the question of a file, which Hydra gets to know."""
    ConfigStore.instance().store(LOADED, content, "ablation")
    return [f"ablation={LOADED}", f"ablation.name={quoted(name)}"]


def _as_file(question: QuestionFile) -> QuestionFile:
    """Return a question as a file of configs/ablation has it. A ${key} is for a run, which is composed later."""
    arms = {arm: [*map(literal, overrides)] for arm, overrides in question["arms"].items()}
    return question | {"arms": arms, "overrides": [*map(literal, question.get("overrides", []))]}


def _content_of(path: Path) -> Any:
    """Return the content of a file that a person may have edited, or None if the file is no YAML."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OSError, ValueError):
        return None


def write_question(question: Question, overrides: Sequence[str], folder: Path) -> Path:
    """Write the question as a file that `ablate FILE` asks, beside its answer. A file of another content stays.

    `overrides` are the settings of all arms that were typed.
    """
    question = replace(question, overrides=[*question.overrides, *overrides])
    required = {key: getattr(question, key) for key in ("question", "arms", "baseline", "seeds")}
    plain = asdict(Question(name=question.name, **required))
    changed = {key: value for key, value in asdict(question).items() if value != plain[key]}
    content = {key: without_secrets(value) for key, value in _as_file(required | changed).items()}
    path = folder / f"{question.name}.yaml"
    if path.exists() and _content_of(path) != content:
        path = path.with_stem(f"{path.stem}-{json_sha256(content)[:4]}")
    if not path.exists():
        words = ["lm-lab", "ablate", str(path), f"output_dir={folder}"]
        head = f"# {shlex.join(words)}\n# An edited question needs another output_dir.\n"
        head += "# A line `tune: learning_rate` scores each arm at its own best learning rate.\n"
        write_text(path, head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
    return path


# --- confirmation


def confirmation(source: Path) -> QuestionFile:
    """Return the question of a finished ablation on fresh seeds, and on other parts of the text.

    The primary comparisons are asked again, each arm tuned anew. Pairs hold out parts that have not been used; if there
    are too few, they hold out parts that are shifted by half a part. Raises UserError if the folder holds no finished
    ablation.
    """
    record = read_record(source, "confirm")
    question = record.question
    reader = RunReader(source)
    if not record.runs or len(reader.ended(record.runs)) < len(record.runs):
        raise UserError(f"confirm={source}: has not ended; the same command as before continues it")
    pairs = question.pairs()
    needed = {question.baseline, *(name for arm in question.primary_arms() for name in (arm, pairs[arm]))}
    arms = {
        arm: [_from_source(record, source, word) for word in own.overrides]
        for arm, own in record.arms.items()
        if arm in needed
    }
    shift = max(FRESH, 1 + max(record.seeds) + max(question.seed_offsets.values(), default=0))
    seeds, first_fold = [seed + shift for seed in question.seeds], 0.0
    if question.folds:
        n_folds = DataConfig(val_fraction=record.arms[question.baseline].settings["data.val_fraction"]).n_folds
        used = {run.seed for run in record.runs} | {int(row["seed"]) for row in reader.rows.values()}
        last = max(record.seeds.index(seed) for seed in used)  # the place of a seed is its part of the text
        first_fold = math.ceil(question.first_fold) + last + 1.0  # parts that have not been used
        if first_fold + len(seeds) > n_folds:
            first_fold = 0.0 if question.first_fold % 1 else 0.5
            seeds = seeds[: n_folds - math.ceil(first_fold)]
            left = f"confirm={source}: {n_folds} parts of the text leave {len(seeds)} for fresh pairs"
            anew = "3 or more; ask the question again with other seeds, a smaller data.val_fraction and output_dir"
            require(len(seeds) >= MIN_SEEDS, left, anew)
    asked: QuestionFile = asdict(question)
    for key in ("match_parameters", "seed_offsets", "baselines"):
        asked[key] = {arm: value for arm, value in asked[key].items() if arm in arms}
    return asked | {
        "name": f"{question.name[:32]}-confirm",
        "question": f"{AGAIN}{question.question.removeprefix(AGAIN)}",
        "arms": arms,
        "contrasts": {},
        "looks": [],
        "seeds": seeds,
        "first_fold": first_fold,
        "overrides": [_from_source(record, source, word) for word in record.common()],
    }


def _from_source(record: AblationRecord, source: Path, word: str) -> str:
    """Return an override whose path leads to the file that the ablation of a folder has read."""
    if (key := key_of(word)) not in PATHS or SEED in word:
        return word
    (path,) = values_of(for_hydra(word, TRAIN))
    return f"{key}={quoted(as_started(source, record.started_in, str(path)))}"


# --- the configurations of the arms


def compose_question(config: AblateConfig) -> tuple[AblateConfig, dict[str, RunConfig]]:
    """Return the question with its folds settled, and the configuration of each arm."""
    runs = compose_arms(config.ablation, config.overrides)
    return replace(config, ablation=with_folds(config.ablation, runs)), runs


def compose_run(words: Sequence[str]) -> RunConfig:
    """Return the configuration of settings of train as they are typed: 2024_01 is a path, and no number."""
    run: RunConfig = compose("train", [for_hydra(word, TRAIN) for word in words], RunConfig)
    return run


def compose_arms(question: Question, typed: list[str], compose: Compose = compose_run) -> dict[str, RunConfig]:
    """Return the configuration of every arm; the overrides that were `typed` change them all.

    The init_from of an arm may hold {seed}; model and tokenizer are then those of its first seed. Raises UserError
    naming the arm or override to blame. It comes before torch is imported.
    """
    common = by_key([*question.overrides, *typed])
    runs: dict[str, RunConfig] = {}
    for name, overrides in question.arms.items():
        own = by_key(overrides)
        with error_prefix(f"ablation.arms.{name}"):
            for key, override in own.items():
                if key in by_key(typed):
                    raise UserError(f"{override}: is what this arm is about; leave {common[key]} out")
            words = common | own
            for key, word in words.items():
                require(SEED not in word or key == "init_from", word, f"{SEED} in init_from alone")
            first = question.seed_of(name, question.seeds[0])
            run = compose([word.replace(SEED, str(first)) for word in words.values()])
            check_init(run)
            if SEED in (word := words.get("init_from", "")):
                run = replace(run, init_from=str(values_of(for_hydra(word, TRAIN))[0]))
            runs[name] = run
    settings = {name: flat(asdict(run)) for name, run in runs.items()}
    lengths = {key: next(iter(settings.values()))[key] for key in TYPED_LENGTHS}  # of the first arm
    for name, values in settings.items():
        with error_prefix(f"ablation.arms.{name}"):
            for key, reason in RESERVED.items():
                require(not values[key], f"{key}={values[key]}", f"no such setting; {reason}")
            for key, length in lengths.items():
                require(values[key] == length, f"{key}={values[key]}", f"{length}; {SET_BY_BUDGET}")
    if (setting := question.tuned_setting) is not None:
        are_numbers = all(isinstance(values.get(setting, ""), float | None) for values in settings.values())
        is_fixed = setting in TYPED_LENGTHS or setting.startswith(OF_TEXT)  # values are compared at one length and text
        expected = "learning_rate, or a setting of train that takes any number and chooses neither length nor text"
        require(are_numbers and not is_fixed, f"ablation.tune={question.tune}", expected)
        is_set = any(values[setting] for values in settings.values())
        require(is_set, f"ablation.tune={question.tune}", "a setting that is neither null nor 0 in all arms")
    return runs


def with_folds(question: Question, runs: dict[str, RunConfig]) -> Question:
    """Return the question with folds if each pair can hold out a part of the text of its own."""
    texts = [run.data for run in runs.values()]
    has_own = any(data.val_path or data.val_split or data.source == "tokens" or data.fold is not None for data in texts)
    if has_own or any(run.init_from for run in runs.values()):  # a model that is continued may have read any part
        return replace(question, folds=False)
    return question
