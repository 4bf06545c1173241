"""Answer a question: lm-lab ablate KEY=A,B [TEXT] | FILE.yaml | ablation=NAME | confirm=DIR [any setting]

KEY=A,B compares values of a setting of train, with seeds=5 and margin=0.01. TEXT is a file, folder, glob or address.

Plans, tunes every arm, runs each arm at each seed, and writes a report. The same command again continues with the runs
that are missing. json=true prints one JSON object with the verdicts, and nothing else, on standard output.
Every setting of train changes all arms. They are not listed here: lm-lab train --help all lists them.
"""

import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lm.cli import command_line, this_command
from lm.cli.compose import current_overrides, for_later, quoted, register, run_hydra, string, to_dataclass
from lm.cli.main import job, resumable
from lm.cli.mistakes import CONFIGS, LOADED, Kinds, kinds_of, no_such_key
from lm.cli.question import (
    QuestionFile,
    choose,
    compose_arms,
    compose_seeds,
    confirmation,
    question_in_a_line,
    read_question,
    write_question,
)
from lm.cli.recipe import tell, values_of
from lm.cli.words import is_question, is_text, with_text
from lm.config import RunConfig, UserError
from lm.config.ablation import METRICS, AblateConfig
from lm.config.identity import is_verb, key_of
from lm.system.forkserver import warm_up

SCHEMA = AblateConfig
NOT_TUNED = (
    "margin: {margin:g} {unit} (0.01 nats per token is 1 % of perplexity), which margin=M changes. Learning rates are"
    " not tuned for each arm: ablation.tune.trials=18 'ablation.tune.hyperparameters=[optim.lr]' does that"
)
FOLDERS = ("confirm", "output_dir")
questions: list[QuestionFile] = []  # in one line, by this command


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="ablate")
@job
def program(config: DictConfig) -> None:
    overrides = current_overrides()
    ablation = to_dataclass(config, overrides, AblateConfig)
    runs = compose_arms(ablation.ablation, ablation.overrides)
    seeded = compose_seeds(ablation.ablation, ablation.overrides, runs)
    ablation.overrides = [word for word in ablation.overrides if not is_verb(word)]
    if "ablation" not in map(key_of, overrides):
        default = HydraConfig.get().runtime.choices["ablation"]  # whatever ablation.name calls it
        print(f"ablation={default} is the default; --help lists the others", file=sys.stderr, flush=True)
    tell()
    if ablation.executor == "local" and not ablation.plan_only:
        warm_up()
    from lm.ablation.ablate import ablate, plan_json, plan_table
    from lm.ablation.plan import Plan, Step
    from lm.ablation.record import default_dir
    from lm.ablation.report import report_json
    from lm.ablation.results import Results
    from lm.cli.report import print_results, verdict_code

    file = sys.stdout if ablation.plan_only and not ablation.json else sys.stderr

    def on_plan(plan: Plan, step: Step, results: Results) -> None:
        if ablation.exit_code == "verdict":
            verdict_code(results)  # refuses several before anything is run
        print(plan_table(plan, step, results), file=file, flush=True)
        if ablation.plan_only and ablation.json:
            planned = plan_json(plan, step, results)
            print(json.dumps(report_json(results) | {"plan": planned}, allow_nan=False))
        if questions and not ablation.ablation.tune.trials:
            unit = METRICS[ablation.ablation.metric][1]
            print(NOT_TUNED.format(margin=ablation.ablation.equivalence_margin, unit=unit), file=file, flush=True)

    with resumable(Path(ablation.output_dir) if ablation.output_dir else default_dir(ablation)):
        results = ablate(ablation, runs, this_command(), on_plan, seeded)
    if ablation.plan_only:
        return
    print_results(results, ablation.json)
    for question in questions:
        path = write_question(question, results.folder, ablation.output_dir)
        if not ablation.json:
            print(f"the question is a file, to be edited and asked again: {path}")
    if not results.is_whole():
        sys.exit(1)
    if ablation.exit_code == "verdict":
        sys.exit(verdict_code(results))


def prepare(flags: Namespace) -> list[str]:
    """The overrides for Hydra: those of train become a list, the setting `overrides`. Raises UserError."""
    if flags.multirun:
        raise UserError("-m: an ablation is a sweep already; list its values as arms and seeds")
    own, train, others = kinds_of(AblateConfig), kinds_of(RunConfig), []
    questions.clear()
    files = [word for word in flags.overrides if is_question(word)]
    words = [word for word in flags.overrides if word not in files]
    overrides = _choose_question(files, flags.overrides)
    if not overrides and "ablation" not in map(key_of, words):
        words, overrides = _ask_in_a_line(words)
    for override in with_text(words, own | train):
        key = re.split("[.@/]", key_of(override))[0]
        if key in own or key == "hydra" or not re.search("=|^~", override):
            overrides.append(quoted(override, own))
        elif _is_of_train(key, own, train):
            others.append(override)
        else:
            raise UserError(no_such_key(override, own | train, flags.overrides))
    for word in others:
        if len(values_of([quoted(word, train)]).get(key_of(word), [])) > 1:
            raise UserError(f"{word}: several values beside a question, expected one; alone they are a question")
    if others and "confirm" in map(key_of, flags.overrides):
        raise UserError(f"{' '.join(others)}: confirm asks a question as it was, expected no settings of train")
    is_asked = any(key_of(override).startswith(("ablation", "hydra")) for override in overrides)
    if not (is_asked or flags.cfg or flags.info or flags.hydra_help):
        line = command_line("ablate", "head=tied,untied", *filter(is_text, flags.overrides))
        short = command_line("ablate", "ablation=smoke")
        ways = f"{line} compares the values of a setting, {short} asks a short one, FILE.yaml one of your own"
        single = [word for word in others if key_of(word).split(".")[0] not in ("data", "threads", "trainer")]
        what = f"{single[0]}: is one value, and no question" if single else "ablation: no question is given"
        raise UserError(f"{what}; {ways}")
    return [*overrides, f"overrides=[{','.join(string(for_later(override)) for override in others)}]"]


def _is_of_train(key: str, own: Kinds, train: Kinds) -> bool:
    group = re.split("[.@/]", key)[0]
    return group not in own and (group in train or (CONFIGS / group).is_dir())


def _choose_question(files: Sequence[str], words: Sequence[str]) -> list[str]:
    """The overrides that choose the question of a YAML file or of a confirmation, which Hydra gets to know.

    Raises UserError.
    """
    if sources := [word.partition("=")[2] for word in words if key_of(word) == "confirm"]:
        if files or len(sources) > 1 or any(key_of(word).startswith("ablation") for word in words):
            raise UserError(f"confirm={sources[0]}: is a question of its own, expected no other")
        of_folders = [quoted(word, kinds_of(AblateConfig)) for word in words if key_of(word) in FOLDERS]
        typed = {key: Path(str(value)).expanduser() for key, (value,) in values_of(of_folders).items()}
        folder = typed.get("output_dir", Path(os.path.relpath(f"{typed['confirm'].resolve()}-confirm")))  # beside it
        return [*choose(confirmation(typed["confirm"], folder)), f"output_dir={string(str(folder))}"]
    if not files:
        return []
    if len(files) > 1 or "ablation" in map(key_of, words):
        raise UserError(f"{files[-1]}: is a second question, expected one")
    is_whole = not any(key_of(word).startswith("ablation.") for word in words)
    ConfigStore.instance().store(LOADED, read_question(Path(files[0]), is_whole), "ablation")
    return [f"ablation={LOADED}", f"ablation.name={string(Path(files[0]).stem)}"]


def _ask_in_a_line(words: list[str]) -> tuple[list[str], list[str]]:
    """The words that are left, and the overrides that ask the question of a setting with several values, if one has."""
    own, train = kinds_of(AblateConfig), kinds_of(RunConfig)
    settings = [word for word in words if "=" in word and _is_of_train(key_of(word), own, train)]
    changes = [word for word in settings if len(values_of([quoted(word, train, True)]).get(key_of(word), [])) > 1]
    if not changes:
        return words, []
    for word in changes:
        if key_of(word) not in train and not (CONFIGS / key_of(word)).is_dir():
            raise UserError(no_such_key(word, train, words))
    if len(changes) > 1:
        advice = "a line compares one; in a YAML file each arm may have several (docs/ablations.md)"
        raise UserError(f"{' '.join(changes)}: several settings with several values; {advice}")
    texts = [word for word in words if is_text(word)]
    common = [word for word in settings if word not in changes] + texts
    of_question = [word for word in words if re.match(r"(seeds|margin|ablation\..*)=", word)]
    all_arms = [quoted(word, train) for word in with_text(common, train)]
    question = question_in_a_line(changes[0], all_arms, settings=[quoted(word, own) for word in of_question])
    questions.append(question)
    used = {*changes, *common, *of_question}
    return [word for word in words if word not in used], choose(question)


def run(args: list[str]) -> None:
    register("ablate", AblateConfig)
    try:
        run_hydra(program, args, kinds_of(AblateConfig) | kinds_of(RunConfig), prepare)
    except UserError as error:
        file = next(filter(is_question, args), "the line")
        raise UserError(str(error).replace(f"'ablation/{LOADED}'", f"'{file}'")) from error
