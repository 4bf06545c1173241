"""What train prints of its runs: a table of each, its samples, and several runs side by side."""

import math
from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

from lm.system.terminal import printable


def summary(result: dict[str, Any]) -> list[tuple[str, str]]:
    roles = ", ".join(f"{role} {count:,}" for role, count in result["n_params_by_role"].items())
    baselines = ", ".join(f"{name} {bits:.3f}" for name, bits in result["baselines_bpb"].items())
    trained = result["n_params_trained"]
    train = f", {trained:,} of which train" if trained < result["n_params"] else ""
    return [
        ("validation loss", f"{result['val_loss']:.4f} nats per token"),
        ("bits per byte", f"{result['val_bpb']:.3f} ({baselines})"),
        ("top-1 accuracy", f"{result['val_top1']:.1%}"),
        ("parameters", f"{result['n_params']:,} ({roles}){train}"),
        ("training", f"{result['steps']:,} steps, {result['tokens']:,} tokens"),
        ("time", f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens per second"),
    ]


def comparison(results: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, ...]]:
    """The runs of a sweep side by side, each as its name and its result."""

    def row(name: str, result: dict[str, Any]) -> tuple[str, ...]:
        scores = (f"{result[key]:.4f}" for key in ("val_loss", "val_bpb", "val_top1"))
        return (name, *scores, f"{result['n_params']:,}", f"{result['seconds']:.0f}")

    head = ("run", "val_loss", "val_bpb", "val_top1", "parameters", "seconds")
    return [head, *(row(name, result) for name, result in results)]


def over_seeds(results: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, ...]]:
    """The mean val_loss of runs with equal settings, its standard deviation and error; no rows if no seeds differ.

    Each run is given as its settings without the seed, and its result.
    """
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for settings, result in results:
        losses[settings][result["seed"]] = result["val_loss"]
    rows = []
    for settings, of in losses.items():
        if len(of) > 1:
            spread = stdev(of.values())
            figures = (f"{value:.4f}" for value in (fmean(of.values()), spread, spread / math.sqrt(len(of))))
            rows.append((settings, str(len(of)), *figures))
    return [("settings", "seeds", "mean val_loss", "sd", "standard error"), *rows] if rows else []


def samples(pairs: list[dict[str, str]], own: bool) -> str:
    """Prompts and what the model makes of them, each line labelled; `own` where the user gave the prompts.

    >>> print(samples([{"prompt": "def f(x):", "continuation": chr(10) + "    return x" + chr(27)}], own=True))
    Samples (greedy)
    <BLANKLINE>
      prompt | def f(x):
      model  |
             |     return x\\x1b
    <BLANKLINE>
    """
    heading = "Samples (greedy)" if own else "Samples (greedy; prompts from the validation text)"
    shown = [block("prompt", pair["prompt"]) + block("model", pair["continuation"]) for pair in pairs]
    return "\n\n".join([heading, *("\n".join(lines) for lines in shown)]) + "\n"


def block(label: str, text: str) -> list[str]:
    labels = [label, *[""] * text.count("\n")]
    return [f"  {name:6} | {printable(line)}".rstrip() for name, line in zip(labels, text.split("\n"), strict=True)]
