"""A question: of a line, a YAML file or a finished ablation, and the configurations of its arms.

    lm-lab ablate model.dropout=0,0.2 my.txt

The first value is the baseline. The question is written as a YAML file into the folder of its answer, to be edited.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from lm.cli.arguments import key_of, kinds_of, wrong_value
from lm.cli.compose import LOADED, compose, explaining
from lm.config import RunConfig, check_init, flat
from lm.data.paths import check_paths
from lm.errors import UserError, error_prefix, reading, require, without_secrets
from lm.folder import TOKENIZER, read_base
from lm.lab.ablation.record import FILE, AblationRecord, design_of, question_of, read_record
from lm.lab.ablation.settings import MOST_SEEDS, SEED, AblationConfig
from lm.system.files import json_sha256, write_text
from lm.system.terminal import to_override_value
from lm.training.run_directory import LENGTH

SEEDS, MARGIN = 5, 0.01  # nats per token: 0.01 is one per cent of perplexity
MARGIN_HELP = "; 0.01 nats per token is 1 % of perplexity, and ablation=aa measures the noise"
SHORT = {"margin": "equivalence_margin"}  # what a question calls its settings in a line and in a file
FRESH = range(100, 1000)  # seeds of a confirmation
QuestionFile = dict[str, Any]  # the content of a file of configs/ablation
Compose = Callable[[list[str]], RunConfig]  # overrides of train.py to a configuration
RESERVED = {
    "seed": "the seeds of an ablation are ablation.seeds=[...]",
    "run_dir": "each run of an ablation has a directory of its own below output_dir",
    "checkpoint.patience": "paired runs make equal steps; checkpoint.best=true keeps the best model of a whole run",
}
SET_BY_BUDGET = "an arm trains as long as its budget allows; it may stand among the overrides of all arms"
NOT_OF_AN_ARM = RESERVED | dict.fromkeys(LENGTH, SET_BY_BUDGET)
TUNABLE = ("optim.", "head.", "model.")


def question_in_a_line(
    change: str,
    overrides: Sequence[str],
    seeds: int = SEEDS,
    margin: float = MARGIN,
    settings: Sequence[str] = (),
) -> QuestionFile:
    """The question of a setting with several values, in Hydra's grammar, and the overrides of all arms.

    `settings` are those of the question itself, such as margin=0.1 ablation.tune.trials=6. Of a text of the user's own,
    the recipe is chosen by its size. Raises UserError.
    """
    key, values = key_of(change), [to_override_value(value) for value in values_of(change)]
    if len({*values}) < max(2, len(values)):
        raise UserError(f"{change}: expected different values, two or more, as in {key}=VALUE,VALUE")
    label = key.rpartition(".")[2]
    names = [re.sub(r"[^\w.-]+", "_", value if "." not in key else f"{label}-{value}")[-40:] for value in values]
    if len({*names}) < len(names):
        names = [f"{label}-{number}" for number in range(len(values))]
    arms = {name: [f"{key}={value}"] for name, value in zip(names, values, strict=True)}
    question: Any = {
        "question": f"Which is better, {' or '.join(f'{label}={value}' for value in values)}?",
        "arms": arms,
        "baseline": next(iter(arms)),
        "seeds": seeds,
        "equivalence_margin": margin,
        "metric": "val_bpb" if key.startswith("tokenizer") else "val_loss",
        "overrides": [*overrides],
    }
    question = OmegaConf.create(question)
    for word in settings:
        setting, (value, *more) = key_of(word), values_of(word)
        if more:
            several = ",".join(map(str, (value, *more)))
            raise UserError(f"{setting}={several}: several values, expected one; a list is {setting}=[{several}]")
        name = setting.removeprefix("ablation.")
        OmegaConf.update(question, SHORT.get(name, name), value)
    question = OmegaConf.to_container(question, resolve=False)
    question["seeds"] = _seeds(question["seeds"])
    if isinstance(given := question["equivalence_margin"], str):
        raise UserError(wrong_value(f"margin={given}", {"margin": float}))
    question["equivalence_margin"] = float(given) if isinstance(given, int) else given  # the same name as in Python
    return {"name": f"{label}-{json_sha256(question)[:8]}", **question}


def values_of(override: str) -> list[Any]:
    """Return the values of an override in Hydra's grammar, several in a sweep. A glob() stays one value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString

    with explaining([override], {}):
        (entry,) = OverridesParser.create().parse_overrides([override])
    value = entry.value()
    if isinstance(value, ChoiceSweep):
        return [item.text if isinstance(item, QuotedString) else item for item in value.list]
    if entry.is_sweep_override() and not isinstance(value, Glob):
        return [*entry.sweep_string_iterator()]
    return [value]


def for_later(text: str) -> str:
    """Return text whose ${key} is left for a run, which is composed later."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def is_question(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and Path(word).is_file()


def read_question(path: Path, is_whole: bool = True) -> QuestionFile:
    """The question of a YAML file; a word where a list belongs is a list of one, seeds: 5 means 0 to 4.

    `is_whole`: nothing of it is typed elsewhere. Raises UserError with all that is wrong.
    """
    with reading(path, "a question in YAML"):
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(content, dict):
            raise UserError("expected keys with values, such as question, arms and seeds")
    schema: Any = OmegaConf.structured(AblationConfig)
    kinds, wrong = kinds_of(AblationConfig), list[str]()
    wrong += [f"{short}: is {key}, which is there too" for short, key in SHORT.items() if {short, key} <= {*content}]
    content = {SHORT.get(key, key): value for key, value in content.items()}
    for key, value in content.items():
        try:
            content[key] = _as_lists(kinds.get(key), _seeds(value) if key == "seeds" else value)
            with explaining([], kinds):
                schema = OmegaConf.merge(schema, {key: content[key]})
        except UserError as error:
            text = str(error).replace("=VALUE", "")
            wrong.append(text if text.startswith(key) else wrong_value(f"{key}={value!s:.40}", kinds))
    missing = [str(key) for key in OmegaConf.missing_keys(schema) if key not in ("name", *content)]
    wrong += [f"{key}: is missing{MARGIN_HELP if key == 'equivalence_margin' else ''}" for key in missing]
    try:
        schema.name = "any"
        OmegaConf.to_object(schema)
    except UserError as error:
        wrong.append(str(error).replace("ablation.", ""))
    except MissingMandatoryValue:
        pass
    if wrong and is_whole:
        raise UserError(f"{path}: {'; '.join(wrong)}")
    return dict(content)


def _seeds(value: Any) -> Any:
    """The seeds of a question, of a number the first so many. Raises UserError."""
    if type(value) in (int, float) and float(value).is_integer():
        return [*range(min(int(value), MOST_SEEDS + 1))]  # which is refused
    is_list = not isinstance(value, str | float | bool)
    require(is_list, f"seeds={value}", f"how many, as in seeds={SEEDS}, or a list of them")
    return value


def _as_lists(kind: Any, value: Any) -> Any:
    """A value of a file, with lists where its type has them."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is list and not isinstance(value, list | dict):
        return [] if value is None else [value]
    if origin is UnionType and value is not None:
        return _as_lists(kinds[0], value)
    if isinstance(value, dict) and (origin is dict or is_dataclass(kind)):
        of = kinds_of(kind) if is_dataclass(kind) else dict.fromkeys(value, kinds[1])
        return {key: _as_lists(of.get(key), item) for key, item in value.items()}
    return value


def choose(question: QuestionFile) -> list[str]:
    """The overrides of ablate that ask a question, which Hydra gets to know."""
    ConfigStore.instance().store(LOADED, _as_file(question), "ablation")
    return [f"ablation={LOADED}", f"ablation.name={question['name']}"]


def _as_file(question: QuestionFile) -> QuestionFile:
    """As a file of configs/ablation has it: ${key} is of a run, which is composed later."""
    return question | {"overrides": [for_later(override) for override in question["overrides"]]}


def write_question(question: QuestionFile, folder: Path, output_dir: str | None = None) -> Path:
    """The question as a file that `ablate FILE` asks, beside its answer; one that is there may have been edited."""
    path = folder / f"{question['name']}.yaml"
    if not path.exists():
        content = {key: without_secrets(value) for key, value in _as_file(question).items() if key != "name"}
        words = ["lm-lab", "ablate", str(path), *([f"output_dir={output_dir}"] if output_dir else [])]
        tune = "tune: {trials: 18, hyperparameters: [optim.lr]}"
        head = f"# {shlex.join(words)}\n# A line `{tune}` tunes the learning rate of each arm first.\n"
        write_text(path, head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
    return path


# --- confirmation


def confirmation(source: Path, folder: Path) -> dict[str, Any]:
    """The content of a question that asks that of the folder `source` anew in `folder`, with as many seeds.

    Seeds of runs and of trials are the first of 100 to 999 that the confirmed ablation has not used; those of a
    confirmation that has begun are its own. Raises UserError if the folder holds no finished ablation.
    """
    if not (source / FILE).exists():
        raise UserError(f"confirm={source}: holds no {FILE}; expected the folder of an ablation that has ended")
    record = read_record(source)
    if not record.ended or record.untuned():
        raise UserError(f"confirm={source}: has not ended; the same command as before continues it")
    arms = record.asked()
    while bases := {record.pairs[arm] for arm in arms if arm in record.pairs} - {*arms}:  # what they are compared with
        arms = [*(arm for arm in record.arms if arm in bases), *arms]
    root, steps = record.baseline, list[str]()
    while root in record.pairs:
        root = record.pairs[root]
    if record.arms[root].settings.get("max_minutes"):  # the length that was counted there
        steps = [f"trainer.max_steps={record.arms[root].steps['own']}", "max_tokens=null", "max_minutes=null"]
    of_arms = ("baselines", "match_parameters", "seed_offsets")  # keys with a value for each arm
    n, begun = len(record.seeds), read_record(folder) if (folder / FILE).exists() else None
    overrides = {arm: record.arms[arm].overrides for arm in arms}
    is_same = begun and len(begun.seeds) == n and {arm: own.overrides for arm, own in begun.arms.items()} == overrides
    if begun and is_same:  # else another question has been confirmed there
        seeds, tuning_seeds = begun.seeds, begun.tune.seeds
    else:
        fresh = [*islice(_fresh(record), n + len(record.tune.seeds))]
        seeds, tuning_seeds = fresh[:n], fresh[n:]
        if len(tuning_seeds) < len(record.tune.seeds):
            raise UserError(f"confirm={source}: too few seeds of 100 to 999 have not been used")
    asked = question_of(record) | {"contrasts": {}, "looks": []}
    asked |= {key: {arm: value for arm, value in asked[key].items() if arm in arms} for key in of_arms}
    return asked | {
        "name": f"{record.name[:32]}-confirm",
        "question": f"Confirmation on fresh seeds: {record.question}",
        "arms": overrides,
        "seeds": seeds,
        "tune": asdict(record.tune) | {"seeds": tuning_seeds},
        "overrides": [*record.common, *record.overrides, *steps],
    }


def _fresh(record: AblationRecord) -> Iterator[int]:
    """Seeds that are unused, also with the offsets of the arms."""
    designs = [design_of(record), *record.designs_seen]
    offsets = {0, *record.seed_offsets.values()}
    seen = {seed for design in designs for seed in (*design["seeds"], *design["tune"]["seeds"])}
    taken = {seed + offset for seed in seen for offset in offsets}
    for seed in FRESH:
        own = {seed + offset for offset in offsets}
        if own.isdisjoint(taken):
            taken |= own
            yield seed


# --- the configurations of the arms


def composed_arm(overrides: Sequence[str]) -> RunConfig:
    """The configuration of an arm by its overrides. Raises UserError, also for a text that is not there."""
    run = compose("train", overrides, RunConfig)
    check_paths(run.data, run.tokenizer)
    return run


def compose_arms(config: AblationConfig, typed: list[str], compose: Compose = composed_arm) -> dict[str, RunConfig]:
    """The configuration of every arm; the overrides that were `typed` change them all.

    Raises UserError naming the arm or override to blame. It comes before anything heavy is imported.
    """
    common = _by_key([*config.overrides, *typed])
    for key in common.keys() & RESERVED.keys():
        raise UserError(f"{common[key]}: {RESERVED[key]}")
    runs: dict[str, RunConfig] = {}
    for name, overrides in config.arms.items():
        own = _by_key(overrides)
        with error_prefix(f"ablation.arms.{name}"):
            for key, override in own.items():
                if key in NOT_OF_AN_ARM:
                    raise UserError(f"{override}: {NOT_OF_AN_ARM[key]}")
                if key in _by_key(typed):
                    raise UserError(f"{override}: is what this arm is about; leave {common[key]} out")
            words = _of_seed([*(common | own).values()], config.seeds_of(name)[0])
            runs[name] = compose(words)
    settings = {name: flat(asdict(run)) for name, run in runs.items()}
    _check_lengths({f"ablation.arms.{name}": values for name, values in settings.items()})
    for name, values in settings.items():
        _check_hyperparameters(config, name, values)
        with error_prefix(f"ablation.arms.{name}"):
            check_init(runs[name])
    return runs


def compose_seeds(
    config: AblationConfig, typed: list[str], runs: dict[str, RunConfig], compose: Compose = composed_arm
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return, by arm and seed, the settings in which {seed} in an override makes a run differ from that of `runs`.

    Raises UserError, also where the models that an arm starts from have different tokenizers.
    """
    seeded = dict[tuple[str, int], dict[str, Any]]()
    for name, run in runs.items():
        words = [*(_by_key([*config.overrides, *typed]) | _by_key(config.arms[name])).values()]
        for seed in config.seeds_of(name) if any(SEED in word for word in words) else ():
            with error_prefix(f"ablation.arms.{name}"):
                own = compose(_of_seed(words, seed))
                if _tokenizer_of(own) != _tokenizer_of(run):
                    raise UserError(f"init_from={own.init_from}: has another tokenizer than {run.init_from}")
            first = flat(asdict(run))
            seeded[name, seed] = {key: value for key, value in flat(asdict(own)).items() if value != first.get(key)}
    return seeded


def _of_seed(words: Sequence[str], seed: int) -> list[str]:
    return [word.replace(SEED, str(seed)) for word in words]


def _tokenizer_of(run: RunConfig) -> str | None:
    """Return the hash of the tokenizer of the model that a run starts from, if there is one."""
    return read_base(run.init_from).settings.sha256.get(TOKENIZER) if run.init_from else None


def _check_lengths(settings: dict[str, dict[str, Any]]) -> None:
    """Refuse a length that is not that of all arms, also where an experiment or a whole group of settings has it."""
    first = next(iter(settings.values()))
    for name, values in settings.items():
        with error_prefix(name):
            key = "checkpoint.patience"
            require(values[key] is None, f"{key}={values[key]}", f"null; {RESERVED[key]}")
            for key in LENGTH:
                require(values[key] == first[key], f"{key}={values[key]}", f"{first[key]}; {SET_BY_BUDGET}")


def _check_hyperparameters(config: AblationConfig, arm: str, values: dict[str, Any]) -> None:
    for setting in config.tune.hyperparameters:
        if not setting.startswith(TUNABLE) or not isinstance(values.get(setting, ""), float | None):
            raise UserError(
                f"ablation.tune.hyperparameters: {setting} is none of a run's settings that take any number"
            )
    if config.tune.trials and not any(values[setting] for setting in config.tune.hyperparameters):
        names = ", ".join(config.tune.hyperparameters)
        raise UserError(f"ablation.tune.hyperparameters: {arm} has none of {names}, or it is 0; name one that it has")


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Of several for one key the last holds."""
    return {key_of(override): override for override in overrides}
