"""What is said on the command line and in the file of an ablation, as a configuration for each arm."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from lm.config import RunConfig, UserError, require
from lm.config.ablation import AblationConfig
from lm.config.checks import error_prefix
from lm.config.identity import flat
from lm.formats.base import agrees
from lm.training.run_directory import LENGTH

Compose = Callable[[list[str]], RunConfig]  # overrides of train.py to a configuration
RESERVED = {
    "seed": "the seeds of an ablation are ablation.seeds=[...]",
    "run_dir": "each run of an ablation has a directory of its own below output_dir",
    "checkpoint.patience": "paired runs make equal steps; checkpoint.best=true keeps the best model of a whole run",
}
SET_BY_BUDGET = "an arm trains as long as its budget allows; it may stand among the overrides of all arms"
NOT_OF_AN_ARM = RESERVED | dict.fromkeys(LENGTH, SET_BY_BUDGET)
TUNABLE = ("optim.", "head.", "model.")
SHARED = ("model.", "tokenizer.", "data.")  # by a base and its arms
NOT_SHARED = ("data.seq_len", "data.batch_size", "data.document_mask")


def compose_arms(config: AblationConfig, typed: list[str], compose: Compose) -> dict[str, RunConfig]:
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
            runs[name] = _not_by_length(compose([*(common | own).values()]))
    settings = {name: flat(asdict(run)) for name, run in runs.items()}
    _check_lengths({f"ablation.arms.{name}": values for name, values in settings.items()})
    for name, values in settings.items():
        _check_hyperparameters(config, name, values)
    return runs


def compose_base(
    config: AblationConfig, typed: list[str], runs: dict[str, RunConfig], compose: Compose
) -> RunConfig | None:
    """The configuration of the runs that the arms start from; None if there are none or `init_from` names one run.

    What stands in ablation.base comes before the overrides that were `typed`, which change base and arms alike. Raises
    UserError for a base whose text, model or tokenizer is not that of the arms.
    """
    if config.base is None or any(run.init_from for run in runs.values()):
        for name, run in runs.items():
            with error_prefix(f"ablation.arms.{name}"):
                run.check_init()
        return None
    own = _by_key(config.base)
    with error_prefix("ablation.base"):
        for key in own.keys() & {*RESERVED, "init_from"}:
            raise UserError(f"{own[key]}: {RESERVED.get(key, 'a base starts anew')}")
        base = _not_by_length(compose([*(_by_key([*config.overrides, *typed]) | own).values()]))
        base.check_init()
    own_settings = flat(asdict(base))
    _check_lengths({"ablation.base": own_settings})
    for name, run in runs.items():
        for key, value in flat(asdict(run)).items():
            is_shared, own_value = key.startswith(SHARED) and key not in NOT_SHARED, own_settings.get(key)
            if is_shared and not agrees(key.removeprefix("model."), value, own_value):
                advice = "they have it in common: choose it among the overrides"
                raise UserError(f"ablation.base: {key} is {own_value}, that of {name} is {value}; {advice}")
    return base


def _not_by_length(run: RunConfig) -> RunConfig:
    """A run that is compiled only if that is asked for: all runs of an ablation round alike, whatever their length."""
    return replace(run, compile=False) if run.compile == "auto" else run


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
    """Overrides by their keys; of several for one key the last holds."""
    return {override.partition("=")[0].lstrip("+~"): override for override in overrides}
