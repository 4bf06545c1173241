"""Train one run: lm-lab train [group=choice] [key=value ...]

The same command again resumes a run that was interrupted and shows the table of one that is finished; so does
lm-lab train run_dir=RUN, with the settings of that run. With -m, comma-separated values make a run each:
lm-lab train -m head=tied,untied seed=0,1,2
"""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.cli.resume import as_it_was
from lm.cli.summary import comparison, over_seeds, samples, summary
from lm.config import RunConfig
from lm.data.paths import check_paths
from lm.system.terminal import is_first_process
from lm.system.table import format_table

finished: list[tuple[str, str, dict[str, Any]]] = []  # a run's name, its overrides without the seed, its result


def task(run: RunConfig) -> None:
    hydra = HydraConfig.get()
    run = as_it_was(run, list(hydra.overrides.task))
    check_paths(run.data, run.tokenizer)
    with heavy_imports():
        from lm.training.train import train

    place, result = train(run)
    if not is_first_process():
        return
    words = [word for word in hydra.overrides.task if word.partition("=")[0] not in ("seed", "run_dir")]
    finished.append((place.name, " ".join(words) or "the defaults", result))
    print(format_table(summary(result)), f"\n{place}\n", sep="\n")
    if hydra.mode != RunMode.MULTIRUN and result["samples"]:
        print(samples(result["samples"], own=run.prompts is not None))


def compare() -> None:
    if len(finished) > 1:
        print(format_table(comparison([(name, result) for name, _, result in finished])))
    if rows := over_seeds([(settings, result) for _, settings, result in finished]):
        print("", format_table(rows), sep="\n")


def main(line: list[str] | None = None) -> None:
    launch(task, RunConfig, "train", line, resumable=True, at_end=compare)
