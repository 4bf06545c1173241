"""Answer a question: lm-lab ablate KEY=A,B [TEXT] | FILE.yaml [TEXT] | ablation=NAME | confirm=DIR [any setting]

KEY=A,B compares values of a setting of train, at five seeds. TEXT is a file, folder, glob or URL. On the command line
seeds=, margin=, tune= and folds= are short for ablation.seeds= and so on (margin= for ablation.equivalence_margin=).
tune=true scores each value at its own best learning rate.

The command plans, trains each arm at each seed, and writes a report. The same command continues with the runs that are
missing. json=true prints one JSON object with the verdicts, and nothing else, on standard output. You can add any
setting of train, which applies to all arms: lm-lab train --help all lists these settings.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from lm.cli import command_line, started_by
from lm.cli.arguments import (
    Words,
    classify,
    for_hydra,
    is_completion,
    key_of,
    kinds_of,
    quoted,
    recipe_for,
    with_text,
)
from lm.cli.compose import LOADED, run_hydra, to_dataclass
from lm.config import RunConfig, literal
from lm.errors import RESUMABLE, UserError
from lm.lab.ablation.ask import (
    choose,
    compose_question,
    confirmation,
    is_question,
    long_name,
    question_in_a_line,
    read_question,
    values_of,
    write_question,
)
from lm.lab.ablation.forkserver import warm_up
from lm.lab.ablation.question import AblateConfig

SCHEMA = AblateConfig
IS_HYDRA = True
OWN, TRAIN = kinds_of(AblateConfig) | {"ablation.overrides": list[str]}, kinds_of(RunConfig)
IN_A_LINE = {"seeds": Any, "margin": float, "tune": str, "folds": Any}  # short names of settings of a question


def run(args: list[str]) -> int:
    words, is_line = hydra_words(args)
    codes = [0]

    def job(config: DictConfig, overrides: list[str]) -> None:
        ablation = to_dataclass(config, overrides, AblateConfig)
        codes.append(_answer(ablation, is_line))

    run_hydra("ablate", AblateConfig, args, words, job)
    return max(codes)


def _answer(ablation: AblateConfig, is_line: bool) -> int:
    """Answer the question, print the results, and return the exit code. Leave a question in a line as a file."""
    question = ablation.ablation  # as it was asked; to compose its arms settles its folds
    runs = compose_question(ablation)
    if ablation.executor == "local" and not ablation.plan_only:
        warm_up()
    from lm.lab.ablation.ablate import ablate, plan_json, plan_table
    from lm.lab.ablation.folder import folder_of
    from lm.lab.ablation.plan import Plan, Step
    from lm.lab.ablation.report import describe
    from lm.lab.ablation.results import Results
    from lm.lab.commands.report import print_results, verdict_code

    file = sys.stdout if ablation.plan_only and not ablation.json else sys.stderr

    def on_plan(plan: Plan, step: Step, results: Results) -> None:
        if ablation.exit_code == "verdict":
            verdict_code(results)  # refuses several comparisons before anything is run
        print(plan_table(plan, step, results), file=file, flush=True)
        if ablation.plan_only and ablation.json:
            planned = plan_json(plan, step, results)
            print(json.dumps(describe(results) | {"plan": planned}, allow_nan=False))

    folder = folder_of(ablation, runs)
    try:
        results = ablate(ablation, runs, shlex.join([*started_by(), *sys.argv[1:]]), on_plan)
    except BaseException as error:
        if folder.exists():
            error.add_note(RESUMABLE)
        raise
    is_verdict = ablation.exit_code == "verdict"
    if ablation.plan_only:
        return verdict_code(results) if is_verdict else 0
    print_results(results, ablation.json)
    if is_line:
        path = write_question(question, ablation.overrides, results.folder)
        if not ablation.json:
            line = command_line("ablate", str(path), f"output_dir={results.folder}-edited")
            print(f"to ask an edited question, edit {path} and type: {line}")
    return verdict_code(results) if is_verdict else int(not results.is_whole())


# --- words to a question


def hydra_words(args: Sequence[str]) -> tuple[list[str], bool]:
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
    own = [long_name(word) for word in words.overrides if _is_own(word)]
    train = with_text(Words([], [word for word in words.overrides if not _is_own(word)], texts))
    changes = [word for word in train if len(values_of(for_hydra(word, TRAIN, is_sweep=True))) > 1]
    is_line = False
    if any(key_of(word) == "confirm" for word in own):
        if train or files:
            raise UserError(
                f"{' '.join([*files, *train])}: confirm asks a question as it was, expected no settings of train"
            )
        chosen, own = _confirm(own)
    elif files:
        chosen = _read(files, own)
    elif changes and not any(key_of(word) == "ablation" for word in own):
        if len(changes) > 1:
            advice = "a line compares one; in a YAML file each arm may have several (docs/ablations.md)"
            raise UserError(f"{' '.join(changes)}: several settings with several values; {advice}")
        if several := next((word for word in own if re.match(r"[~+]*ablation\.(arms|overrides)\b", word)), None):
            raise UserError(f"{several}: a line has its own arms and settings; write a YAML file for others")
        recipe = recipe_for(train)
        chosen = choose(question_in_a_line(for_hydra(changes[0], TRAIN, is_sweep=True)))
        train = [*([f"experiment={recipe}"] if recipe else []), *(word for word in train if word not in changes)]
        is_line, changes = True, []
    else:
        chosen = []
    if changes:
        raise UserError(f"{changes[0]}: several values beside a question, expected one; alone they are a question")
    is_asked = chosen or any(key_of(word) == "ablation" for word in own)
    if not is_asked and not {"--cfg", "-c", "--info", "--hydra-help", "-sc"} & {*words.flags}:
        raise UserError(_no_question(train, texts))
    of_all = ",".join(quoted(literal(for_hydra(word, TRAIN))) for word in train)
    return [*words.flags, *chosen, *(for_hydra(word, OWN) for word in own), f"overrides=[{of_all}]"], is_line


def _is_own(word: str) -> bool:
    group = re.split("[.@/]", key_of(word))[0]
    return group in OWN or group in IN_A_LINE or group == "hydra"


def _no_question(train: Sequence[str], texts: Sequence[str]) -> str:
    line = command_line("ablate", "head=tied,untied", *texts)
    short = command_line("ablate", "ablation=smoke")
    ways = f"for example {line}, or {short} for a first look; docs/ablations.md has questions in a file"
    single = [word for word in train if key_of(word).split(".")[0] not in ("data", "threads", "trainer")]
    no_question = "ablation: no question is given"
    what = f"{single[0]}: has one value, a question needs two with a comma between" if single else no_question
    return f"{what}; {ways}"


def _read(files: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the overrides that choose the question of a YAML file, which Hydra gets to know."""
    if len(files) > 1 or any(key_of(word) == "ablation" for word in own):
        raise UserError(f"{files[-1]}: is a second question, expected one")
    ConfigStore.instance().store(LOADED, read_question(Path(files[0])), "ablation")
    return [f"ablation={LOADED}", f"ablation.name={quoted(Path(files[0]).stem)}"]


def _confirm(own: list[str]) -> tuple[list[str], list[str]]:
    """Return the overrides that ask a finished question on fresh seeds, and the other words."""
    folders = {key_of(word): Path(word.partition("=")[2]).expanduser() for word in own}
    if any(key_of(word).startswith("ablation") for word in own):
        expected = "no seeds, margin or tune, which the first question takes"
        raise UserError(f"confirm={folders['confirm']}: asks a question as it was, expected {expected}")
    beside = Path(os.path.relpath(f"{folders['confirm'].resolve()}-confirm"))
    folder = folders.get("output_dir", beside)
    if folder.resolve() == folders["confirm"].resolve():
        raise UserError(f"output_dir={folder}: holds the ablation that is to be confirmed; name another folder")
    rest = [word for word in own if key_of(word) != "output_dir"]
    return [*choose(confirmation(folders["confirm"])), f"output_dir={quoted(str(folder))}"], rest
