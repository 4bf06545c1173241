"""What is said on the command line and in the file of an ablation, as a configuration for each arm."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lm.config import BadInput, RunConfig
from lm.config.ablation import AblationConfig
from lm.config.checks import about
from lm.config.identity import flat
from lm.formats.base import agrees

Compose = Callable[[list[str]], RunConfig]  # overrides of train.py to a configuration
OURS = {
    "seed": "the seeds of an ablation are ablation.seeds=[...]",
    "run_dir": "each run of an ablation has a directory of its own below output_dir",
}
BUDGETED = "an arm trains as long as its budget allows; it may stand among the overrides of all arms"
TUNABLE = ("optim.", "head.", "model.")
SHARED = ("model.", "tokenizer.", "data.")  # by a base and its arms
NOT_SHARED = ("data.seq_len", "data.batch_size", "data.document_mask")
NOT_AN_ARM = OURS | {"trainer.max_steps": BUDGETED, "max_tokens": BUDGETED}


def compose_arms(config: AblationConfig, words: list[str], compose: Compose) -> dict[str, RunConfig]:
    """The configuration of every arm; `words` change them all. Raises BadInput naming the culprit.

    It comes before anything heavy is imported.
    """
    common = {key_of(word): word for word in [*config.overrides, *words]}
    for key in common.keys() & set(OURS):
        raise BadInput(f"{common[key]}: {OURS[key]}")
    places = {"ablation.overrides: ": config.overrides, "": list(common.values())}
    runs: dict[str, RunConfig] = {}
    for name, words_of_arm in config.arms.items():
        own, typed = {key_of(word): word for word in words_of_arm}, {key_of(word) for word in words}
        try:
            for key, word in own.items():
                if key in NOT_AN_ARM:
                    raise BadInput(f"{word}: {NOT_AN_ARM[key]}")
                if key in typed:
                    raise BadInput(f"{word}: is what this arm is about; leave {common[key]} out")
            runs[name] = compose(list((common | own).values()))
        except BadInput as error:
            found = (place for place, alone in places.items() if str(error) == complaint(alone, compose))
            raise BadInput(f"{next(found, f'ablation.arms.{name}: ')}{error}") from error
    settings = {name: flat(asdict(run)) for name, run in runs.items()}
    for name, values in settings.items():
        check_hyperparameters(config, name, values)
    if config.plot_over is not None and not any(config.plot_over in values for values in settings.values()):
        raise BadInput(f"ablation.plot_over={config.plot_over}: no such setting of a run")
    return runs


def compose_base(
    config: AblationConfig, words: list[str], runs: dict[str, RunConfig], compose: Compose
) -> RunConfig | None:
    """The configuration of the runs that the arms start from; None if there are none or `init_from` names one run.

    What stands in ablation.base comes before `words`, which change base and arms alike. Raises BadInput for a base
    whose text, model or tokenizer is not that of the arms.
    """
    common = {key_of(word): word for word in [*config.overrides, *words]}
    if config.base is None or any(run.init_from for run in runs.values()):
        for name, run in runs.items():
            with about(f"ablation.arms.{name}"):
                run.check_init()
        return None
    own = {key_of(word): word for word in config.base}
    with about("ablation.base"):
        for key in own.keys() & {*OURS, "init_from"}:
            raise BadInput(f"{own[key]}: {OURS.get(key, 'a base starts anew')}")
        base = compose(list((common | own).values()))
        base.check_init()
    there = flat(asdict(base))
    for name, run in runs.items():
        for key, value in flat(asdict(run)).items():
            shared = key.startswith(SHARED) and key not in NOT_SHARED
            if shared and not agrees(key.removeprefix("model."), value, there.get(key)):
                both = "they have it in common: choose it among the overrides"
                raise BadInput(f"ablation.base: {key} is {there.get(key)}, that of {name} is {value}; {both}")
    return base


def complaint(words: list[str], compose: Compose) -> str | None:
    """What is wrong with these words, whatever an arm adds."""
    try:
        compose(words)
    except BadInput as error:
        return str(error)
    return None


def check_hyperparameters(config: AblationConfig, arm: str, values: dict[str, Any]) -> None:
    for setting in config.tune.hyperparameters:
        if not setting.startswith(TUNABLE) or not isinstance(values.get(setting, ""), float | None):
            raise BadInput(f"ablation.tune.hyperparameters: {setting} is none of a run's settings that take any number")
    if config.tune.trials and not any(values[setting] for setting in config.tune.hyperparameters):
        named = ", ".join(config.tune.hyperparameters)
        raise BadInput(f"ablation.tune.hyperparameters: {arm} has none of {named}, or it is 0; name one that it has")


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
