"""Answer a question: lm-lab ablate ablation=NAME [output_dir=DIR] [plan_only=true] [any setting of train]

Plans, tunes every arm, runs each arm at each seed, and writes a report. The same command again continues with the runs
that are missing.
Every setting of train changes all arms. They are not listed here: lm-lab train --help lists them.
"""

import difflib
import shlex
import sys

from hydra.core.hydra_config import HydraConfig

from lm.ablation.plan.compose import compose_arms, compose_base, key_of
from lm.cli import program
from lm.cli.compose import compose
from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.cli.names import meant, names, no_such_key
from lm.config import BadInput, RunConfig
from lm.config.ablation import AblateConfig
from lm.data.paths import check_paths


def arm(line: list[str]) -> RunConfig:
    run = compose("train", line, RunConfig)
    check_paths(run.data, run.tokenizer)
    return run


def task(config: AblateConfig) -> int:
    ours = names(AblateConfig)
    for key in map(key_of, config.overrides):  # that train would call unknown, for it does not know these
        if meant(key, AblateConfig) or difflib.get_close_matches(key, ours, cutoff=0.75):
            raise BadInput(no_such_key(key, ours, AblateConfig))
    runs = compose_arms(config.ablation, config.overrides, arm)
    base = compose_base(config.ablation, config.overrides, runs, arm)
    if "ablation" not in map(key_of, HydraConfig.get().overrides.task):
        default = HydraConfig.get().runtime.choices["ablation"]  # whatever ablation.name calls it
        print(f"ablation={default} is the default; --help lists the others", file=sys.stderr, flush=True)
    with heavy_imports():
        from lm.ablation.ablate import ablate
        from lm.ablation.summary import plan_table, result_table

    say = sys.stdout if config.plan_only else sys.stderr
    runner = ablate(
        config,
        runs,
        command(),
        lambda runner: print(plan_table(runner), file=say, flush=True),
        base,
    )
    if config.plan_only:
        return 0
    print(result_table(runner.path))
    return int(runner.n_failed() > 0)


def command() -> str:
    """The command line for the record: the settings as they were typed, the program without its path."""
    script, name = program.start("ablate"), "ablate"
    line = sys.argv[2:] if script[-1] == name else sys.argv[1:]
    return shlex.join([*script, *line])


def main(line: list[str] | None = None) -> None:
    launch(task, AblateConfig, "ablate", line, rest="overrides", resumable=True)
