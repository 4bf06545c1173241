"""Train one run: lm-lab train [TEXT] [group=choice] [key=value ...]

TEXT is a file, folder, glob or address; without one, the source of Python's standard library is read.

The same command again resumes a run that was interrupted and shows the table of one that is finished; so does
lm-lab train run_dir=RUN, with the settings of that run. With -m, comma-separated values make a run each:
lm-lab train -m head=tied,untied seed=0,1,2
"""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lm.cli import command_line
from lm.cli.compose import current_overrides, quoted, register, run_hydra, to_dataclass
from lm.cli.main import configure_streams, job
from lm.cli.mistakes import CONFIGS, kinds_of, no_such_key
from lm.cli.recipe import tell, with_recipe
from lm.cli.summaries import ending, plan, summary, sweep
from lm.cli.words import is_question, with_text
from lm.config import RunConfig, UserError, require
from lm.config.identity import is_verb, key_of
from lm.data.paths import check_paths
from lm.system.terminal import close_bars, format_table, is_first_process
from lm.training.run_directory import RunDirectory

SCHEMA = RunConfig
finished: list[tuple[list[str], dict[str, Any]]] = []  # the overrides of a run, and its result
typed: set[str] = set()  # keys of this command line; overrides of others come from a recipe


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
@job
def program(config: DictConfig) -> float | None:
    """Train what Hydra has composed; the validation loss is what a sweeper that searches minimises."""
    overrides, several = current_overrides(), HydraConfig.get().mode == RunMode.MULTIRUN
    run = to_dataclass(config, overrides, RunConfig)
    own = [word for word in overrides if not typed or key_of(word) in typed]
    run.typed = run.typed or [word for word in own if not is_verb(word)]
    configure_streams(run.trainer.world_size)
    path = Path(run.run_dir or "")
    result = RunDirectory(path).finished_result(run) if run.run_dir else None
    if several and run.trainer.world_size > 1:
        raise UserError(f"trainer.devices={run.trainer.devices}: a sweep trains each run in one process; leave -m out")
    if result is None:
        check_paths(run.data, run.tokenizer)
        tell(run.data)
        if run.plan_only:
            from lm.training.resolve import forecast

            run.check_init()
            if (future := forecast(run)) is not None:
                print(format_table(plan(future)))
                return None
        from lm.training.train import train  # its imports take seconds

        path, result = train(run)
    tell()
    if not is_first_process(run.trainer.world_size):
        return None
    finished.append((overrides, result))
    close_bars()

    if several:
        print(format_table(summary(result)), f"\n{path}\n", sep="\n")
    else:
        saved = RunDirectory(path).read_config()
        if run.prompts not in (None, saved.get("prompts")):  # a run that was finished before has samples of its own
            result = result | {"samples": []}
        print(*ending(path, result, saved), sep="\n")
    return float(result["val_loss"])


def prepare(flags: Namespace) -> list[str]:
    """The overrides for Hydra's grammar. Raises UserError for a sweep whose runs would all have one directory."""
    kinds = kinds_of(RunConfig)
    for override in flags.overrides:
        require(not flags.multirun or key_of(override) != "plan_only", override, "one run, without -m")
        if flags.multirun and re.fullmatch(r"run_dir=(?!null$)[^,$]+", override):
            raise UserError(f"{override}: a sweep needs a directory for each run; leave run_dir out")
        if re.match(r"\+*ablation[.=]", override):  # Hydra would find a group without a place
            raise UserError(no_such_key(override, kinds, flags.overrides))
        if is_question(override):
            raise UserError(f"{override}: is a question; did you mean {command_line('ablate', override)}?")
    overrides = with_text(flags.overrides, kinds)
    typed.clear()
    typed.update(map(key_of, overrides))
    words = [quoted(word, kinds, flags.multirun and word in flags.overrides) for word in overrides]
    return with_recipe(words, flags.config_dir)


def run(args: list[str]) -> None:
    register("train", RunConfig)
    run_hydra(program, args, kinds_of(RunConfig), prepare)
    if len(finished) > 1:
        print(format_table(sweep(finished)))
