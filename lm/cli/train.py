"""Train one run: lm-lab train [group=choice] [key=value ...]

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

from lm.cli.compose import current_overrides, quoted, register, run_hydra, to_dataclass
from lm.cli.main import job
from lm.cli.mistakes import CONFIGS, kinds_of
from lm.cli.tables import comparison, over_seeds, samples, summary
from lm.config import RunConfig, UserError
from lm.config.checks import without_secrets
from lm.data.paths import check_paths
from lm.system.terminal import format_table, is_first_process

SCHEMA = RunConfig
finished: list[tuple[str, str, dict[str, Any]]] = []  # a run's name, its overrides without the seed, its result


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
@job
def program(config: DictConfig) -> float | None:
    """Train what Hydra has composed; the validation loss is what a sweeper that searches minimises."""
    overrides, several = current_overrides(), HydraConfig.get().mode == RunMode.MULTIRUN
    run = to_dataclass(config, overrides, RunConfig)
    if several and run.trainer.world_size > 1:
        raise UserError(f"trainer.devices={run.trainer.devices}: a sweep trains each run in one process; leave -m out")
    if run.run_dir is None or not (Path(run.run_dir).expanduser() / "result.json").exists():
        check_paths(run.data, run.tokenizer)
    from lm.training.train import train

    path, result = train(run)
    if not is_first_process():
        return None
    varied = [
        without_secrets(override) for override in overrides if override.partition("=")[0] not in ("seed", "run_dir")
    ]
    finished.append((path.name, " ".join(varied) or "the defaults", result))
    print(format_table(summary(result)), f"\n{path}\n", sep="\n")
    if result["samples"] and not several:
        print(samples(result["samples"], own=run.prompts is not None), end="\n\n")
    return float(result["val_loss"])


def prepare(flags: Namespace) -> list[str]:
    """The overrides for Hydra's grammar. Raises UserError for a sweep whose runs would all have one directory."""
    for override in flags.overrides:
        if flags.multirun and re.fullmatch(r"run_dir=(?!null$)[^,$]+", override):
            raise UserError(f"{override}: a sweep needs a directory for each run; leave run_dir out")
    return [quoted(override, kinds_of(RunConfig), flags.multirun) for override in flags.overrides]


def run(args: list[str]) -> None:
    register("train", RunConfig)
    run_hydra(program, args, kinds_of(RunConfig), prepare)
    if len(finished) > 1:
        print(format_table(comparison([(name, result) for name, _, result in finished])))
    if rows := over_seeds([(settings, result) for _, settings, result in finished]):
        print("", format_table(rows), sep="\n")
