"""The tables that train and evaluate print."""

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean, stdev
from typing import Any

from lm.data.ngram import ngram_figure
from lm.system.terminal import duration

Rows = list[tuple[str, ...]]
Named = list[tuple[str, dict[str, Any]]]  # results with the names of their runs, or with their settings


def summary(result: dict[str, Any]) -> Rows:
    roles = ", ".join(f"{role} {count:,}" for role, count in result["n_params_by_role"].items())
    ngram = f" ({figure})" if (figure := ngram_figure(result)) else ""
    trained = result["n_params_trained"]
    of_which = f", {trained:,} of which train" if trained < result["n_params"] else ""
    return [
        ("validation loss", f"{result['val_loss']:.4f} nats per token"),
        ("bits per byte", f"{result['val_bpb']:.3f}{ngram}"),
        ("top-1 accuracy", f"{result['val_top1']:.1%}"),
        ("parameters", f"{result['n_params']:,} ({roles}){of_which}"),
        ("training", f"{result['steps']:,} steps, {result['tokens']:,} tokens"),
        ("time", f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens per second"),
    ]


def plan(forecast: dict[str, Any]) -> Rows:
    """What a run would take."""
    length, text = f"{forecast['steps']:,} steps", f"{forecast['train_text_tokens']:,} tokens"
    resumed = f", to be resumed after step {forecast['steps_done']:,}" if forecast["steps_done"] else ""
    device = "this machine" if forecast["devices"] == 1 else f"one of {forecast['devices']} devices"
    return [
        ("run", forecast["run_dir"] + resumed),
        ("parameters", f"{forecast['n_params']:,}, vocabulary of {forecast['vocab_size']:,}"),
        ("training", f"{length}, which read the text of {text} {forecast['readings']:.1f} times"),
        ("memory", f"at least {forecast['least_bytes'] / 1e6:,.0f} MB"),
        ("time", f"about {duration(forecast['seconds'])}, by ten steps on {device}{forecast['busy']}"),
    ]


def comparison(results: Named) -> Rows:
    """The runs of a sweep side by side, each with the name of its run."""
    rows: Rows = [("run", "val_loss", "val_bpb", "val_top1", "parameters", "seconds")]
    for name, result in results:
        scores = (f"{result[key]:.4f}" for key in ("val_loss", "val_bpb", "val_top1"))
        rows.append((name, *scores, f"{result['n_params']:,}", f"{result['seconds']:.0f}"))
    return rows


def over_seeds(results: Named) -> Rows:
    """The mean val_loss of runs with equal settings, its standard deviation and error; no rows if no seeds differ.

    Each result comes with the settings of its run without the seed.
    """
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for settings, result in results:
        losses[settings][result["seed"]] = result["val_loss"]
    rows: Rows = []
    for settings, by_seed in losses.items():
        if len(by_seed) > 1:
            sd = stdev(by_seed.values())
            figures = (f"{value:.4f}" for value in (fmean(by_seed.values()), sd, sd / math.sqrt(len(by_seed))))
            rows.append((settings, str(len(by_seed)), *figures))
    return [("settings", "seeds", "mean val_loss", "sd", "standard error"), *rows] if rows else []


def score_table(scores: list[dict[str, Any]], several: bool) -> Rows:
    """The scores of evaluate without the details: a row for each figure, or one for each run and text."""
    plain = [
        {key: value for key, value in score.items() if not isinstance(value, list) and key != "frequency_in"}
        for score in scores
    ]
    if several:
        return [tuple(plain[0]), *(tuple(map(_number, score.values())) for score in plain)]
    return [(key, _number(value)) for key, value in plain[0].items() if key not in ("run", "text")]


def detail_tables(scores: list[dict[str, Any]], several: bool) -> Iterator[tuple[str, Rows]]:
    """Titles and tables: calibration, and the loss by the frequency of the target."""
    for score in scores:
        if "ece" not in score:
            continue
        place = f" ({score['run']}, {score['text']})" if several else ""
        rows: Rows = [("probability", "mean", "accuracy", "tokens")]
        for row in score["calibration"]:
            bounds = f"{row['from']:.1f} to {row['to']:.1f}"
            rows.append((bounds, f"{row['confidence']:.4f}", f"{row['accuracy']:.4f}", f"{row['tokens']:,}"))
        yield f"Calibration of the most probable token{place}", rows
        rows = [("band", "vocabulary", f"occurrences in {score['frequency_in']}", "loss", "tokens")]
        for row in score["by_frequency"]:
            bounds = f"{row['least']:,} to {row['most']:,}"
            rows.append((str(row["band"]), str(row["vocabulary"]), bounds, _number(row["loss"]), f"{row['tokens']:,}"))
        yield f"Loss by the frequency of the target{place}", rows


def _number(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else "beyond e^700" if value is None else str(value)
