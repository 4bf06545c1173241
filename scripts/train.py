"""Train one run: python scripts/train.py [group=choice] [key=value ...]

The same command again resumes a run that was interrupted and shows the table of one that is finished. With -m,
comma-separated values make a run each: python scripts/train.py -m head=tied,untied seed=0,1,2
"""

import sys
from typing import Any

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config import RunConfig
from lm.data.corpus import look_for
from lm.system.table import table

finished: list[tuple[str, dict[str, Any]]] = []


def main(run: RunConfig) -> None:
    look_for(run.data, run.tokenizer)
    with heavy_imports():
        from lm.training.train import leads, run_directory, train

    result = train(run)
    if not leads():
        return
    place = run_directory(run)
    finished.append((place.name, result))
    print(table(summary(result)), f"\n{place}\n", sep="\n")
    for sample in result["samples"] if not {"-m", "--multirun"} & set(sys.argv) else ():
        print(f"--- {sample['prompt']} >>> {sample['continuation']}\n")


def summary(result: dict[str, Any]) -> list[tuple[str, str]]:
    roles = ", ".join(f"{role} {count:,}" for role, count in result["n_params_by_role"].items())
    baselines = ", ".join(f"{name} {bits:.3f}" for name, bits in result["baselines_bpb"].items())
    return [
        ("validation loss", f"{result['val_loss']:.4f} nats per token"),
        ("bits per byte", f"{result['val_bpb']:.3f} ({baselines})"),
        ("top-1 accuracy", f"{result['val_top1']:.1%}"),
        ("parameters", f"{result['n_params']:,} ({roles})"),
        ("training", f"{result['steps']:,} steps, {result['tokens']:,} tokens"),
        ("time", f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens per second"),
    ]


def comparison() -> list[tuple[str, ...]]:
    """The runs of a sweep side by side."""

    def row(name: str, result: dict[str, Any]) -> tuple[str, ...]:
        scores = (f"{result[key]:.4f}" for key in ("val_loss", "val_bpb", "val_top1"))
        return (name, *scores, f"{result['n_params']:,}", f"{result['seconds']:.0f}")

    head = ("run", "val_loss", "val_bpb", "val_top1", "parameters", "seconds")
    return [head, *(row(name, result) for name, result in finished)]


if __name__ == "__main__":
    launch(main, RunConfig, "train", at_end=lambda: len(finished) > 1 and print(table(comparison())))
