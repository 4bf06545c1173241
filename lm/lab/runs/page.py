"""One page about one run: its scores, curves, settings that differ from the defaults, and samples."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lm.cli.train import beginning, score_table
from lm.config import classes_word, flat
from lm.errors import UserError
from lm.folder import read_result
from lm.lab.report.figures import COLOURS, INK, SOFT, as_svg, axis_limits, inline, legend, panels, tokens_axis
from lm.lab.report.pages import render
from lm.lab.runs.curves import curve, read_curves, tail
from lm.lab.runs.find import FoundRun, described_settings, read_run
from lm.system.files import write_text
from lm.system.terminal import to_override_value
from lm.training.run_directory import read_samples

MAX_TIMES = 5  # times during training whose samples are shown
FACTS = ("head", "seed", "flops_per_token", "device", "cpu", "precision", "threads", "python", "resumed_from")
HASHES = ("config_hash", "data_hash", "tokenizer_hash")


def write_page(run_dir: Path, defaults: Mapping[str, Any]) -> str:
    """Write report.html into the directory of a run, finished or not, and return what it says in a line.

    `defaults` are the settings of a run for which nothing was chosen. Raises UserError if `run_dir` holds no run.
    """
    run = read_run(run_dir, run_dir.resolve().name)
    if run.status == "broken":
        raise UserError(f"run_dir={run_dir}: {run.note}")
    result, curves = read_result(run_dir / "result.json") or {}, read_curves(run_dir)
    samples = _samples(run, result)
    svg = as_svg(draw_curves, curves, (result.get("best") or {}).get("step"))
    context = {
        "title": run.name,
        "run": run,
        "has_model": (run_dir / "model/config.json").exists(),
        "address": shlex.join([f"run_dir={run_dir}", *classes_word(run.settings)]),
        "scores": score_table(result) if result else [],
        "svg": svg and inline(svg, "Losses and the learning rate over training tokens"),
        "settings": [*_settings(run, flat(dict(defaults)))],
        "prompt": shlex.quote(beginning(samples[0][0] if samples else "Once upon a time")),
        "samples": samples,
        "facts_of_run": [*_facts(result)] if result else [],
    }
    write_text(run_dir / "report.html", render("run.html.j2", **context))
    return f"{run_dir / 'report.html'}: {run.status}{f', {run.note}' * bool(run.note)}"


def draw_curves(frame: pd.DataFrame, kept_step: int | None = None) -> Figure | None:
    losses = {name: curve(frame, name) for name in ("train/loss", "val/loss")}
    if not any(map(len, losses.values())):
        return None
    figure, (above, below) = panels(2, 2.2, 0.5, sharex=True, height_ratios=[2, 1])
    for (name, values), color, marker in zip(losses.items(), (COLOURS[5], INK), (None, "o"), strict=True):
        if len(values):
            above.plot(values.index, values, color=color, marker=marker, lw=1.2, label=name)
    for tokens in frame.index[frame["step"] == kept_step] if kept_step else ():
        above.axvline(tokens, color=SOFT, linestyle=":", lw=1, label=f"step {kept_step:,}, kept")
    late = [value for values in losses.values() for value in tail(values, 10)]
    above.set(ylabel="nats per token")
    above.set_ylim(axis_limits(late, [value for values in losses.values() for value in values]))
    rates = curve(frame, "lr")
    below.plot(rates.index, rates, color=COLOURS[0])
    below.set(ylabel="learning rate", ylim=(0, None))
    tokens_axis(below)
    legend(figure, above)
    return figure


def _settings(run: FoundRun, defaults: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings that differ from the defaults. What is null does nothing, or follows from another setting."""
    for key, decided in described_settings(run.settings).items():
        value = run.settings.get(f"requested.{key}", decided)  # the machine and the text decide what is left open
        if value is None or value == defaults.get(key):
            continue
        if key in defaults or key.startswith("trainer."):
            yield key, to_override_value(value), to_override_value(defaults.get(key))


def _samples(run: FoundRun, result: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each prompt with its continuations, those during training first."""
    times = read_samples(run.path / "samples.jsonl")
    if len(times) > MAX_TIMES:
        times = [times[i * (len(times) - 1) // (MAX_TIMES - 1)] for i in range(MAX_TIMES)]
    by_prompt: dict[str, list[tuple[str, str]]] = {}
    steps = [(f"after {row['step']:,} steps", row["samples"]) for row in times]
    for when, pairs in [*steps, ("after the last step", result.get("samples", []))]:
        for pair in pairs:
            texts = by_prompt.setdefault(pair.get("prompt", ""), [])
            texts += [(f"{when}, greedy", pair.get("continuation", "")), (f"{when}, drawn", pair.get("drawn", ""))]
    return [*by_prompt.items()]


def _facts(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in FACTS:
        if result.get(name, []) != []:
            yield name.replace("_", " "), result[name]
    for name in HASHES:
        yield name.replace("_", " "), result[name][:16]
    yield "packages", ", ".join(f"{name} {number}" for name, number in result["versions"].items())
