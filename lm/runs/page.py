"""One page about one run: its scores, curves, size, settings that differ from the defaults, and samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lm.ablation.report.text import few_lines
from lm.config import UserError
from lm.config.identity import RESOLVED, flat, hashed_settings
from lm.report.metrics import FILE, Points, after, points, read_lines
from lm.report.page import code, fence, page, plain, table
from lm.report.plots import drawing, legend, panels, tokens_axis, window
from lm.runs.find import FoundRun, read_run
from lm.system.files import write_text
from lm.system.terminal import printable, to_override_value
from lm.training.run_directory import read_result, read_samples

SHOWN = 5  # times during training whose samples are shown
FACTS = ("head", "seed", "device", "cpu", "precision", "threads", "python", "resumed_from")
HASHES = ("config_hash", "data_hash", "tokenizer_hash")
Curves = dict[str, Points]


def write_page(run_dir: Path, defaults: Mapping[str, Any]) -> str:
    """Write report.html into the directory of a run, finished or not; returns what it says in a line.

    `defaults` are the settings of a run for which nothing was chosen. Raises UserError if `run_dir` holds no run.
    """
    run = read_run(run_dir, run_dir.resolve().name)
    if run.status == "broken":
        raise UserError(run.note)
    result = read_result(run_dir / "result.json") or {}
    pictures: dict[str, str] = {}
    parts = [
        f"# {shown(run.name)}",
        *(scores(result) if result else [f"**{plain(run.status)}**: {shown(run.note)}"]),
        *curves_section(run, pictures),
        *(size(result) if result else []),
        *settings_section(run, flat(dict(defaults))),
        *samples_section(run, result),
        *(facts(result) if result else []),
    ]
    html = page(printable(run.name), "\n\n".join(parts) + "\n", pictures)
    write_text(run_dir / "report.html", html)
    return f"{run_dir / 'report.html'}: {run.status}{f', {run.note}' * bool(run.note)}"


def shown(text: Any) -> str:
    """Text from outside as Markdown."""
    return plain(printable(" ".join(str(text).split())))


def scores(result: Mapping[str, Any]) -> list[str]:
    baselines = ", ".join(f"{name} {bits:.3f}" for name, bits in result["baselines_bpb"].items())
    epochs = result["tokens"] / result["train_text_tokens"]
    rows = [
        ["validation loss", f"{result['val_loss']:.4f} nats per token"],
        ["bits per byte", f"{result['val_bpb']:.4f}"],
        ["bits per byte of compressors", shown(baselines)],
        ["top-1 accuracy", f"{result['val_top1']:.2%}"],
        ["scored on", f"{result['val_tokens']:,} tokens"],
        ["training", f"{result['steps']:,} steps, {result['tokens']:,} tokens, {epochs:.2f} epochs"],
        ["time", f"{result['seconds']:,.0f} s, {result['tokens_per_second']:,.0f} tokens per second"],
    ]
    return [table(["score", "value"], rows)]


def curves_section(run: FoundRun, pictures: dict[str, str]) -> list[str]:
    lines = read_lines(run.path / FILE)
    found = {name: points(lines, name) for name in ("train/loss", "val/loss", "lr")}
    if not found["train/loss"] and not found["val/loss"]:
        return []
    pictures["curves"] = curves(found)
    return [
        "## Curves",
        "Training loss of single batches and validation loss, in nats per token; below, the learning rate. Validations "
        "during training are estimates, the one after the last step is of the whole validation text.",
        "![Training and validation loss and the learning rate over training tokens](curves.svg)",
    ]


@drawing
def curves(found: Curves) -> Figure:
    figure, (above, below) = panels(2, 2.2, 0.5, sharex=True, height_ratios=[2, 1])
    for name, color, marker in (("train/loss", "#56B4E9", None), ("val/loss", "#000000", "o")):
        if found[name]:
            above.plot(*zip(*found[name].items(), strict=True), color=color, marker=marker, lw=1.2, label=name)
    losses = [found["train/loss"], found["val/loss"]]
    late = [value for one in losses for value in after(one, 10)]
    above.set(ylabel="nats per token", ylim=window(late, [value for one in losses for value in one.values()]))
    if found["lr"]:
        below.plot(*zip(*found["lr"].items(), strict=True), color="#0072B2")
    below.set(ylabel="lr", ylim=(0, None))
    tokens_axis(below)
    legend(figure, above)
    return figure


def size(result: Mapping[str, Any]) -> list[str]:
    n_params, roles = result["n_params"], result["n_params_by_role"]
    rows = [[shown(role), f"{count:,}", f"{100 * count / max(1, n_params):.1f} %"] for role, count in roles.items()]
    rows.append(["**all**", f"{n_params:,}", ""])
    flops = f"{result['flops_per_token']:,} FLOPs per token, forward and backward."
    return ["## Size", table(["role", "parameters", "share"], rows), flops]


def settings_section(run: FoundRun, defaults: Mapping[str, Any]) -> list[str]:
    own = {key: value for key, value in hashed_settings(run.settings).items() if key not in RESOLVED}
    trainer = {key for key in own if key.startswith("trainer.")}
    rows = [
        [shown(key), shown(to_override_value(own[key])), shown(to_override_value(defaults.get(key)))]
        for key in own
        if (key in defaults or key in trainer) and own[key] != defaults.get(key)
    ]
    if not rows:
        return ["## Settings", "All settings are the defaults."]
    return ["## Settings that differ from the defaults", table(["setting", "value", "default"], rows)]


def samples_section(run: FoundRun, result: Mapping[str, Any]) -> list[str]:
    """Each prompt with its continuations, those during training first."""
    times = read_samples(run.path / "samples.jsonl")
    chosen = [times[i * (len(times) - 1) // (SHOWN - 1)] for i in range(SHOWN)] if len(times) > SHOWN else times
    found: dict[str, list[tuple[str, str]]] = {}
    steps = [(f"after {row['step']:,} steps", row["samples"]) for row in chosen]
    for when, pairs in [*steps, ("at the end", result.get("samples", []))]:
        for pair in pairs:
            found.setdefault(pair.get("prompt", ""), []).append((when, pair.get("continuation", "")))
    parts = ["## Samples", "Greedy continuations."] if found else []
    for prompt, texts in found.items():
        parts += ["**Prompt**", fence(block(prompt))]
        for when, text in texts:
            parts += [when, fence(block(text))]
    return parts


def block(text: str) -> str:
    return few_lines(printable(text))


def facts(result: Mapping[str, Any]) -> list[str]:
    rows = [[name.replace("_", " "), shown(result[name])] for name in FACTS if result.get(name, []) != []]
    rows += [[name.replace("_", " "), code(result[name])] for name in HASHES]
    rows.append(["packages", shown(", ".join(f"{name} {number}" for name, number in result["versions"].items()))])
    return ["## How it was made", table(["what", "value"], rows)]
