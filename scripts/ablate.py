"""Answer a question: python scripts/ablate.py ablation=NAME [output_dir=DIR] [plan_only=true] [any train override]

Plans, tunes every arm, runs each arm at each seed, and writes a report. The same command again does what is missing.
"""

import difflib
import shlex
import sys
from dataclasses import fields

from lm.ablation.plan.compose import compose_arms, key_of
from lm.cli.errors import deeper, no_such_key
from lm.cli.imports import heavy_imports
from lm.cli.launch import compose, launch
from lm.config import BadInput, RunConfig
from lm.config.ablation import AblateConfig
from lm.data.corpus import look_for

COMMAND = shlex.join(["python", "scripts/ablate.py", *sys.argv[1:]])  # as typed: launch takes words away


def arm(words: list[str]) -> RunConfig:
    run = compose("train", words, RunConfig)
    look_for(run.data, run.tokenizer)
    return run


def main(config: AblateConfig) -> int:
    ours = [one.name for one in fields(AblateConfig)]
    for key in map(key_of, config.overrides):  # that train.py would call unknown, for it does not know these
        if (elsewhere := deeper(key, AblateConfig)) or difflib.get_close_matches(key, ours, cutoff=0.75):
            raise BadInput(f"{key}: {no_such_key(key, ours, elsewhere)}")
    runs = compose_arms(config.ablation, config.overrides, arm)
    with heavy_imports():
        from lm.ablation.ablate import ablate
        from lm.ablation.summary import plan_table, result_table

    say = sys.stdout if config.plan_only else sys.stderr
    laboratory = ablate(
        config,
        runs,
        COMMAND,
        lambda laboratory: print(plan_table(laboratory), file=say, flush=True),
    )
    if config.plan_only:
        return 0
    print(result_table(laboratory.path))
    return int(laboratory.n_failed() > 0)


if __name__ == "__main__":
    launch(main, AblateConfig, "ablate", rest="overrides")
