"""A comparison in one line: a setting with several values makes the arms of a question.

    lm-lab ablate model.dropout=0,0.2 my.txt
    compare("model.dropout=0,0.2", text="my.txt").verdict

The first value is the baseline. The question is written as a YAML file into the folder of its answer, to be edited.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from hydra.core.config_store import ConfigStore

from lm.ablation.contrasts import percent
from lm.cli.compose import compose, quoted
from lm.cli.mistakes import LOADED, kinds_of
from lm.cli.recipe import replacing, tell, values_of, with_recipe
from lm.cli.words import with_text
from lm.config import RunConfig, UserError
from lm.config.ablation import METRICS, AblateConfig
from lm.config.checks import without_secrets
from lm.system.files import json_sha256, write_text
from lm.system.terminal import to_override_value

SEEDS, MARGIN = 5, 0.01  # nats per token: 0.01 is one per cent of perplexity
Question = dict[str, Any]  # the content of a file of configs/ablation


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer to a question of two values or more, of the first comparison where there are several."""

    verdict: str  # better, worse, equivalent or undecided
    sentence: str  # what that means, with the interval
    contrasts: pd.DataFrame  # a row for each comparison, as lm.results.contrasts gives it
    folder: Path  # of the report, the rows and the question


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
    from lm.cli.ablate import arm

    kinds = kinds_of(RunConfig)
    words = with_text([*overrides, *([] if text is None else [str(text)])], kinds)
    question = question_of(change, [quoted(word, kinds) for word in words], seeds, margin)
    own = choose(question) + ([] if output_dir is None else [f"output_dir={output_dir}"])
    config = compose("ablate", own, AblateConfig)
    tell()
    results = ablate(config, compose_arms(config.ablation, config.overrides, arm), f"compare({change!r})")
    write_question(question, results.folder, None if output_dir is None else str(output_dir))
    contrasts = frames.contrasts(results.folder)
    return Comparison(str(contrasts["verdict"].iloc[0]), sentences(results)[0], contrasts, results.folder)


def question_of(change: str, overrides: Sequence[str], seeds: int = SEEDS, margin: float = MARGIN) -> Question:
    """The question of a setting with several values, in Hydra's grammar, and the overrides of all arms.

    Of a text of the user's own, the recipe is chosen by its size. Raises UserError.
    """
    ((key, swept),) = (values_of([change]) if "=" in change else {change: []}).items()
    values = [to_override_value(value) for value in swept]
    if len(values) < 2:
        raise UserError(f"{change}: has no second value; give several, as in {key}=VALUE,VALUE")
    if seeds < 1:
        raise UserError(f"seeds={seeds}: expected 1 or more, how many pairs of runs are made")
    common = with_recipe(overrides)
    typed = values_of(common)
    recipes = [str(name) for name in typed.get("experiment", [])]
    label = key.rpartition(".")[2]
    arms = {}
    for value in values:
        name = re.sub(r"[^\w.-]+", "_", value if "." not in key else f"{label}-{value}")[-40:]
        arms[name] = [*replacing(recipes, {**typed, key: [value]}), f"{key}={value}"]
    if len(arms) < len(values):
        raise UserError(f"{change}: expected values that differ in their letters and digits")
    question = {
        "question": f"Which is better, {' or '.join(f'{label}={value}' for value in values)}?",
        "arms": arms,
        "baseline": next(iter(arms)),
        "seeds": list(range(seeds)),
        "equivalence_margin": margin,
        "metric": "val_bpb" if key.startswith("tokenizer") else "val_loss",
        "overrides": common,
    }
    return {"name": f"{label}-{json_sha256(question)[:8]}", **question}


def choose(question: Question) -> list[str]:
    """The overrides of ablate that ask a question, which Hydra gets to know."""
    # ${key} is of a run, which is composed later
    overrides = [re.sub(r"(\\*)\$\{", r"\1\1\\${", override) for override in question["overrides"]]
    ConfigStore.instance().store(LOADED, question | {"overrides": overrides}, "ablation")
    return [f"ablation={LOADED}", f"ablation.name={question['name']}"]


def write_question(question: Question, folder: Path, output_dir: str | None = None) -> Path:
    """The question as a file that `ablate FILE` asks, beside its answer; one that is there may have been edited."""
    path = folder / f"{question['name']}.yaml"
    if not path.exists():
        content = {key: without_secrets(value) for key, value in question.items() if key != "name"}
        words = ["lm-lab", "ablate", str(path), *([f"output_dir={output_dir}"] if output_dir else [])]
        head = f"# {shlex.join(words)}\n# A line `tune: {{trials: 18}}` tunes the learning rates of each arm first.\n"
        write_text(path, head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
    return path


def sentences(results: Any) -> list[str]:
    """A sentence for each comparison, in perplexity and nats, with what else differs between the arms."""
    return [_sentence(row, results.record) for row in results.contrasts.itertuples()]


def _sentence(row: Any, record: Any) -> str:
    costs = _costs(record.arms[row.arm], record.arms[row.baseline])
    is_plain = row.verdict in ("better", "worse", "undecided") and not row.undecided_by
    if not is_plain or pd.isna(row.ci_low):  # what the verdict rests on needs its own words
        return f"{row.sentence.rstrip('.')}; {costs}"
    key, _, value = record.arms[row.arm].overrides[-1].partition("=")
    change, other = f"{key.rpartition('.')[2]}={value}", record.arms[row.baseline].overrides[-1].partition("=")[2]
    verdict = f"against {other} is undecided" if row.verdict == "undecided" else f"is {row.verdict} than {other}"
    level, unit = percent(1 - row.alpha), METRICS[record.metric][1]
    interval = f"{level} CI {row.ci_low:+.4f} to {row.ci_high:+.4f}, {row.n_seeds} seeds"
    numbers = f"{row.mean_difference:+.4f} {unit}, {interval}"
    if record.metric == "val_loss":
        share = 100 * math.expm1(abs(row.mean_difference))
        numbers = f"{share:.1f} % {'lower' if row.mean_difference < 0 else 'higher'} perplexity ({numbers})"
    return f"{change} {verdict}: {numbers}; {costs}"


def _costs(arm: Any, baseline: Any) -> str:
    """The parameters and FLOPs of an arm beside those of its baseline."""
    parts = []
    for noun, own, other in (
        ("parameters", arm.n_params, baseline.n_params),
        ("FLOPs", arm.flops_per_token, baseline.flops_per_token),
    ):
        change = 100 * (own / other - 1)
        parts.append(
            f"same {noun}" if own == other else f"{abs(change):.2g} % {'more' if change > 0 else 'fewer'} {noun}"
        )
    return ", ".join(parts)
