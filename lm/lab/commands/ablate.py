"""Answer a question: lm-lab ablate KEY=A,B [TEXT] | FILE.yaml [TEXT] | ablation=NAME | confirm=DIR [any setting]

KEY=A,B compares values of a setting of train, at five seeds. TEXT is a file, folder, glob or URL. The words
seeds=, tune= and folds= are short for ablation.seeds=, ablation.tune= and ablation.folds=; margin= is short for
ablation.equivalence_margin=. tune=true scores each value at its own best learning rate.

The command plans, trains each arm at each seed, and writes a report. The same command continues with the runs that are
missing. json=true prints one JSON object with the verdicts, and nothing else, on standard output. You can add any
setting of train, which applies to all arms: lm-lab train --help all lists these settings.
"""

import json
import shlex
import sys

from omegaconf import DictConfig

from lm.cli import command_line, started_by
from lm.cli.compose import run_hydra, to_dataclass
from lm.errors import RESUMABLE
from lm.lab.ablation.ask import compose_question, question_words, write_question
from lm.lab.ablation.forkserver import warm_up
from lm.lab.ablation.question import AblateConfig

SCHEMA = AblateConfig
IS_HYDRA = True
HIDDEN = {"overrides"}  # no setting of a person: the settings of train on the line become this list


def run(args: list[str]) -> int:
    words, is_line = question_words(args)
    codes = [0]

    def job(config: DictConfig, overrides: list[str]) -> None:
        codes.append(_answer(to_dataclass(config, overrides, AblateConfig), is_line))

    run_hydra("ablate", AblateConfig, args, words, job)
    return max(codes)


def _answer(asked: AblateConfig, is_line: bool) -> int:
    """Answer the question, print the results, and return the exit code. Leave a question in a line as a file."""
    config, runs = compose_question(asked)
    if config.executor == "local" and not config.plan_only:
        warm_up()
    from lm.lab.ablation.ablate import ablate, plan_json, plan_table
    from lm.lab.ablation.folder import folder_of, sibling
    from lm.lab.ablation.plan import Plan, Stage
    from lm.lab.ablation.report import describe
    from lm.lab.ablation.results import Results
    from lm.lab.commands.report import print_results, verdict_code

    file = sys.stdout if config.plan_only and not config.json else sys.stderr

    def on_plan(plan: Plan, stage: Stage, results: Results) -> None:
        if config.exit_code == "verdict":
            verdict_code(results)  # refuses several comparisons before anything is run
        print(plan_table(plan, stage, results), file=file, flush=True)
        if config.plan_only and config.json:
            planned = plan_json(plan, stage, results)
            print(json.dumps(describe(results) | {"plan": planned}, allow_nan=False))

    folder = folder_of(config, runs)
    try:
        results = ablate(config, runs, shlex.join([*started_by(), *sys.argv[1:]]), on_plan)
    except BaseException as error:
        if folder.exists():
            error.add_note(RESUMABLE)
        raise
    is_verdict = config.exit_code == "verdict"
    if config.plan_only:
        return verdict_code(results) if is_verdict else 0
    print_results(results, config.json)
    if is_line:
        path = write_question(asked.ablation, asked.overrides, results.folder)
        if not config.json:
            line = command_line("ablate", str(path), f"output_dir={sibling(results.folder, 'edited')}")
            print(f"to ask an edited question, edit {path} and type: {line}")
    return verdict_code(results) if is_verdict else int(not results.is_whole())
