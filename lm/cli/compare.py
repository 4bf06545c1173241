"""A comparison in one line: a setting with several values makes the arms of a question.

    lm-lab ablate model.dropout=0,0.2 my.txt
    compare("model.dropout=0,0.2", text="my.txt").verdict

The first value is the baseline. The question is written as a YAML file into the folder of its answer, to be edited.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pandas as pd
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from lm.ablation.results import Results
from lm.cli.compose import compose, for_later, quoted
from lm.cli.mistakes import LOADED, explaining, kinds_of, wrong_value
from lm.cli.recipe import notes, replacing, tell, values_of, with_recipe
from lm.cli.words import with_text
from lm.config import RunConfig, UserError, require
from lm.config.ablation import AblateConfig, AblationConfig
from lm.config.checks import error_prefix, reading, without_secrets
from lm.data.paths import check_paths
from lm.system.files import json_sha256, write_text
from lm.system.terminal import to_override_value

SEEDS, MARGIN = 5, 0.01  # nats per token: 0.01 is one per cent of perplexity
MARGIN_HELP = "; 0.01 nats per token is 1 % of perplexity, and ablation=aa measures the noise"
SHORT = {"margin": "equivalence_margin"}  # what a question calls its settings in a line and in a file
QuestionFile = dict[str, Any]  # the content of a file of configs/ablation


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer to a question of two values or more, of the first comparison where there are several."""

    verdict: str  # better, worse, equivalent or undecided
    sentence: str  # what that means, with the interval
    contrasts: pd.DataFrame  # a row for each comparison, as lm.results.contrasts gives it
    folder: Path | None  # of the report, the rows and the question; None of a frame
    rows: pd.DataFrame  # arm, seed and value of every finished run that is compared

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the mean difference; None with fewer than two pairs."""
        low, high = self.contrasts[["ci_low", "ci_high"]].iloc[0]
        return None if pd.isna(low) else (float(low), float(high))


def arm(overrides: Sequence[str]) -> RunConfig:
    """The configuration of an arm by its overrides. Raises UserError, also for a text that is not there."""
    run = compose("train", overrides, RunConfig)
    check_paths(run.data, run.tokenizer)
    return run


def compare(
    change: str,
    text: str | Path | None = None,
    seeds: int = SEEDS,
    margin: float = MARGIN,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
) -> Comparison:
    """Train every value of a setting at every seed, in pairs, and judge the others against the first.

    `change` is a setting of train with its values; `text` a file, folder, glob or address, without which the default
    text is read; `overrides` are settings of train for all. What is finished in the folder is not run again. Runs are
    made in other processes, so a script calls it below `if __name__ == "__main__":`. Raises UserError.
    """
    from lm import results as frames
    from lm.ablation.ablate import ablate
    from lm.ablation.compose import compose_arms

    kinds = kinds_of(RunConfig)
    words = with_text([*overrides, *([] if text is None else [str(text)])], kinds)
    with explaining([change, *words], kinds):
        question = question_of(change, [quoted(word, kinds) for word in words], seeds, margin)
    own = choose(question) + ([] if output_dir is None else [f"output_dir={output_dir}"])
    config = compose("ablate", own, AblateConfig)
    tell()
    results = ablate(config, compose_arms(config.ablation, config.overrides, arm), f"compare({change!r})")
    write_question(question, results.folder, None if output_dir is None else str(output_dir))
    return _comparison(results, frames.contrasts(results.folder), results.folder)


def judge(
    frame: pd.DataFrame, baseline: str | None = None, margin: float | None = None, higher: bool = False
) -> Comparison:
    """The paired verdict of an ablation on the numbers of any program, in columns arm, seed and value.

    Other columns are not read, and rows of a seed that makes no pair are left out; a value that is not finite is a run
    that diverged. Of two arms the first is the baseline if none is named. Without a margin, in the unit of the values,
    nothing is called equivalent. `higher`: more is better. Raises UserError that names the column or the row.
    """
    from lm.ablation.rows import checked_rows, judged
    from lm.results import contrasts_of

    with error_prefix("frame"):
        require(isinstance(frame, pd.DataFrame), f"is a {type(frame).__name__}", "a frame of pandas")
        is_number = isinstance(margin, Real | None) and not isinstance(margin, bool)
        require(is_number, f"margin={margin!r}", "a number")
        require(isinstance(higher, bool), f"higher={higher!r}", "True or False")
        results = judged(checked_rows(frame), None if baseline is None else str(baseline), margin, higher)
    return _comparison(results, contrasts_of({"": results}), None)


def _comparison(results: Results, contrasts: pd.DataFrame, folder: Path | None) -> Comparison:
    done, metric = results.done, results.record.metric
    rows = done[["arm", "seed", metric]].rename(columns={metric: "value"}).reset_index(drop=True)
    answer = results.asked()[0]
    return Comparison(answer.verdict, answer.statement, contrasts, folder, rows)


def question_of(
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
    ((key, swept),) = (values_of([change]) if "=" in change else {change: []}).items()
    values = [to_override_value(value) for value in swept]
    if len({*values}) < max(2, len(values)):
        raise UserError(f"{change}: expected different values, two or more, as in {key}=VALUE,VALUE")
    common = with_recipe(overrides)
    typed = values_of(common)
    recipes = [str(name) for name in typed.get("experiment", [])]
    label = key.rpartition(".")[2]
    names = [re.sub(r"[^\w.-]+", "_", value if "." not in key else f"{label}-{value}")[-40:] for value in values]
    if len({*names}) < len(names):
        names = [f"{label}-{number}" for number in range(len(values))]
    arms = {
        name: [*replacing(recipes, {**typed, key: [value]}), f"{key}={value}"]
        for name, value in zip(names, values, strict=True)
    }
    if differing := {word for own in arms.values() for word in own[:-1]}:
        notes.append(
            f"{key}: an arm differs in {', '.join(sorted(differing))} too, for the recipe's own suit another {key}"
        )
    question: Any = {
        "question": f"Which is better, {' or '.join(f'{label}={value}' for value in values)}?",
        "arms": arms,
        "baseline": next(iter(arms)),
        "seeds": seeds,
        "equivalence_margin": margin,
        "metric": "val_bpb" if key.startswith("tokenizer") else "val_loss",
        "overrides": common,
    }
    question = OmegaConf.create(question)
    for setting, (value, *more) in values_of(settings).items():
        if more:
            several = ",".join(map(str, (value, *more)))
            raise UserError(f"{setting}={several}: several values, expected one; a list is {setting}=[{several}]")
        key = setting.removeprefix("ablation.")
        OmegaConf.update(question, SHORT.get(key, key), value)
    question = OmegaConf.to_container(question, resolve=False)
    question["seeds"] = _seeds(question["seeds"])
    if isinstance(given := question["equivalence_margin"], str):
        raise UserError(wrong_value(f"margin={given}", {"margin": float}))
    question["equivalence_margin"] = float(given) if isinstance(given, int) else given  # the same name as in Python
    return {"name": f"{label}-{json_sha256(question)[:8]}", **question}


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
    content = {SHORT.get(key, key): value for key, value in content.items()}
    for key, value in content.items():
        try:
            content[key] = _as_lists(kinds.get(key), _seeds(value) if key == "seeds" else value)
            with explaining([], kinds):
                schema = OmegaConf.merge(schema, {key: content[key]})
        except UserError as error:
            wrong.append(str(error).replace("=VALUE", ""))
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
    if isinstance(value, int | float) and float(value).is_integer():
        return [*range(int(value))]
    require(not isinstance(value, str | float), f"seeds={value}", f"how many, as in seeds={SEEDS}, or a list of them")
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
        head = f"# {shlex.join(words)}\n# A line `tune: {{trials: 18}}` tunes the learning rates of each arm first.\n"
        write_text(path, head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
    return path
